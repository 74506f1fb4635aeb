"""The engines as we know them: endpoints, what is queued on them, how fast they are, whether they are well."""

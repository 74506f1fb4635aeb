"""New versions of a pool in small steps: the plan, who gets which version, whether the new one is worse, and what then."""

"""Decision record and ring, metric definitions, log fields."""

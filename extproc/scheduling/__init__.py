"""Which endpoint: candidate filters, cost terms in seconds, strategies. Add a strategy with a file and a registry line."""

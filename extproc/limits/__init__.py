"""How much whom is given: limits by scope, token buckets, reserve on arrival and settle at the end."""

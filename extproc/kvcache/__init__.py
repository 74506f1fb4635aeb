"""What each endpoint's KV cache holds: chained block hashes and the indexes over them."""

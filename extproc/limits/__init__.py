"""Token buckets with reserve and settle."""

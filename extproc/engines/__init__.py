"""One adapter an engine: its metric names, health path, adapter and KV-event dialect. Add a file and a registry line."""

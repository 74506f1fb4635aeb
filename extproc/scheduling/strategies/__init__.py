"""One file a strategy. The registry gives each its name in the configuration."""

"""Load generator and benchmarks of the gateway. Nothing in ``extproc`` imports this package."""

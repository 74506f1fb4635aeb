"""extproc.yaml and clusters.yaml: schema, loading with file and line, immutable snapshots."""

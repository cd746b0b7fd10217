"""Training with virtual workers: many replicas in one process, with the same engine as between processes."""

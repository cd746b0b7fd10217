"""The edges to Lightning and DDP: what exchanges gradients, checkpoints, signals, optimizers."""

"""``safusion demo``: the same small training under plain DDP, under fusion before selection, and under SAFusion."""

"""How long rows train over a link until they are nearly as good as DDP."""

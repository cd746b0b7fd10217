"""``safusion demo``: the same small training under plain DDP, under fusion before selection, and under SAFusion."""

from lightning_safusion.demo.run import run_demo

__all__ = ["run_demo"]

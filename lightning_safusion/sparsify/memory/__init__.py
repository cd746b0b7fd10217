"""Error feedback: what a gradient adds to, and what is left there once a selection was sent."""

from lightning_safusion.sparsify.memory.contract import Memory
from lightning_safusion.sparsify.memory.momentum import DGCMemory, EF21Memory
from lightning_safusion.sparsify.memory.residual import (
    AutoMemory,
    DecoupledMomentum,
    NoMemory,
    ResidualMemory,
    resolve_memory,
)

__all__ = [
    "AutoMemory",
    "DGCMemory",
    "DecoupledMomentum",
    "EF21Memory",
    "Memory",
    "NoMemory",
    "ResidualMemory",
    "resolve_memory",
]

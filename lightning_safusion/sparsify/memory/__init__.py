"""Error feedback: memories that keep the residual."""

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

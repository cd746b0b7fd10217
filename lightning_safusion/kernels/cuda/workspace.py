"""Memory of the kernels, and what they are told of a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_safusion.kernels.cuda.tables import Tables
from lightning_safusion.sparsify.selection.view import device_constant


class Weighing(NamedTuple):
    """What the optimizer divides gradients by, where keys are compared.

    Args:
        moments: Second moments, flat; None for a tensor whose elements are their own keys.
        epsilons: What is added to their roots.
        keys: int32 [N], is written.
    """

    moments: Sequence[Tensor | None]
    epsilons: Sequence[float]
    keys: Tensor


class Workspace:
    """Memory that the selections of all buffers of one stream use in turn.

    Attributes:
        unscaled: float32 [2], the factor of a loss that is not scaled, and its reciprocal.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.int32, device=device)
        self.unscaled = torch.ones(2, dtype=torch.float32, device=device)

    def take(self, sizes: Sequence[int], zeros: int) -> list[Tensor]:
        """int32 vectors that lie one behind the other, the first ``zeros`` of them filled with zeros at once.

        Each begins at a multiple of 16 bytes: kernels load four numbers at once, and are compiled anew where one does
        not.
        """
        ends = list(accumulate((-(-size // 4) * 4 for size in sizes), initial=0))
        if len(self._memory) < ends[-1]:
            self._memory = torch.empty(ends[-1], dtype=torch.int32, device=self._memory.device)
        self._memory[: ends[zeros]].zero_()
        return [self._memory[at : at + size] for at, size in zip(ends, sizes, strict=False)]

    def release(self) -> None:
        """Frees the memory. The host does not wait: the allocator keeps it for the stream on which it was taken, where
        what takes it next comes behind all that uses it now."""
        self._memory = self._memory.new_empty(0)


@dataclass(frozen=True, eq=False)
class Constants:
    """Tables of a buffer on its device."""

    tensors: Tensor
    shape: Tensor
    chunks: Tensor

    @classmethod
    def of(cls, tables: Tables, device: torch.device) -> Constants:
        """Copies them there."""
        return cls(*(device_constant(array, device) for array in (tables.tensors, tables.described, tables.chunks)))

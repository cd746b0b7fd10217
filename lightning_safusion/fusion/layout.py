"""The flat gradient space: which tensor lies where. Immutable values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.fusion.plans.pricing import element_edges


@dataclass(frozen=True)
class TensorSpec:
    """One parameter's gradient, as it arrives."""

    name: str  #: fully qualified parameter name; identifies the tensor across runs
    index: int  #: place in the model's list of parameters; identifies it within a run, the same on all ranks
    shape: tuple[int, ...]  #: logical shape
    numel: int  #: elements on arrival (a complex parameter arrives as twice as many real ones)
    dtype: torch.dtype  #: floating-point dtype on arrival
    dense: bool = False  #: always dense
    #: Order of the elements on arrival, that of the parameter in memory (``channels_last``), with the pair of a complex
    #: number as a last dimension; None if they arrive in logical order.
    strides: tuple[int, ...] | None = None

    def logical(self, flat: Tensor) -> Tensor:
        """A view of arrived elements [numel] as the parameter: ``shape``, and [..., 2] of a complex one."""
        real = self.numel == math.prod(self.shape)
        shape = self.shape if real else (*self.shape, 2)
        return flat.view(shape) if self.strides is None else flat.as_strided(shape, self.strides)


@dataclass(frozen=True, eq=False)
class Layout:
    """Tensors one after another, in the order in which their gradients become ready.

    The word *place* is a tensor's position in this order.
    """

    specs: tuple[TensorSpec, ...]

    def __len__(self) -> int:
        return len(self.specs)

    @cached_property
    def edges(self) -> np.ndarray:
        """int64 [L + 1]: the tensor at place ``i`` owns the elements ``[edges[i], edges[i + 1])``."""
        return element_edges([spec.numel for spec in self.specs])

    @cached_property
    def places(self) -> dict[int, int]:
        """Place of each registration index."""
        return {spec.index: place for place, spec in enumerate(self.specs)}

    @cached_property
    def indices(self) -> np.ndarray:
        """int64 [L]: registration index of the tensor at each place."""
        return np.array([spec.index for spec in self.specs], np.int64)

    @property
    def numel(self) -> int:
        """Elements of the whole space."""
        return int(self.edges[-1])

    def names(self, places: Iterable[int]) -> list[str]:
        """Names of the tensors at these places."""
        return [self.specs[place].name for place in places]

    def reordered(self, order: Sequence[int]) -> Layout:
        """The layout whose place ``j`` holds what was at place ``order[j]``."""
        return Layout(tuple(self.specs[place] for place in order))


def specs_from_parameters(
    named_parameters: Iterable[tuple[str, Tensor]],
    dense: Sequence[str] = (),
    dense_below: int = 0,
    dense_below_ndim: int = 0,
) -> tuple[TensorSpec, ...]:
    """Describes the gradients of trainable parameters.

    Args:
        named_parameters: Names and parameters, in registration order; frozen ones are left out.
        dense: Shell patterns of the names of dense tensors (``"*.bias"``).
        dense_below: Tensors of fewer elements than this are dense.
        dense_below_ndim: Tensors of fewer dimensions than this are dense.

    Raises:
        ValueError: If a pattern matches no parameter.
    """
    trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
    for pattern in dense:
        if not any(fnmatchcase(name, pattern) for name, _ in trainable):
            names = ", ".join(name for name, _ in trainable[:8])
            raise ValueError(f"dense pattern {pattern!r} matches no trainable parameter; names look like {names}")
    specs = []
    for index, (name, p) in enumerate(trainable):
        real = torch.view_as_real(p.detach()) if p.is_complex() else p.detach()
        small = real.numel() < dense_below or p.ndim < dense_below_ndim
        is_dense = small or any(fnmatchcase(name, pattern) for pattern in dense)
        specs.append(TensorSpec(name, index, tuple(p.shape), real.numel(), real.dtype, is_dense, _strides(real)))
    return tuple(specs)


def _strides(real: Tensor) -> tuple[int, ...] | None:
    """Strides of a gradient in DDP: those of its parameter if that has no gaps and no overlaps, else None."""
    gapless = torch.empty_like(real, device="meta").stride() == real.stride()
    return real.stride() if gapless and not real.is_contiguous() else None

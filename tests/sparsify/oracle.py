"""What selections must be, written out: brute force over a sort; inputs of every kind, and backends to compare."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.selection.native import NativeView
from lightning_safusion.sparsify.selection.survey import Foresight, History
from lightning_safusion.sparsify.selection.torch_view import TorchView
from lightning_safusion.sparsify.selection.view import NumpyView

needs_kernels = pytest.mark.skipif(not native.usable(), reason="the package was installed without a C compiler")
BACKENDS = [
    pytest.param(NumpyView, id="numpy"),
    pytest.param(NativeView, id="native", marks=needs_kernels),
    pytest.param(TorchView, id="torch"),
]
#: Whether compiled kernels are used, see :func:`kernels`.
KERNELS = [pytest.param(True, marks=needs_kernels), False]


def kernels(used: bool) -> AbstractContextManager[None]:
    return nullcontext() if used else native.unused()


def cut(sizes: Sequence[int], quotas: Sequence[int], pool: int = 0, keys: Sequence[Hashable] = ()) -> Segments:
    """Segments of these sizes, one behind the other; keys count from 0 unless they are given."""
    edges = np.cumsum([0, *sizes], dtype=np.int64)
    keys = tuple(keys or range(len(sizes)))
    return Segments(edges, np.array(quotas, np.int64), keys, tuple((size,) for size in sizes), pool)


def bits_of(x: Tensor) -> np.ndarray:
    return x.numpy().view(np.int32) & 0x7FFFFFFF


def best(x: Tensor, start: int, stop: int, k: int) -> list[int]:
    """The k largest of a piece, first ones among equals, ascending."""
    bits = bits_of(x)[start:stop].astype(np.int64)
    return sorted((np.argsort(-bits, kind="stable")[:k] + start).tolist())


def exact_top(x: Tensor, segments: Segments) -> list[int]:
    pieces = zip(segments.edges[:-1].tolist(), segments.edges[1:].tolist(), segments.quotas.tolist(), strict=True)
    return [index for start, stop, quota in pieces for index in best(x, start, stop, quota)]


def exact_take(x: Tensor, segments: Segments, thresholds: Sequence[float]) -> list[int]:
    result = []
    for s, (quota, threshold) in enumerate(zip(segments.quotas.tolist(), thresholds, strict=True)):
        start, stop = int(segments.edges[s]), int(segments.edges[s + 1])
        magnitude = x[start:stop].abs()
        found = int((magnitude > threshold).sum())
        result += best(x, start, stop, min(max(found, 1), quota, stop - start))
    return result


def exact_pooled(x: Tensor, segments: Segments) -> list[int]:
    """The floors of every segment, and the largest of what is left in segments that have one."""
    floors = exact_top(x, segments)
    if not floors:
        return []
    eligible = np.repeat(segments.quotas > 0, segments.sizes)
    eligible[floors] = False
    rest = np.flatnonzero(eligible)
    order = np.argsort(-bits_of(x)[rest].astype(np.int64), kind="stable")
    return sorted([*floors, *rest[order[: segments.pool]].tolist()])


def check(selection: Selection, x: Tensor, expected: Sequence[int]) -> None:
    """Whether a selection holds these positions, with the bits of ``x`` there."""
    assert int(selection.count) == len(expected)
    assert (selection.values[len(expected) :] == 0).all()  # padding
    assert ((selection.indices >= 0) & (selection.indices < len(x))).all()
    assert selection.indices[: len(expected)].tolist() == list(expected)
    chosen = x[selection.indices[: len(expected)]]
    assert torch.equal(selection.values[: len(expected)].view(torch.int32), chosen.view(torch.int32))


class Job:
    """A memory to which gradients of some tensors are added, while what will be selected is looked for.

    Args:
        sizes: Of the tensors.
        segments: The cut of the memory.
    """

    def __init__(self, sizes: Sequence[int], segments: Segments) -> None:
        self.edges: list[int] = np.cumsum([0, *sizes]).tolist()
        self.history, self.parts = History(segments), native.Parts.between(self.edges)
        self.ahead, self.memory = Foresight(self.history, self.edges), torch.zeros(self.edges[-1])

    def add(self, grads: Sequence[Tensor], compiled: bool = True) -> native.Survey | None:
        """What was found in the memory while gradients were added."""
        if compiled:
            return native.add_finite(self.memory, self.parts, grads, 1.0, self.ahead.wanted()).found
        self.memory += torch.cat(list(grads))
        return None

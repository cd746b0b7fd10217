"""Segmented selection on accelerators, in PyTorch operations only.

The host never waits: shapes are fixed by the segments, constants are copied once per segmentation, and what depends on
the data stays on the device. All segments are sorted at once; the sort is stable, so that of equals the first comes
first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.sparsify.base import Segments, Selection, constant_of_segments
from lightning_safusion.sparsify.selection.view import MAGNITUDE_BITS, SegmentedView, device_constant

_CHUNK = 4096  # elements summed by one thread block


@dataclass(frozen=True, eq=False)
class _Constants:
    """What depends on the segmentation only, on the device."""

    owner: Tensor  #: int64 [N], segment of each element
    edges: Tensor  #: int64 [M + 1]
    quotas: Tensor  #: int64 [M], no more than the size of the segment
    chunks: Tensor  #: int64 [C], lengths of chunks of at most ``_CHUNK`` elements, none of which crosses a segment
    chunks_per_segment: Tensor  #: int64 [M]
    total: int  #: sum of ``quotas``, known to the host

    @staticmethod
    @constant_of_segments
    def of(segments: Segments, device: torch.device) -> _Constants:
        sizes = segments.sizes
        number = -(-sizes // _CHUNK)
        chunks = np.full(int(number.sum()), _CHUNK, np.int64)
        last = np.cumsum(number)[sizes > 0] - 1
        chunks[last] = (sizes - (number - 1) * _CHUNK)[sizes > 0]
        quotas = np.minimum(segments.quotas, sizes)
        arrays = (segments.edges, quotas, chunks, number)
        edges, limits, lengths, numbers = (device_constant(array.astype(np.int64), device) for array in arrays)
        owner = torch.repeat_interleave(edges.diff(), output_size=segments.numel)
        return _Constants(owner, edges, limits, lengths, numbers, int(quotas.sum()))


def find_marked(mask: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """On any device, without waiting for it.

    Returns:
        int64 [capacity], ascending positions where ``mask`` (bool [N]) is true, then N; and how many there are, int64
        [1].
    """
    # searched for, not scattered: all elements that are not marked would go to one place
    upto, entries = mask.cumsum(0), torch.arange(capacity, device=mask.device)
    return torch.searchsorted(upto, entries, right=True), upto[-1:]


def compact(mask: Tensor, capacity: int) -> Tensor:
    """int64 [capacity], positions where ``mask`` [N] is true (no more than ``capacity``), then their places."""
    found, _ = find_marked(mask, capacity)
    return torch.where(found < len(mask), found, torch.arange(capacity, device=mask.device))


class TorchView(SegmentedView):
    """Selection in fixed shapes, without waiting for the device."""

    def __init__(self, x: Tensor, segments: Segments) -> None:
        self.x, self.segments = x, segments

    @cached_property
    def _fixed(self) -> _Constants:
        return _Constants.of(self.segments, self.x.device)

    @cached_property
    def _bits(self) -> Tensor:
        """int32 [N], of the magnitudes."""
        return self.x.detach().view(torch.int32) & MAGNITUDE_BITS

    def moments(self, *, magnitudes: bool = False) -> tuple[Tensor, Tensor]:
        elements = self.x.double()
        return self._sum(elements.abs() if magnitudes else elements), self._sum(elements.square())

    def log_abs_sums(self) -> tuple[Tensor, Tensor]:
        present = self._bits > 0
        logarithms = torch.where(present, self.x.abs(), 1.0).double().log()
        return self._sum(logarithms), self._count(present)

    def abs_max(self) -> Tensor:
        largest = torch.zeros(len(self.segments), dtype=torch.int32, device=self.x.device)
        return largest.scatter_reduce(0, self._fixed.owner, self._bits, "amax").view(torch.float32)

    def count_above(self, thresholds: Tensor, enough: Tensor | None = None) -> Tensor:
        return self._count(self._above(thresholds))

    def tail_moments(self, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        excess = self.x.abs() - thresholds[self._fixed.owner]
        number = self._count(excess > 0)
        excess = excess.clamp_(min=0).double()
        return number, self._sum(excess), self._sum(excess.square_())

    def _sum(self, elements: Tensor) -> Tensor:
        """float64 [M]; first in chunks, so that one large segment occupies the whole device, in a fixed order."""
        if elements.numel() == 0:
            return elements.new_zeros(len(self.segments))
        for lengths in (self._fixed.chunks, self._fixed.chunks_per_segment):
            elements = torch.segment_reduce(elements, "sum", lengths=lengths, unsafe=True, initial=0.0)
        return elements

    def _count(self, mask: Tensor) -> Tensor:
        """int64 [M], true elements of each segment."""
        return torch.nn.functional.pad(mask.cumsum(0), (1, 0))[self._fixed.edges].diff()

    def kth_largest(self, ranks: np.ndarray) -> Tensor:
        last = self.segments.edges[:-1] + np.minimum(ranks, self.segments.sizes)
        bits = torch.nn.functional.pad(self._bits[self._order], (1, 0))[device_constant(last, self.x.device)]
        return torch.where(device_constant(ranks > 0, self.x.device), bits.view(torch.float32), torch.inf)

    def top(self) -> Selection:
        mask = self._largest(self._fixed.quotas)
        indices = compact(mask, self._fixed.total)
        return Selection(indices, self.x[indices], self._fixed.total)

    def take(self, thresholds: Tensor) -> Selection:
        # No tie crosses a threshold, so what exceeds it is an exact top-k again, with a k known to the device only.
        quotas = self._fixed.quotas
        ranks = self._count(self._above(thresholds)).clamp_(min=1).minimum(quotas)
        return self._select(self._largest(ranks), self._fixed.total)

    def merge(self, floors: Selection, others: Selection, room: int) -> Selection:
        numel, most = self.x.numel(), min(room, len(others.indices))
        chosen = torch.zeros(numel + most, dtype=torch.bool, device=self.x.device)
        chosen.index_fill_(0, floors.indices, True)
        places = torch.arange(len(others.indices), device=self.x.device)
        free = (places < others.count) & ~chosen[others.indices]
        bits = torch.where(free, self._bits[others.indices], -1)
        bits, order = (part[:most] for part in bits.sort(descending=True, stable=True))
        # What was not chosen may repeat the position of something that was: each gets a place of its own, behind the
        # span. Additions would be made one after the other where algorithms are deterministic.
        behind = numel + torch.arange(most, device=self.x.device)
        chosen.index_fill_(0, torch.where(bits >= 0, others.indices[order], behind), True)
        return self._select(chosen[:numel], len(floors.indices) + room)

    def _above(self, thresholds: Tensor) -> Tensor:
        """bool [N], the elements whose magnitude exceeds the threshold of their segment: none exceeds NaN."""
        floors = thresholds.contiguous().view(torch.int32) & MAGNITUDE_BITS
        floors = torch.where(thresholds < 0, -1, floors)
        return self._bits > torch.where(thresholds.isnan(), MAGNITUDE_BITS, floors)[self._fixed.owner]

    def _select(self, mask: Tensor, capacity: int) -> Selection:
        """What ``mask`` [N] chooses, no more than ``capacity``, in a fixed shape."""
        indices = compact(mask, capacity)
        count = mask.sum()
        valid = torch.arange(capacity, device=self.x.device) < count
        return Selection(indices, torch.where(valid, self.x[indices], 0.0), count)

    @cached_property
    def _order(self) -> Tensor:
        """int64 [N], positions segment by segment, in each from the largest magnitude to the smallest."""
        keys = (self._fixed.owner << 31) + (MAGNITUDE_BITS - self._bits)
        return keys.sort(stable=True).indices

    def _largest(self, ranks: Tensor) -> Tensor:
        """bool [N], the ``ranks`` (int64 [M]) largest elements of each segment, the first ones among equals."""
        stops = self._fixed.edges[:-1] + ranks
        keep = torch.arange(self.x.numel(), device=self.x.device) < stops[self._fixed.owner]
        return torch.empty_like(keep).scatter_(0, self._order, keep)

"""Segmented selection in plain NumPy: the fallback without compiled kernels, and the oracle of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.sparsify.base import Segments, Selection, as_selection
from lightning_safusion.sparsify.selection.view import MAGNITUDE_BITS, SegmentedView

_BLOCK = 1 << 16  # elements whose logarithms are added in float32
_SMALL = 1 << 14


def order_floors(thresholds: np.ndarray) -> np.ndarray:
    """Integers such that ``bits > floor`` exactly where ``magnitude > threshold``."""
    limits = thresholds.astype(np.float32)
    # The sum makes -0.0 a zero; the bits of what is still negative are negative integers.
    floors: np.ndarray = np.maximum((limits + np.float32(0)).view(np.int32), -1)
    floors[np.isnan(limits)] = MAGNITUDE_BITS
    return floors


def largest_first(bits: np.ndarray, room: int) -> np.ndarray:
    """Places of the ``room`` largest, at equal magnitude the first; ascending."""
    if room >= len(bits):
        return np.arange(len(bits))
    if room == 0:
        return np.empty(0, np.int64)
    kth = np.partition(bits, len(bits) - room)[len(bits) - room]
    keep = bits > kth
    keep[np.flatnonzero(bits == kth)[: room - int(keep.sum())]] = True
    return np.flatnonzero(keep)


def merged(x: Tensor, floors: Selection, others: Selection, room: int) -> Selection:
    """:meth:`SegmentedView.merge` on the CPU, from the elements of ``x`` (float32 [N])."""
    kept, rest = floors.indices.numpy(), others.indices.numpy()[: int(others.count)]
    if len(kept):
        rest = rest[kept.take(kept.searchsorted(rest), mode="clip") != rest]
    magnitudes = x.detach().numpy()[rest].view(np.int32) & MAGNITUDE_BITS
    rest = rest[largest_first(magnitudes, room)]
    return as_selection(np.sort(np.concatenate([kept, rest]), kind="stable"), x)


def log_sums(x: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums (float64 [S]) of ln |x| over the non-zero elements of runs of float32 [N], and how many these are."""
    sums, present = np.zeros(len(starts)), np.zeros(len(starts), np.int64)
    runs = [x[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    small = np.flatnonzero(sizes <= _SMALL)
    if len(small):  # all of them together
        joined, firsts = np.concatenate([runs[i] for i in small]), np.cumsum(sizes[small]) - sizes[small]
        sums[small] = np.add.reduceat(_logarithms(joined), firsts)
        present[small] = np.add.reduceat(joined != 0, firsts, dtype=np.int64)
    for i in np.flatnonzero(sizes > _SMALL):
        present[i] = np.count_nonzero(runs[i])
        for start in range(0, len(runs[i]), _BLOCK):
            sums[i] += float(torch.from_numpy(_logarithms(runs[i][start : start + _BLOCK])).sum())
    return sums, present


def _logarithms(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        logarithms: np.ndarray = np.log(np.where(x == 0, np.float32(1), np.abs(x)))  # a zero adds nothing
    return logarithms


class NumpyView(SegmentedView):
    """Selection segment by segment with a partition of each."""

    def __init__(self, x: Tensor, segments: Segments) -> None:
        self.x, self.segments = x, segments
        self._floats: np.ndarray = x.detach().numpy()
        self._quotas = np.minimum(segments.quotas, segments.sizes)
        self._live: list[int] = np.flatnonzero(self._quotas).tolist()

    def moments(self, *, magnitudes: bool = False) -> tuple[Tensor, Tensor]:
        shape = np.abs if magnitudes else np.positive
        first = self._per_segment(np.float64, lambda s: shape(self._segment(s)).sum(dtype=np.float64))
        return first, self._per_segment(np.float64, lambda s: np.square(self._segment(s)).sum(dtype=np.float64))

    def log_abs_sums(self) -> tuple[Tensor, Tensor]:
        starts, sizes = self.segments.edges[self._live], self.segments.sizes[self._live]
        found = dict(zip(self._live, zip(*log_sums(self._floats, starts, sizes), strict=True), strict=True))
        return self._per_segment(np.float64, lambda s: found[s][0]), self._per_segment(np.int64, lambda s: found[s][1])

    def abs_max(self) -> Tensor:
        return self._per_segment(np.int32, lambda s: self._magnitudes(s).max()).view(torch.float32)

    def count_above(self, thresholds: Tensor, enough: Tensor | None = None) -> Tensor:
        floors = order_floors(thresholds.numpy())
        return self._per_segment(np.int64, lambda s: np.count_nonzero(self._magnitudes(s) > floors[s]))

    def tail_moments(self, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        limits = thresholds.numpy()
        excess = {s: np.abs(self._segment(s)) - limits[s] for s in self._live}
        excess = {s: values[values > 0] for s, values in excess.items()}
        number = self._per_segment(np.int64, lambda s: len(excess[s]))
        total = self._per_segment(np.float64, lambda s: excess[s].sum(dtype=np.float64))
        return number, total, self._per_segment(np.float64, lambda s: np.square(excess[s]).sum(dtype=np.float64))

    def kth_largest(self, ranks: np.ndarray) -> Tensor:
        ranks = np.minimum(ranks, self.segments.sizes)
        infinite = np.float32(np.inf).view(np.int32)

        def kth(s: int) -> Any:
            place = int(self.segments.sizes[s] - ranks[s])
            return np.partition(self._magnitudes(s), place)[place] if ranks[s] > 0 else infinite

        return self._per_segment(np.int32, kth).view(torch.float32)

    def top(self) -> Selection:
        return self._largest(self._quotas)

    def take(self, thresholds: Tensor) -> Selection:
        above = self.count_above(thresholds).numpy()
        return self._largest(np.minimum(np.maximum(above, 1), self._quotas))

    def merge(self, floors: Selection, others: Selection, room: int) -> Selection:
        return merged(self.x, floors, others, room)

    def _segment(self, s: int) -> np.ndarray:
        """float32, the elements of a segment."""
        return self._floats[self.segments.edges[s] : self.segments.edges[s + 1]]

    def _magnitudes(self, s: int) -> np.ndarray:
        """int32, bits of their magnitudes."""
        bits: np.ndarray = self._segment(s).view(np.int32) & MAGNITUDE_BITS
        return bits

    def _per_segment(self, dtype: type, of: Callable[[int], Any]) -> Tensor:
        """One number of every segment with elements and a quota, 0 of the others."""
        result: np.ndarray = np.zeros(len(self.segments), dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # of what is not finite statistics are not finite either
            for s in self._live:
                result[s] = of(s)
        return torch.from_numpy(result)

    def _largest(self, numbers: np.ndarray) -> Selection:
        """The ``numbers`` (int [M]) largest elements of every segment, the first among equals."""
        parts = [largest_first(self._magnitudes(s), int(numbers[s])) + self.segments.edges[s] for s in self._live]
        return as_selection(np.concatenate([np.empty(0, np.int64), *parts]), self.x)

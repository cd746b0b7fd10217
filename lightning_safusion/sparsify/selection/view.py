"""The contract of a segmented view: statistics of, and selections from, a span that is cut into segments; and in NumPy.

Sparsifiers are written with it. They see tensors of one number per segment on the device of the span: one code for CPU
and accelerators, which never waits for the device. The view in plain NumPy is the fallback without compiled kernels,
and what the tests compare other views with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.sparsify.base import Segments, Selection, as_selection, constant_of_segments

#: The bits of a float32 without its sign. As integers they order magnitudes as the floats do, and NaN above infinity.
MAGNITUDE_BITS = 0x7FFFFFFF

_BLOCK = 1 << 16  # elements whose logarithms are added in float32
_SMALL = 1 << 14


def device_constant(array: np.ndarray, device: torch.device) -> Tensor:
    """Copies a small host array to ``device`` without making the host wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@constant_of_segments
def sizes_and_quotas(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor]:
    """float64 [M] each, on the device."""
    sizes, quotas = (device_constant(array.astype(np.float64), device) for array in (segments.sizes, segments.quotas))
    return sizes, quotas


def mean_and_variance(count: Tensor, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance from sums."""
    mean = total / count
    return mean, ((squares - total * mean) / (count - 1).clamp(min=1)).clamp(min=0)


class SegmentedView(ABC):
    """Reads a span segment by segment.

    Every result of shape [M] is a tensor on the device of ``x``; its entries for segments with quota 0 or without
    elements carry no meaning. Magnitudes are ordered by their bits: NaN is larger than infinity, and of equal ones the
    first comes first. All backends select the same elements.

    Attributes:
        x: float32 [N], contiguous. Not changed.
        segments: The cut of ``x`` and the quotas.
    """

    x: Tensor
    segments: Segments

    @property
    def sizes(self) -> Tensor:
        """float64 [M], elements of each segment."""
        return sizes_and_quotas(self.segments, self.x.device)[0]

    @property
    def quotas(self) -> Tensor:
        """float64 [M], room of each segment."""
        return sizes_and_quotas(self.segments, self.x.device)[1]

    @property
    def readable(self) -> bool:
        """Whether the host may read results, to end a search early: on an accelerator it would wait for them."""
        return self.x.is_cpu

    @abstractmethod
    def moments(self, *, magnitudes: bool = False) -> tuple[Tensor, Tensor]:
        """float64 [M] each: sums of the elements, or of their magnitudes, and of the squares."""

    def abs_sums(self) -> Tensor:
        """float64 [M], sum of the magnitudes."""
        return self.moments(magnitudes=True)[0]

    @abstractmethod
    def log_abs_sums(self) -> tuple[Tensor, Tensor]:
        """float64 [M], sum of ln |x| over the non-zero elements, and int64 [M], how many these are."""

    @abstractmethod
    def abs_max(self) -> Tensor:
        """float32 [M], largest magnitude."""

    @abstractmethod
    def count_above(self, thresholds: Tensor, enough: Tensor | None = None) -> Tensor:
        """int64 [M], elements with a magnitude strictly above a threshold.

        Args:
            thresholds: float32 [M].
            enough: float64 [M]. For a segment with more than that any number above it may be returned.
        """

    @abstractmethod
    def tail_moments(self, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Moments of the excess ``|x| - threshold`` of the elements above ``thresholds`` (float32 [M]).

        Their number (int64 [M]), the sum and the sum of squares (float64 [M]).
        """

    @abstractmethod
    def kth_largest(self, ranks: np.ndarray) -> Tensor:
        """float32 [M], exact ``ranks``-th largest magnitude; int64 [M] in 0..size, 0 gives +infinity."""

    def below_kth(self, ranks: np.ndarray) -> Tensor:
        """float32 [M], the threshold next below the ``ranks``-th largest magnitude, which exceeds it.

        0 stays 0: of a segment that is mostly zero only non-zeros exceed it.
        """
        kth = self.kth_largest(ranks)
        return torch.nextafter(kth, torch.zeros_like(kth))

    @abstractmethod
    def take(self, thresholds: Tensor) -> Selection:
        """Selects what exceeds thresholds (float32 [M]): of every segment with a quota at least one, at most the quota.

        A segment with more than its quota keeps exactly its quota largest; one with none sends its largest element. A
        threshold that is NaN selects none.
        """

    @abstractmethod
    def top(self) -> Selection:
        """Selects exactly the quota largest elements of every segment."""

    def top_pooled(self) -> Selection | None:
        """The largest elements of every segment up to its quota, and the largest of all others up to the pool.

        None where that takes more than one pass over the span.
        """
        return None

    @abstractmethod
    def merge(self, floors: Selection, others: Selection, room: int) -> Selection:
        """All of ``floors`` (which has no padding), and the ``room`` largest of ``others`` that are not among them."""


def order_floors(thresholds: np.ndarray) -> np.ndarray:
    """Integers such that ``bits > floor`` exactly where ``magnitude > threshold``."""
    limits = thresholds.astype(np.float32)
    # The sum makes -0.0 a zero; the bits of what is still negative are negative integers.
    floors: np.ndarray = np.maximum((limits + np.float32(0)).view(np.int32), -1)
    floors[np.isnan(limits)] = MAGNITUDE_BITS
    return floors


def ranked(bits: np.ndarray, rank: int) -> Any:
    """The ``rank``-th largest of some integers, from 1 to all of them."""
    place = len(bits) - rank
    return np.partition(bits, place)[place]


def largest_first(bits: np.ndarray, room: int) -> np.ndarray:
    """Places of the ``room`` largest, at equal magnitude the first; ascending."""
    if room >= len(bits):
        return np.arange(len(bits))
    if room == 0:
        return np.empty(0, np.int64)
    kth = ranked(bits, room)
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
        kth = self._per_segment(np.int32, lambda s: ranked(self._magnitudes(s), ranks[s]) if ranks[s] else infinite)
        return kth.view(torch.float32)

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

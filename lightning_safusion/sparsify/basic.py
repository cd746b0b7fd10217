"""The compressors that estimate nothing: Top-k, Random-k, a fixed threshold, and no compression."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.sparsify.base import Reads, Segments, Selection, Sparsifier, constant_of_segments, stable_hash
from lightning_safusion.sparsify.selection.select import SegmentedView, ThresholdSparsifier, empty_selection, largest
from lightning_safusion.sparsify.selection.survey import SpanSurvey
from lightning_safusion.sparsify.selection.view import device_constant

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # increment of SplitMix64 (Steele, Lea & Flood 2014): 2^64 / golden ratio


class TopK(Sparsifier):
    """Sends the ``quota`` elements of the largest magnitude of every segment, the first ones among equals.

    The selection error is bounded: ``||x - TopK(x)||^2 <= (1 - k/d) ||x||^2``. Sources: Aji & Heafield 2017; Stich et
    al. 2018; Alistarh et al. 2018.
    """

    name: ClassVar[str] = "topk"
    reads: ClassVar[Reads] = "view"
    estimates: ClassVar[bool] = False

    def select(self, x: Tensor, segments: Segments, step: int, survey: SpanSurvey | None = None) -> Selection:
        return largest(x, segments, survey)


class NoCompression(TopK):
    """Sends everything; the room of a tensor is its size, whatever the density."""

    name: ClassVar[str] = "none"
    reads: ClassVar[Reads] = "shape"

    def quota(self, numel: int, shape: tuple[int, ...], density: float) -> int:
        return numel

    def select(self, x: Tensor, segments: Segments, step: int, survey: SpanSurvey | None = None) -> Selection:
        """A quota below the size of its segment is filled with the largest elements."""
        if segments.numel and (segments.quotas == segments.sizes).all():
            return Selection(_all_indices(segments, x.device), x.clone(), segments.numel)
        return super().select(x, segments, step, survey)


@constant_of_segments
def _all_indices(segments: Segments, device: torch.device) -> Tensor:
    return torch.arange(segments.numel, device=device)


class Threshold(ThresholdSparsifier):
    """Sends the elements whose magnitude exceeds a constant, at least one of every segment and at most its quota.

    The threshold is in units of the gradient (plus residual), so it depends on the scale of the loss. Within the quota
    no element of the residual is larger than ``value``. Sources: Strom 2015; Sahu et al. 2021.

    Args:
        value: Threshold on the magnitude, 0 or more; 0 sends every non-zero element.

    Raises:
        ValueError: If ``value`` is negative or not finite.
    """

    name: ClassVar[str] = "threshold"

    def __init__(self, value: float = 0.01) -> None:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"the threshold must be finite and at least 0, got {value}")
        self.value = value

    def thresholds(self, view: SegmentedView, step: int) -> Tensor:
        return torch.full((len(view.segments),), self.value, dtype=torch.float32, device=view.x.device)


class RandomK(Sparsifier):
    """Sends ``quota`` elements of every segment at random positions, each element with probability ``quota / size``.

    A segment is laid out on a circle, turned by a random offset and cut into ``quota`` cells; one element is drawn from
    each, in O(quota). The numbers come from a counter-based generator (SplitMix64) keyed by seed, step and segment: all
    ranks draw the same, also in a resumed run, and no generator of the process is touched. Values are not scaled by
    ``size / quota``: error feedback needs a contraction. Sources: Stich et al. 2018; Konecny & Richtarik 2018.

    Args:
        seed: Any integer, the same on all ranks.
    """

    name: ClassVar[str] = "randomk"
    reads: ClassVar[Reads] = "shape"
    estimates: ClassVar[bool] = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:
        """A pool has no order of size to follow: it is dealt out to the segments in proportion to their room."""
        starts, sizes, quotas, hashes = _active(segments)
        if not len(quotas):
            return empty_selection(x.device)
        streams = _mix(hashes ^ np.uint64(stable_hash(repr((self.seed, step)))))
        indices = device_constant(np.sort(_draw(starts, sizes, quotas, streams)), x.device)
        return Selection(indices, x[indices], len(indices))


@constant_of_segments
def _active(segments: Segments) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Starts, sizes, quotas (int64) and key hashes (uint64) of the segments that send something."""
    active = (segments.quotas > 0) & (segments.sizes > 0)
    sizes = segments.sizes[active]
    quotas = _deal(np.minimum(segments.quotas[active], sizes), sizes, segments.pool)
    hashes = [stable_hash(repr(key)) for key, on in zip(segments.keys, active, strict=True) if on]
    return segments.edges[:-1][active], sizes, quotas, np.array(hashes, np.uint64)


def _deal(quotas: np.ndarray, sizes: np.ndarray, pool: int) -> np.ndarray:
    """Adds ``pool`` places to the quotas in proportion to the room that is left (at most all of it)."""
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes - quotas)])
    room = int(ends[-1])
    if pool == 0 or room == 0:
        return quotas
    # Differences of rounded running shares: they add up to the pool, and none exceeds its room.
    shares: np.ndarray = np.diff(np.array([int(end) * min(pool, room) // room for end in ends], np.int64))
    return quotas + shares


def _draw(starts: np.ndarray, sizes: np.ndarray, quotas: np.ndarray, streams: np.ndarray) -> np.ndarray:
    """One position from every cell of every segment, unordered."""
    last = np.cumsum(quotas)
    cell = np.arange(last[-1]) - np.repeat(last - quotas, quotas)
    size, quota, stream = np.repeat(sizes, quotas), np.repeat(quotas, quotas), np.repeat(streams, quotas)
    low, high = cell * size // quota, (cell + 1) * size // quota
    inside = low + _below(stream, cell + 1, high - low)
    turned = inside + np.repeat(_below(streams, np.zeros_like(quotas), sizes), quotas)
    return np.repeat(starts, quotas) + np.where(turned >= size, turned - size, turned)


def _below(streams: np.ndarray, counters: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """The ``counters``-th numbers of the streams, uniform in [0, limit), limits up to 2^31 (bias < 2^-33)."""
    bits = _mix(streams + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    limit = limits.astype(np.uint64)
    # bits * limit / 2^64, the product taken in halves of 32 bits because it does not fit 64.
    low = ((bits & np.uint64(0xFFFFFFFF)) * limit) >> np.uint64(32)
    number: np.ndarray = (((bits >> np.uint64(32)) * limit + low) >> np.uint64(32)).astype(np.int64)
    return number


def _mix(bits: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64; arithmetic modulo 2^64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))

"""Segmented selection on the CPU.

Memory traffic is the cost, so every pass works in blocks that stay in the L2 cache, and the only arrays of more than a
block are the candidates. Small neighbouring segments share a block: the cost does not depend on how the span is cut.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.pieces import BLOCK, SMALL, Piece, Pieces, add_counts, add_sums
from lightning_safusion.sparsify.view import MAGNITUDE_BITS, SegmentedView

_SORTED_TOGETHER = 1 << 11  # candidate lists up to this length are ordered by one common sort


def _order_floors(thresholds: np.ndarray, inclusive: bool) -> np.ndarray:
    """Integers such that ``bits > floor`` exactly where ``magnitude > threshold`` (``>=`` if inclusive)."""
    floors = (thresholds.view(np.int32) & MAGNITUDE_BITS) - np.int32(inclusive)
    floors = np.where(thresholds < 0, -1, floors)
    return np.where(np.isnan(thresholds), MAGNITUDE_BITS, floors).astype(np.int32)


class NumpyView(SegmentedView):
    """Selection in cache-sized blocks with NumPy's vector instructions."""

    def __init__(self, x: Tensor, segments: Segments) -> None:
        super().__init__(x, segments)
        self._layout = Pieces.of(segments)
        self._floats: np.ndarray = x.detach().numpy()
        self._bits: np.ndarray = self._floats.view(np.int32)
        self._counted: tuple[np.ndarray, np.ndarray] | None = None  # floors and counts of the last count_above

    # -- statistics ------------------------------------------------------------------------------------------------

    def sums(self) -> Tensor:
        return self._fold(lambda block: block)

    def abs_sums(self) -> Tensor:
        return self._fold(np.abs)

    def square_sums(self) -> Tensor:
        return self._fold(np.square)

    def log_abs_sums(self) -> tuple[Tensor, Tensor]:
        def logarithms(block: np.ndarray) -> np.ndarray:
            # The logarithm of 1 adds nothing, which is what a zero shall add.
            return np.log(np.where(block == 0, np.float32(1), np.abs(block)))

        present = np.zeros(len(self._layout.active), np.int64)
        for piece in self._layout.pieces:
            add_counts(present, piece, self._floats[piece.start : piece.stop] != 0)
        return self._fold(logarithms), self._per_segment(present)

    def abs_max(self) -> Tensor:
        largest = np.zeros(len(self._layout.active), np.int32)
        for piece in self._layout.pieces:
            bits = self._magnitudes(piece.start, piece.stop)
            if piece.offsets is None:
                largest[piece.first] = max(largest[piece.first], bits.max())
            else:
                largest[piece.first : piece.last] = np.maximum.reduceat(bits, piece.offsets)
        return self._per_segment(largest.view(np.float32))

    def count_above(self, thresholds: Tensor) -> Tensor:
        floors = self._floors(thresholds)
        known, counts = self._counted or (floors, np.zeros(len(floors), np.int64))
        # A loop that refines thresholds changes few at a time: the others need not be counted again.
        changed = floors != known if self._counted else np.ones(len(floors), np.bool_)
        counts = np.where(changed, 0, counts)
        again = changed.tolist()
        for piece in self._layout.pieces:
            if any(again[piece.first : piece.last]):
                add_counts(counts, piece, self._above(piece, floors))
        self._counted = (floors, counts)
        return self._per_segment(counts)

    def tail_moments(self, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        limits = self._active(thresholds)
        first, second = np.zeros((2, len(limits)))
        counts = np.zeros(len(limits), np.int64)
        with np.errstate(over="ignore", invalid="ignore"):
            for piece in self._layout.pieces:
                excess = np.abs(self._floats[piece.start : piece.stop]) - piece.spread(limits)
                add_counts(counts, piece, excess > 0)
                np.maximum(excess, 0, out=excess)
                add_sums(first, piece, excess)
                add_sums(second, piece, np.square(excess, out=excess))
        return self._per_segment(counts), self._per_segment(first), self._per_segment(second)

    def _fold(self, transform: Callable[[np.ndarray], np.ndarray]) -> Tensor:
        """Sums a transform of every element, pairwise in float32 within a block and in float64 across blocks."""
        totals = np.zeros(len(self._layout.active))
        with np.errstate(over="ignore", invalid="ignore"):  # non-finite input makes non-finite statistics, no noise
            for piece in self._layout.pieces:
                add_sums(totals, piece, transform(self._floats[piece.start : piece.stop]))
        return self._per_segment(totals)

    # -- selection -------------------------------------------------------------------------------------------------

    def kth_largest(self, k: Tensor | np.ndarray) -> Tensor:
        ranks = np.minimum(self._active(k).astype(np.int64), self._layout.stops - self._layout.starts)
        indices, counts = self._candidates(ranks)
        kth = np.full(len(ranks), np.float32(np.inf).view(np.int32))
        wanted = np.flatnonzero(ranks > 0)
        kth[wanted] = self._kth_bits(self._bits.take(indices) & MAGNITUDE_BITS, counts, ranks, wanted)
        return self._per_segment(kth.view(np.float32))

    def top(self) -> Selection:
        return self._trim(*self._candidates(self._layout.quotas))

    def take(self, thresholds: Tensor, *, inclusive: bool = False) -> Selection:
        floors = self._floors(thresholds, inclusive)
        found = [self._sweep(piece, floors) for piece in self._layout.pieces]
        indices, counts = self._join(found)
        empty = np.flatnonzero(counts == 0)
        if len(empty):
            indices = np.sort(np.concatenate([indices, [self._largest(place) for place in empty.tolist()]]))
            counts[empty] = 1
        return self._trim(indices, counts)

    def merge(self, floors: Selection, others: Selection, room: int) -> Selection:
        kept = floors.indices.numpy()
        rest = np.setdiff1d(others.indices.numpy()[: int(others.count)], kept, assume_unique=True)
        if len(rest) > room:
            order = np.argsort(-(self._bits[rest] & MAGNITUDE_BITS), kind="stable")
            rest = rest[order[:room]]
        return self._selection(np.sort(np.concatenate([kept, rest])))

    # -- parts -----------------------------------------------------------------------------------------------------

    def _active(self, per_segment: Tensor | np.ndarray) -> np.ndarray:
        array = per_segment.numpy() if isinstance(per_segment, Tensor) else np.asarray(per_segment)
        return array[self._layout.active]

    def _floors(self, thresholds: Tensor, inclusive: bool = False) -> np.ndarray:
        return _order_floors(self._active(thresholds).astype(np.float32), inclusive)

    def _per_segment(self, per_active: np.ndarray) -> Tensor:
        result = np.zeros(len(self.segments), per_active.dtype)
        result[self._layout.active] = per_active
        return torch.from_numpy(result)

    def _magnitudes(self, start: int, stop: int, step: int = 1) -> np.ndarray:
        """int32 bits of the magnitudes of a part of the span."""
        bits: np.ndarray = self._bits[start:stop:step] & MAGNITUDE_BITS
        return bits

    def _above(self, piece: Piece, floors: np.ndarray) -> np.ndarray:
        mask: np.ndarray = self._magnitudes(piece.start, piece.stop) > piece.spread(floors)
        return mask

    def _sweep(self, piece: Piece, floors: np.ndarray) -> np.ndarray:
        """int64 positions in the span of the elements of a piece above the floors of their segments."""
        found = self._above(piece, floors).nonzero()[0]
        found += piece.start
        return found

    def _join(self, found: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Ascending positions of all pieces, and how many of them each active segment has."""
        indices = np.concatenate(found) if found else np.empty(0, np.int64)
        bounds = np.searchsorted(indices, self._layout.stops)
        return indices, np.diff(bounds, prepend=0)

    def _largest(self, place: int) -> int:
        """Position of the (first) largest element of an active segment."""
        start, stop = int(self._layout.starts[place]), int(self._layout.stops[place])
        best, position = -1, start
        for low in range(start, stop, BLOCK):
            bits = self._magnitudes(low, min(low + BLOCK, stop))
            at = int(bits.argmax())
            if bits[at] > best:
                best, position = int(bits[at]), low + at
        return position

    def _candidates(self, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions that hold the ``ranks[s]`` largest elements of every active segment, and few others.

        A strided sample gives a floor that is probably a little too low. The sweep proves it right by finding enough
        elements above it; the rare segment where it does not is done again from its exact value.
        """
        layout = self._layout
        floors = np.array([self._guess(place, int(rank)) for place, rank in enumerate(ranks)], np.int32)
        found = [self._sweep(piece, floors) for piece in layout.pieces]
        indices, counts = self._join(found)
        short = np.flatnonzero(counts < ranks)
        if len(short) == 0:
            return indices, counts
        for place in short.tolist():
            mine = [at for at, piece in enumerate(layout.pieces) if piece.first == place]
            repaired = self._exact(place, int(ranks[place]), int(floors[place]))
            found[mine[0] : mine[-1] + 1] = [repaired] + [repaired[:0]] * (len(mine) - 1)
        return self._join(found)

    def _guess(self, place: int, rank: int) -> int:
        """A floor below which the ``rank`` largest elements of an active segment hardly ever reach; -1 takes all."""
        start, stop = int(self._layout.starts[place]), int(self._layout.stops[place])
        size = stop - start
        if rank == 0:
            return MAGNITUDE_BITS
        if size <= SMALL or 2 * rank > size:
            return -1
        # 128 expected hits put the floor within 9 % (one sigma) of the rank.
        stride = size // min(size // 16, max(1024, 128 * size // rank)) | 1
        sample = self._magnitudes(start, stop, stride)
        expected = rank / stride
        deep = int(expected + 3 * expected**0.5 + 4)  # three sigma deeper than the rank
        if deep >= len(sample):
            return -1
        value = int(np.partition(sample, len(sample) - deep)[len(sample) - deep])
        # One value in a large part of the segment is not worth collecting (the zeros of an embedding's gradient): leave
        # it out, and fill up with its first elements if they are needed after all.
        tied = np.count_nonzero(sample >= value) > 4 * deep
        return value if tied else max(value - 1, 0)

    def _exact(self, place: int, rank: int, floor: int) -> np.ndarray:
        """The ``rank`` largest of a segment in which fewer than ``rank`` elements exceed ``floor``."""
        start, stop = int(self._layout.starts[place]), int(self._layout.stops[place])
        bits = self._magnitudes(start, stop)
        kth = 0 if floor == 0 else np.partition(bits, len(bits) - rank)[len(bits) - rank]
        larger = np.flatnonzero(bits > kth)
        tied = np.flatnonzero(bits == kth)[: rank - len(larger)]
        return np.sort(np.concatenate([larger, tied])) + start

    def _kth_bits(self, bits: np.ndarray, counts: np.ndarray, ranks: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The ``ranks``-th largest of the candidates ``bits`` of the active segments ``places`` (int32)."""
        ends = np.cumsum(counts)
        kth = np.empty(len(places), np.int32)
        long = counts[places] > _SORTED_TOGETHER
        for at in np.flatnonzero(long).tolist():
            place = places[at]
            mine = bits[ends[place] - counts[place] : ends[place]]
            kth[at] = np.partition(mine, len(mine) - ranks[place])[len(mine) - ranks[place]]
        short = places[~long]
        if len(short):
            # One sort for all of them: the segment in the high half of the key, the descending magnitude in the low.
            member = np.zeros(len(counts), bool)
            member[short] = True
            low = (MAGNITUDE_BITS - bits[np.repeat(member, counts)]).astype(np.uint64)
            lengths = counts[short]
            keys = np.sort((np.repeat(np.arange(len(short), dtype=np.uint64), lengths) << np.uint64(32)) | low)
            positions = np.cumsum(lengths) - lengths + ranks[short] - 1
            kth[~long] = MAGNITUDE_BITS - (keys[positions] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        return kth

    def _trim(self, indices: np.ndarray, counts: np.ndarray) -> Selection:
        """Cuts segments with more candidates than their quota to the largest, at equal magnitude the first."""
        quotas = self._layout.quotas
        full = np.flatnonzero(counts > quotas)
        if len(full) == 0:
            return self._selection(indices)
        bits = self._bits.take(indices) & MAGNITUDE_BITS
        kth = np.full(len(counts), -1, np.int32)  # a segment that fits keeps everything
        kth[full] = self._kth_bits(bits, counts, quotas, full)
        limits = np.repeat(kth, counts)
        keep = bits > limits
        tied = np.flatnonzero(bits == limits)
        ends = np.cumsum(counts)
        owners = np.searchsorted(ends, tied, side="right")
        larger = np.diff(np.searchsorted(keep.nonzero()[0], ends), prepend=0)
        order = np.arange(len(tied)) - np.searchsorted(owners, owners)  # rank of a tie within its segment
        keep[tied[order < (quotas - larger)[owners]]] = True
        return self._selection(indices.take(keep.nonzero()[0]))

    def _selection(self, indices: np.ndarray) -> Selection:
        values = self._floats.take(indices)
        return Selection(torch.from_numpy(indices), torch.from_numpy(values), len(indices))

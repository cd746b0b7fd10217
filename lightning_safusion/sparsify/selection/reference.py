"""Segmented selection on the CPU.

Memory traffic is the cost, so every pass works in blocks that stay in the L2 cache, and the only arrays of more than a
block are the candidates: elements above a floor of their segment, from which every higher threshold is answered
without reading the span again. Small neighbouring segments share a block: the cost does not depend on how the span is
cut.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.sparsify.base import FoundSelection, Segments, Selection
from lightning_safusion.sparsify.selection.candidates import (
    ONE_BY_ONE,
    Candidates,
    Swept,
    largest_first,
    order_floors,
    read_above,
    with_first_others,
)
from lightning_safusion.sparsify.selection.pieces import (
    BLOCK,
    Pieces,
    SubBlocks,
    add_counts,
    add_squares,
    add_sums,
    kth_of_lists,
    lengths_between,
)
from lightning_safusion.sparsify.selection.sampling import common_floor, guessed_floor
from lightning_safusion.sparsify.selection.view import MAGNITUDE_BITS, SegmentedView

_NEXT = 0.5  # of a threshold that lets too little through
_SORTED_TOGETHER = 1 << 11  # candidate lists up to this length are ordered by one common sort


class NumpyView(SegmentedView):
    """Selection in cache-sized blocks with NumPy's vector instructions."""

    def __init__(self, x: Tensor, segments: Segments) -> None:
        super().__init__(x, segments)
        self._layout = Pieces.of(segments)
        self._floats: np.ndarray = x.detach().numpy()
        self._bits: np.ndarray = self._floats.view(np.int32)
        self._swept: Swept | None = None
        self._counted: tuple[np.ndarray, np.ndarray] | None = None  # the latest floors, and elements above them

    # -- statistics ------------------------------------------------------------------------------------------------

    def sums(self) -> Tensor:
        return self._fold(lambda block: block)

    def abs_sums(self) -> Tensor:
        return self._fold(np.abs)

    def square_sums(self) -> Tensor:
        squares = np.zeros(len(self._layout.active))
        with np.errstate(over="ignore", invalid="ignore"):
            for piece in self._layout.pieces:
                add_squares(squares, piece, self._floats[piece.start : piece.stop])
        return self._per_segment(squares)

    def moments(self, *, magnitudes: bool = False) -> tuple[Tensor, Tensor]:
        first, second = np.zeros((2, len(self._layout.active)))
        with np.errstate(over="ignore", invalid="ignore"):
            for piece in self._layout.pieces:  # both while the block is in the cache
                block = self._floats[piece.start : piece.stop]
                add_sums(first, piece, np.abs(block) if magnitudes else block)
                add_squares(second, piece, block)
        return self._per_segment(first), self._per_segment(second)

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

    def count_above(self, thresholds: Tensor, enough: Tensor | None = None) -> Tensor:
        floors = self._floors(thresholds)
        if self._swept is None and (few := self._layout.few_small).any():
            # the next threshold may be lower where few elements are to be found: that shall not read their piece again
            self._swept_down_to(np.where(few, np.minimum(floors, self._floors(_NEXT * thresholds)), floors))
        if enough is not None:
            floors = self._no_lower(floors, self._active(enough) + 1)
        if self._swept is not None and (lowered := floors < self._swept.floors).any():
            # a threshold is lowered until it finds enough, which a sparse segment never has: one look for all of that
            self._swept_down_to(np.minimum(floors, self._guessed(lowered, floors)))
        return self._per_segment(self._counts(self._swept_down_to(floors), floors))

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
        sizes = self._layout.stops - self._layout.starts
        ranks = np.where(self._layout.idle, 0, np.minimum(self._active(k).astype(np.int64), sizes))
        kth = self._kth_bits(self._candidates(ranks, SubBlocks.of(self._layout, ranks)), ranks, ranks > 0)
        return self._per_segment(np.where(ranks > 0, kth, np.float32(np.inf).view(np.int32)).view(np.float32))

    def top(self) -> Selection:
        return self._trim(self._candidates(self._layout.quotas, self._layout.sub_blocks))

    def top_pooled(self) -> Selection | None:
        if self._layout.idle.all():
            return None
        own = np.full(len(self._layout.quotas), MAGNITUDE_BITS, np.int32)
        self._guess(own, self._layout.quotas, self._layout.sub_blocks, ~self._layout.idle)
        live = [self._segment(place) for place in np.flatnonzero(~self._layout.idle).tolist()]
        return self._pooled_above(np.minimum(own, common_floor(live, self.segments.capacity)))

    def _pooled_above(self, floors: np.ndarray) -> Selection | None:
        """The pooled selection from what is above floors (int32 [A]); None where these were too high for it."""
        layout, room = self._layout, self.segments.capacity
        floors = np.where(layout.idle, MAGNITUDE_BITS, floors).astype(np.int32)
        highest = int(floors[~layout.idle].max())  # what is not found has at most these bits
        found = self._above(floors)
        if (short := found.counts < layout.quotas).any():
            if (floors[short] > 0).any():
                return None
            found, floors = self._completed(found, floors, layout.quotas), np.where(short, np.int32(-1), floors)
        if highest <= 0 and len(found.indices) <= room:  # every non-zero is found, and sent
            return self._all_and_zeros(found)
        if len(found.indices) < room:
            return None
        chosen, lowest = self._cut_to_pool(found, floors)
        if lowest <= highest and highest > 0:
            return None
        if len(chosen.indices) != room:  # elements of equal magnitude: the first
            chosen, lowest = self._first_of_pool(found)
        return as_selection(chosen.indices, chosen.signed)

    def _all_and_zeros(self, found: Candidates) -> Selection:
        """All candidates, which every non-zero is among, and the first zeros that the pool has room for."""
        layout, left = self._layout, self.segments.capacity - len(found.indices)
        counts = np.zeros_like(found.counts)
        free = np.where(layout.idle, 0, layout.stops - layout.starts - found.counts)
        before = free.cumsum() - free
        np.clip(left - before, 0, free, out=counts)
        filled = self._filled(found, counts)
        return as_selection(filled.indices, filled.signed)

    def _cut_to_pool(self, found: Candidates, floors: np.ndarray) -> tuple[Candidates, int]:
        """The largest of all candidates, and of those segments that have too few of these their own largest.

        Returns:
            The room's largest, or more if the last of them have equals; the least magnitude (bits) that is among the
            largest of all.
        """
        quotas, room = self._layout.quotas, self.segments.capacity
        few = np.zeros(len(quotas), bool)  # they send their quota, and no more
        while True:
            rest = found.bits if not few.any() else found.bits[~few.repeat(found.counts)]
            left = room - int(quotas[few].sum())
            lowest = int(np.partition(rest, len(rest) - left)[len(rest) - left]) if left else MAGNITUDE_BITS
            limits = np.where(few, self._kth_bits(found, quotas, few), lowest).astype(np.int32)
            limits -= 1
            if not (more := self._numbers(found, floors, limits) < quotas).any():
                return self._narrowed(found, floors, limits), lowest
            few |= more

    def _first_of_pool(self, found: Candidates) -> tuple[Candidates, int]:
        """As :meth:`_cut_to_pool`, but of equals the first, so that there are no more than there is room for."""
        own = np.zeros(len(found.indices), bool)
        own[self._kept(found)] = True
        rest = np.flatnonzero(~own)
        rest = rest[largest_first(found.bits[rest], self.segments.capacity - int(own.sum()))]
        own[rest] = True
        return self._listed(found.indices[own], found.signed[own]), int(found.bits[rest].min(initial=MAGNITUDE_BITS))

    def _narrowed(self, found: Candidates, floors: np.ndarray, higher: np.ndarray) -> Candidates:
        """Of candidates above floors (int32 [A]) those above others, none of which is lower."""
        return found.above(higher, floors)

    def _numbers(self, found: Candidates, floors: np.ndarray, higher: np.ndarray) -> np.ndarray:
        """int64 [A], how many :meth:`_narrowed` leaves of each segment."""
        return self._narrowed(found, floors, higher).counts

    def take(self, thresholds: Tensor, *, inclusive: bool = False) -> Selection:
        # more than its quota is cut off again
        found = self._above(self._no_lower(self._floors(thresholds, inclusive), self._layout.quotas))
        empty = np.flatnonzero((found.counts == 0) & ~self._layout.idle)
        if len(empty):
            largest = [self._largest(place) for place in empty.tolist()]
            found = self._listed(np.sort(np.concatenate([found.indices, largest])))
        return self._trim(found)

    def merge(self, floors: Selection, others: Selection, room: int) -> Selection:
        kept = floors.indices.numpy()
        rest = others.indices.numpy()[: int(others.count)]
        if len(kept):
            rest = rest[kept.take(kept.searchsorted(rest), mode="clip") != rest]
        if len(rest) > room:
            rest = rest[largest_first(self._bits[rest] & MAGNITUDE_BITS, room)]
        indices = np.sort(np.concatenate([kept, rest]), kind="stable")  # two runs
        return as_selection(indices, self._bits.take(indices))

    # -- parts -----------------------------------------------------------------------------------------------------

    def _active(self, per_segment: Tensor | np.ndarray) -> np.ndarray:
        array = per_segment.numpy() if isinstance(per_segment, Tensor) else np.asarray(per_segment)
        return array[self._layout.active]

    def _floors(self, thresholds: Tensor, inclusive: bool = False) -> np.ndarray:
        floors = order_floors(self._active(thresholds).astype(np.float32), inclusive)
        floors[self._layout.idle] = MAGNITUDE_BITS
        return floors

    def _per_segment(self, per_active: np.ndarray) -> Tensor:
        result = np.zeros(len(self.segments), per_active.dtype)
        result[self._layout.active] = per_active
        return torch.from_numpy(result)

    def _segment(self, place: int) -> np.ndarray:
        """int32 bits of the elements of an active segment."""
        return self._bits[self._layout.starts[place] : self._layout.stops[place]]

    def _magnitudes(self, start: int, stop: int) -> np.ndarray:
        """int32 bits of the magnitudes of a part of the span."""
        bits: np.ndarray = self._bits[start:stop] & MAGNITUDE_BITS
        return bits

    def _no_lower(self, floors: np.ndarray, enough: np.ndarray) -> np.ndarray:
        """The floors, but not below what has been swept in a segment with that many (float [A]) candidates already."""
        if self._swept is None:
            return floors
        return np.where(self._swept.found.counts >= enough, np.maximum(floors, self._swept.floors), floors)

    def _counts(self, swept: Swept, floors: np.ndarray) -> np.ndarray:
        """int64 [A], candidates above floors (int32 [A]) that are no lower than what has been swept."""
        # whoever looks for a threshold changes few segments in the end
        counts = swept.found.counts_above(floors, *(self._counted or (swept.floors, swept.found.counts)))
        self._counted = floors, counts
        return counts

    def _above(self, floors: np.ndarray) -> Candidates:
        """The elements with bits above the floors (int32 [A]) of their segments."""
        swept = self._swept_down_to(floors)
        return swept.found if swept.floors is floors else self._narrowed(swept.found, swept.floors, floors)

    def _swept_down_to(self, floors: np.ndarray) -> Swept:
        """At least the elements with bits above the floors; reads the span only where no floor was as low so far."""
        swept = self._swept
        if swept is None:
            swept = self._sweep(floors, [True] * len(floors), [])
        elif (lowered := floors < swept.floors).any():
            floors, parts, swept = np.minimum(floors, swept.floors), swept.parts, None
            swept = self._sweep(floors, lowered.tolist(), parts)
        self._swept = swept
        return swept

    def _sweep(self, floors: np.ndarray, changed: list[bool], known: list[tuple[np.ndarray, np.ndarray]]) -> Swept:
        """Reads the pieces with a segment whose floor has changed, and keeps what is known of the others."""
        parts = [
            read_above(self._bits, piece, floors) if any(changed[piece.first : piece.last]) else known[at]
            for at, piece in enumerate(self._layout.pieces)
        ]
        # one piece is the common case of small tensors, and no piece that of a span without quotas
        if len(parts) == 1:
            indices, signed = parts[0]
        else:
            indices = np.concatenate([np.empty(0, np.int64), *(part for part, _ in parts)])
            signed = np.concatenate([np.empty(0, np.int32), *(bits for _, bits in parts)])
        return Swept(floors, parts, self._listed(indices, signed))

    def _listed(self, indices: np.ndarray, signed: np.ndarray | None = None) -> Candidates:
        """Ascending positions as candidates."""
        counts = lengths_between(indices.searchsorted(self._layout.stops.astype(indices.dtype, copy=False)))
        return Candidates(indices, self._bits.take(indices) if signed is None else signed, counts)

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

    def _candidates(self, ranks: np.ndarray, sub_blocks: SubBlocks) -> Candidates:
        """The ``ranks[s]`` largest elements of every active segment, and few others.

        The floor of a small segment is sure to let enough through, but for zeros. That of a large one is guessed from a
        strided sample; the sweep proves it right by finding enough elements above it, and the rare segment where it
        does not is done again from its exact value.
        """
        floors = np.full(len(ranks), MAGNITUDE_BITS, np.int32)
        self._guess(floors, ranks, sub_blocks, ranks > 0)
        return self._completed(self._above(floors), floors, ranks)

    def _guess(self, floors: np.ndarray, ranks: np.ndarray, sub_blocks: SubBlocks, wanted: np.ndarray) -> None:
        """Fills in floors of the ``wanted`` (bool [A]) segments that ``ranks`` elements are above, most likely."""
        if wanted[sub_blocks.places].any():
            self._sure_floors(floors, ranks, sub_blocks, wanted)
        for place in self._layout.large:
            if wanted[place]:
                floors[place] = guessed_floor(self._segment(place), int(ranks[place]))

    def _completed(self, found: Candidates, floors: np.ndarray, ranks: np.ndarray) -> Candidates:
        """At least ``ranks`` candidates of every segment, from those above the floors."""
        short = np.flatnonzero(found.counts < ranks)
        if len(short) == 0:
            return found
        # all non-zeros of a segment with floor 0 are found: the first zeros fill up
        wrong = short[floors[short] > 0]
        found = found if len(wrong) == 0 else self._replaced(found, wrong, ranks)
        return self._filled(found, np.maximum(ranks - found.counts, 0))

    def _replaced(self, found: Candidates, places: np.ndarray, ranks: np.ndarray) -> Candidates:
        """Candidates with exactly the ``ranks`` largest elements of some segments in place of theirs."""

        def exact(place: int, _: np.ndarray) -> np.ndarray:
            start, stop = int(self._layout.starts[place]), int(self._layout.stops[place])
            return largest_first(self._magnitudes(start, stop), int(ranks[place])) + start

        return self._with(found, places, exact)

    def _filled(self, found: Candidates, more: np.ndarray) -> Candidates:
        """Candidates and, of each segment, the first ``more`` (int64 [A]) elements that are not among them."""
        starts, stops = self._layout.starts, self._layout.stops

        def filled(place: int, positions: np.ndarray) -> np.ndarray:
            return with_first_others(positions, int(starts[place]), int(stops[place]), int(more[place]))

        return self._with(found, more.nonzero()[0], filled)

    def _with(self, found: Candidates, places: np.ndarray, new: Callable[[int, np.ndarray], np.ndarray]) -> Candidates:
        """Candidates in which some segments (int64, ascending) have other positions, which take the place of theirs."""
        if len(places) == 0:
            return found
        counts, kind = found.counts.copy(), found.indices.dtype
        indices, signed, done = [], [], 0
        for place in places.tolist():
            first, last = int(found.stops[place] - found.counts[place]), int(found.stops[place])
            positions = new(place, found.indices[first:last]).astype(kind, copy=False)
            counts[place] = len(positions)
            indices += [found.indices[done:first], positions]
            signed += [found.signed[done:first], self._bits.take(positions)]
            done = last
        indices.append(found.indices[done:])
        signed.append(found.signed[done:])
        return Candidates(np.concatenate(indices), np.concatenate(signed), counts)

    def _guessed(self, wanted: np.ndarray, floors: np.ndarray) -> np.ndarray:
        """int32 [A], floors that the quotas of ``wanted`` (bool [A]) large segments are above, most likely."""
        guessed = floors.copy()
        for place in self._layout.large:
            if wanted[place] and not self._layout.idle[place]:
                guessed[place] = max(0, guessed_floor(self._segment(place), int(self._layout.quotas[place])))
        return guessed

    def _sure_floors(self, floors: np.ndarray, ranks: np.ndarray, sub_blocks: SubBlocks, wanted: np.ndarray) -> None:
        """Fills in floors of the ``wanted`` small segments that ``ranks`` elements exceed, or all that are not zero."""
        maxima = [
            np.maximum.reduceat(self._magnitudes(piece.start, piece.stop), offsets)
            for piece, offsets in sub_blocks.offsets
        ]
        places = sub_blocks.places
        kth = kth_of_lists(np.concatenate(maxima), sub_blocks.counts, np.maximum(ranks[places], 1))
        floors[places] = np.where(wanted[places], np.maximum(kth - 1, 0), floors[places])

    def _kth_bits(self, found: Candidates, ranks: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """int32 [A], the ``ranks``-th largest of the candidates of the ``wanted`` (bool [A]) segments, -1 elsewhere."""
        kth = np.full(len(ranks), -1, np.int32)
        long = found.counts > _SORTED_TOGETHER
        for place in np.flatnonzero(wanted & long).tolist():
            mine = found.bits[found.stops[place] - found.counts[place] : found.stops[place]]
            kth[place] = np.partition(mine, len(mine) - ranks[place])[len(mine) - ranks[place]]
        short = np.flatnonzero(wanted & ~long)
        if len(short):
            bits = found.bits if len(short) == len(ranks) else found.bits[np.repeat(wanted & ~long, found.counts)]
            kth[short] = kth_of_lists(bits, found.counts[short], ranks[short])
        return kth

    def _trim(self, found: Candidates) -> Selection:
        """Cuts segments with more candidates than their quota to the largest, at equal magnitude the first."""
        quotas = self._layout.quotas
        over = np.flatnonzero(found.counts > quotas)
        if len(over) <= ONE_BY_ONE:
            if len(over):
                found = found.cut(over, lambda place, bits: largest_first(bits, int(quotas[place])))
            return as_selection(found.indices, found.signed)
        kept = self._kept(found)
        return as_selection(found.indices.take(kept), found.signed.take(kept))

    def _kept(self, found: Candidates) -> np.ndarray:
        """Places of the candidates that their segments have room for."""
        quotas = self._layout.quotas
        limits = np.repeat(self._kth_bits(found, quotas, found.counts > quotas), found.counts)  # -1: what fits is kept
        kept: np.ndarray = (found.bits >= limits).nonzero()[0]
        if len(kept) > np.minimum(found.counts, quotas).sum():
            kept = self._first_ties(found, limits)
        return kept

    def _first_ties(self, found: Candidates, limits: np.ndarray) -> np.ndarray:
        """Places of the candidates above their limits, and of as many of those that equal them as there is room for."""
        keep = found.bits > limits
        tied = np.flatnonzero(found.bits == limits)
        owners = np.searchsorted(found.stops, tied, side="right")
        larger = lengths_between(np.searchsorted(keep.nonzero()[0], found.stops))
        order = np.arange(len(tied)) - np.searchsorted(owners, owners)  # rank of a tie within its segment
        keep[tied[order < (self._layout.quotas - larger)[owners]]] = True
        return np.flatnonzero(keep)


def as_selection(indices: np.ndarray, signed: np.ndarray) -> Selection:
    positions, values = torch.from_numpy(indices), torch.from_numpy(signed.view(np.float32))
    return FoundSelection(positions, values) if indices.dtype == np.int32 else Selection(positions, values, len(values))

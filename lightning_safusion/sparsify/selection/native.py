"""Segmented selection on the CPU with compiled kernels: one look at the span, where it goes on as it did."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.selection.candidates import Candidates, Swept
from lightning_safusion.sparsify.selection.floors import LikelyFloors, room_of
from lightning_safusion.sparsify.selection.pieces import SubBlocks
from lightning_safusion.sparsify.selection.reference import NumpyView, as_selection
from lightning_safusion.sparsify.selection.sampling import common_floor
from lightning_safusion.sparsify.selection.survey import SpanSurvey
from lightning_safusion.sparsify.selection.view import MAGNITUDE_BITS

# Times the capacity: ranks whose magnitudes are asked of samples until enough is found. A look that finds too little
# costs less than to select without samples.
_DEEPER = (1, 2, 4)


class NativeView(NumpyView):
    """Finds what :class:`NumpyView` finds; sums are rounded otherwise.

    Floors need not be guessed from samples where earlier selections have left some, and candidates are collected while
    sums are made.

    Args:
        x: As there.
        segments: As there.
        survey: What is known of ``x``; anything else it tells is not used.
    """

    def __init__(self, x: Tensor, segments: Segments, survey: SpanSurvey | None = None) -> None:
        super().__init__(x, segments)
        self._sizes, self._parts = self._layout.sizes, self._layout.parts
        likely, seen = (None, None) if survey is None else survey.take(x, segments)
        self._likely = likely or LikelyFloors.unknown(segments)
        self._swept: Swept | None = None if seen is None else seen.swept
        self._seen = None if seen is None else seen._replace(swept=None)

    # -- statistics ------------------------------------------------------------------------------------------------

    def sums(self) -> Tensor:
        return self.moments()[0]

    def abs_sums(self) -> Tensor:
        return self.moments(magnitudes=True)[0]

    def square_sums(self) -> Tensor:
        return self.moments()[1]

    def moments(self, *, magnitudes: bool = False) -> tuple[Tensor, Tensor]:
        kind: native.Sums = "magnitudes" if magnitudes else "values"
        self._likely.sums = kind
        seen = self._seen
        if seen is not None and seen.kind == kind and seen.sums is not None and seen.squares is not None:
            return self._per_segment(seen.sums), self._per_segment(seen.squares)
        floors = None
        if self._swept is None and not np.isnan(self._likely.own[~self._layout.idle]).all():
            floors = self._likely_floors(MAGNITUDE_BITS)
        found = native.survey(self._floats, self._parts, native.Wanted(floors, room_of(self.segments), kind))
        if floors is not None and found.places is not None and found.bits is not None:
            self._swept = Swept(floors, [], Candidates(found.places, found.bits, found.counts))
        if found.sums is None or found.squares is None:
            raise RuntimeError("sums were asked for and not made")
        return self._per_segment(found.sums), self._per_segment(found.squares)

    def abs_max(self) -> Tensor:
        return self._per_segment(native.largest(self._floats, self._parts).view(np.float32))

    def tail_moments(self, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counts, sums, squares = native.tail(self._floats, self._parts, self._active(thresholds))
        return self._per_segment(counts), self._per_segment(sums), self._per_segment(squares)

    # -- selection -------------------------------------------------------------------------------------------------

    def take(self, thresholds: Tensor, *, inclusive: bool = False) -> Selection:
        quotas = self._layout.quotas
        floors = self._no_lower(self._floors(thresholds, inclusive), quotas)
        swept = self._swept_down_to(floors)
        self._likely.learn(swept.floors, swept.found.counts, quotas, self._sizes)
        if ((self._counts(swept, floors) == 0) & ~self._layout.idle).any():
            return super().take(thresholds, inclusive=inclusive)
        return self._largest_above(swept.found, floors)

    def top_pooled(self) -> Selection | None:
        if self._layout.idle.all():
            return None
        learned = self._likely.common
        if not np.isnan(learned[0]):
            common = int(learned.view(np.int32)[0])
            selection = self._pooled_below(common) if self._has_room(self._pooled_floors(common)) else None
            if selection is not None:
                return selection
        live = [self._segment(place) for place in np.flatnonzero(~self._layout.idle).tolist()]
        for more in _DEEPER:
            common = common_floor(live, more * self.segments.capacity)
            selection = self._pooled_below(common)
            if selection is not None or common <= 0:
                return selection
        return None

    def _pooled_below(self, common: int) -> Selection | None:
        """The pooled selection, if what is above ``common`` (bits) and above the floors of the quotas will do."""
        quotas, floors = self._layout.quotas, self._pooled_floors(common)
        found = self._above(floors)
        above = int(self._numbers(found, floors, np.maximum(floors, common)).sum())
        self._likely.learn_common(common, above, self.segments.capacity, len(self._floats))
        self._likely.learn(np.where(floors < common, floors, -2), found.counts, quotas, self._sizes)
        short = (found.counts < quotas) & (floors > 0)
        del found
        if short.any():
            floors, _ = self._found_again(floors, quotas, self._layout.sub_blocks, short)
        return self._pooled_above(floors)

    def _candidates(self, ranks: np.ndarray, sub_blocks: SubBlocks) -> Candidates:
        if ranks is not self._layout.quotas:
            return super()._candidates(ranks, sub_blocks)
        floors = self._likely_floors(-2)
        unknown = (floors == -2) & (ranks > 0)
        if not unknown.any() and not self._has_room(floors):
            floors, unknown = self._likely_floors(-2), ranks > 0
        if unknown.any():
            self._guess(floors, ranks, sub_blocks, unknown)
        found = self._above(floors)
        self._likely.learn(floors, found.counts, ranks, self._sizes)
        if (short := (found.counts < ranks) & ~unknown & (floors > 0)).any():
            floors, found = self._found_again(floors, ranks, sub_blocks, short)
        return self._completed(found, floors, ranks)

    def _found_again(
        self, floors: np.ndarray, ranks: np.ndarray, sub_blocks: SubBlocks, short: np.ndarray
    ) -> tuple[np.ndarray, Candidates]:
        """Looks once more at the ``short`` segments (bool [A]), with floors from samples."""
        lower = floors.copy()
        self._guess(lower, ranks, sub_blocks, short)
        self._likely.no_higher(lower, short)
        return lower, self._above(lower)

    def _has_room(self, floors: np.ndarray) -> bool:
        """Looks for what is above floors that are likely; forgets these where there is no room for all of that."""
        if self._swept is not None:
            return True
        found = native.survey(self._floats, self._parts, native.Wanted(floors, room_of(self.segments)))
        if found.places is None or found.bits is None:
            self._likely.forget()
            return False
        self._swept = Swept(floors, [], Candidates(found.places, found.bits, found.counts))
        return True

    # -- parts -----------------------------------------------------------------------------------------------------

    def _likely_floors(self, unknown: int) -> np.ndarray:
        """int32 [A]; nothing is above that of an idle segment."""
        own = self._likely.own
        floors = np.where(np.isnan(own), np.int32(unknown), own.view(np.int32))
        floors[self._layout.idle] = MAGNITUDE_BITS
        return floors

    def _pooled_floors(self, common: int) -> np.ndarray:
        """int32 [A], what will most likely do for the quotas and, with a magnitude (bits) for all, for the pool."""
        floors = np.minimum(self._likely_floors(MAGNITUDE_BITS), common)
        floors[self._layout.idle] = MAGNITUDE_BITS
        return floors

    def _narrowed(self, found: Candidates, floors: np.ndarray, higher: np.ndarray) -> Candidates:
        if np.array_equal(higher, floors):
            return found
        # in place, as lists are as large as the residual where many elements are sent: lower floors are a new sweep
        narrowed = Candidates(*native.keep_above(found.indices, found.signed, found.counts, higher))
        self._swept, self._counted = Swept(higher, [], narrowed), None
        return narrowed

    def _cut_to_pool(self, found: Candidates, floors: np.ndarray) -> tuple[Candidates, int]:
        shares = native.share(found.signed, found.counts, self._layout.quotas, self.segments.capacity)
        if int(shares.numbers.sum()) > self.segments.capacity:
            return found, shares.lowest
        return Candidates(*self._kept_of(found, shares.floors, shares.numbers), shares.numbers), shares.lowest

    def _trim(self, found: Candidates) -> Selection:
        return self._largest_above(found, np.full(len(found.counts), -1, np.int32))

    def _largest_above(self, found: Candidates, floors: np.ndarray) -> Selection:
        """Those above floors (int32 [A]), of each segment no more than there is room for."""
        return as_selection(*self._kept_of(found, floors, self._layout.quotas))

    def _kept_of(self, found: Candidates, floors: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places (int32) and bits of what is largest above the floor of each segment, up to a number (int64 [A])."""
        self._swept = self._counted = None  # overwritten
        places = found.indices.astype(np.int32, copy=False)
        return native.keep_largest(places, found.signed, found.counts, floors, numbers)

    def _numbers(self, found: Candidates, floors: np.ndarray, higher: np.ndarray) -> np.ndarray:
        return native.number_above(found.signed, found.counts, higher, floors, found.counts)

    def _counts(self, swept: Swept, floors: np.ndarray) -> np.ndarray:
        found, known = swept.found, self._counted or (swept.floors, swept.found.counts)
        counts = native.number_above(found.signed, found.counts, floors, *known)
        self._counted = floors, counts
        return counts

    def _sweep(self, floors: np.ndarray, changed: list[bool], _: list[tuple[np.ndarray, np.ndarray]]) -> Swept:
        again, old = np.array(changed), self._swept
        if old is None or again.all():
            self._swept = old = None  # freed before there are others
        runs = (self._layout.starts[again], self._sizes[again])
        parts = self._parts if old is None else native.Parts.of(*runs)
        found = native.survey(self._floats, parts, native.Wanted(floors[again], room_of(self.segments)))
        if found.places is None:  # now it is known how many
            found = native.survey(self._floats, parts, native.Wanted(floors[again], int(found.counts.sum())))
        if found.places is None or found.bits is None:
            raise RuntimeError("a span has changed while it was read")
        if old is None:
            return Swept(floors, [], Candidates(found.places, found.bits, found.counts))
        known = native.Lists(old.found.indices, old.found.signed, old.found.counts)
        lists = native.replaced(known, again, native.Lists(found.places, found.bits, found.counts))
        return Swept(floors, [], Candidates(*lists))

"""Segmented selection on the CPU with compiled kernels: one pass over the span, or none where gradients were surveyed.

Elements above a *floor* of their segment are collected as *candidates*, from which every higher threshold is answered
without reading the span again. Floors are predicted from earlier selections or guessed from samples.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.selection.survey import UNKNOWN, History, SpanSurvey, common_floor, guessed_floor
from lightning_safusion.sparsify.selection.view import SegmentedView, log_sums, merged, order_floors

_SMALL = 1 << 14  # elements of a segment that is never sampled: a floor that is sure costs less
# Times the capacity: ranks that are guessed from samples, until enough candidates are found.
_DEEPER = (1, 2, 4)


class FoundSelection(Selection):
    """A selection by compiled kernels: positions are int32 [K], and int64 ``indices`` are made when they are read."""

    compiled = True

    def __init__(self, positions: Tensor, values: Tensor) -> None:
        self.__dict__.update(positions=positions, values=values, count=len(values))

    @cached_property
    def indices(self) -> Tensor:
        return self.positions.long()

    def with_values_of(self, x: Tensor) -> Selection:
        native.take(x, self.positions.numpy(), self.values.numpy())  # in place of keys, which nobody needs any more
        return self


class NativeView(SegmentedView):
    """Reads a span with compiled kernels; see :func:`segmented_view` for the arguments."""

    def __init__(self, x: Tensor, segments: Segments, survey: SpanSurvey | None = None) -> None:
        self.x, self.segments, self._survey = x, segments, survey
        history, seen = (None, None) if survey is None else survey.take(x, segments)
        self._history = history or History(segments)
        self._live = self._history.live
        self._found: native.Lists | None = None  # candidates, which exceed the floors in `_lowest`
        self._lowest: np.ndarray = self._history.floors
        self._counted: tuple[np.ndarray, np.ndarray] | None = None  # the latest floors, and elements above them
        self._summed: dict[native.Sums, tuple[np.ndarray, np.ndarray]] = {}
        if seen is not None:
            self._keep(*seen)

    @cached_property
    def _floats(self) -> np.ndarray:
        if self._survey is not None:
            self._survey.complete(self.x)
        return self.x.detach().numpy()

    # -- statistics ------------------------------------------------------------------------------------------------

    def moments(self, *, magnitudes: bool = False) -> tuple[Tensor, Tensor]:
        kind: native.Sums = "magnitudes" if magnitudes else "values"
        self._history.sums = kind
        if kind not in self._summed:
            floors = self._history.floors[:-1]
            unasked = self._found is not None or bool((floors == UNKNOWN).all())
            self._look(native.Wanted(None if unasked else floors, self._live.room, kind))
        sums, squares = self._summed[kind]
        return self._per_segment(sums), self._per_segment(squares)

    def log_abs_sums(self) -> tuple[Tensor, Tensor]:
        sums, present = log_sums(self._floats, self._live.starts, self._live.sizes)
        return self._per_segment(sums), self._per_segment(present)

    def abs_max(self) -> Tensor:
        return self._per_segment(native.largest(self._floats, self._live.parts).view(np.float32))

    def tail_moments(self, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counts, sums, squares = native.tail(self._floats, self._live.parts, thresholds.numpy()[self._live.places])
        return self._per_segment(counts), self._per_segment(sums), self._per_segment(squares)

    def count_above(self, thresholds: Tensor, enough: Tensor | None = None) -> Tensor:
        floors = self._floors(thresholds)
        if enough is not None:
            floors = self._no_lower(floors, enough.numpy()[self._live.places] + 1)
        if self._found is not None and (lowered := floors < self._lowest).any():
            # a threshold is lowered until enough elements exceed it, which a sparse segment never has: one pass for all
            large = lowered & (self._live.sizes > _SMALL)
            self._down_to(np.minimum(floors, np.maximum(self._guessed(floors, self._live.quotas, large), 0)))
        return self._per_segment(self._counts(self._down_to(floors), floors))

    # -- selection -------------------------------------------------------------------------------------------------

    def kth_largest(self, ranks: np.ndarray) -> Tensor:
        ranks = np.minimum(ranks[self._live.places], self._live.sizes)
        wanted = ranks > 0
        floors = self._guessed(np.full(len(ranks), UNKNOWN, np.int32), ranks, wanted)
        found = self._complete(self._above(floors), floors, ranks)
        starts, counts = found.counts.cumsum() - found.counts, found.counts
        kth = np.full(len(ranks), np.inf, np.float32).view(np.int32)
        kth[wanted] = native.kth_largest(found.bits, starts[wanted], counts[wanted], ranks[wanted])
        return self._per_segment(kth.view(np.float32))

    def top(self) -> Selection:
        quotas, floors = self._live.quotas, self._history.floors[:-1]
        unknown = floors == UNKNOWN
        if not unknown.any() and self._found is None and not self._has_room(floors):
            unknown = np.ones_like(unknown)
        if unknown.any():
            floors = self._guessed(floors, quotas, unknown)
        found = self._above(floors)
        self._history.learn(floors, found.counts)
        if (few := found.counts < quotas).any():
            if (short := few & ~unknown & (floors > 0)).any():
                floors, found = self._found_again(floors, short)
            found = self._complete(found, floors, quotas)
        return self._cut(found, np.full(len(quotas), -1, np.int32), quotas)

    def take(self, thresholds: Tensor) -> Selection:
        quotas = self._live.quotas
        floors = self._no_lower(self._floors(thresholds), quotas)
        found = self._down_to(floors)
        self._history.learn(self._lowest, found.counts)
        empty = self._counts(found, floors) == 0
        if not empty.any():
            return self._cut(found, floors, quotas)
        # each of these sends its (first) largest element, a zero if there is no other
        floors = self._guessed(floors, np.ones_like(quotas), empty)
        found = self._complete(self._above(floors), floors, empty.astype(np.int64))
        return self._cut(found, np.full(len(quotas), -1, np.int32), np.where(empty, 1, quotas))

    def top_pooled(self) -> Selection | None:
        live, common = self._live, int(self._history.floors[-1])
        if not len(live.places):
            return None
        likely = np.minimum(self._history.floors[:-1], np.int32(common))
        if common != UNKNOWN and (self._found is not None or self._has_room(likely)):
            selection = self._pooled_above(common)
            if selection is not None:
                return selection
        runs = [self._run(place).view(np.int32) for place in range(len(live.places))]
        for more in _DEEPER:
            common = common_floor(runs, more * self.segments.capacity)
            selection = self._pooled_above(common)
            if selection is not None or common <= 0:
                return selection
        return None

    def _pooled_above(self, common: int) -> Selection | None:
        """The pooled selection, if what is above ``common`` (bits) and above the floors of the quotas suffices."""
        quotas = self._live.quotas
        floors = np.minimum(self._history.floors[:-1], np.int32(common))
        found = self._above(floors)
        above = int(found.number_above(np.full_like(floors, common), floors, found.counts).sum())
        self._history.learn(np.where(floors < common, floors, UNKNOWN), found.counts, common, above)
        if (short := (found.counts < quotas) & (floors > 0)).any():
            floors, found = self._found_again(floors, short)
        return self._shared(found, floors)

    def _shared(self, found: native.Lists, floors: np.ndarray) -> Selection | None:
        """The pooled selection from what is above floors (int32 [A]); None where these were too high for it."""
        quotas, room, highest = self._live.quotas, self.segments.capacity, int(floors.max())
        if (short := found.counts < quotas).any():
            if (floors[short] > 0).any():
                return None
            found = self._filled(found, np.maximum(quotas - found.counts, 0))
        left = room - len(found.places)
        if highest <= 0 and left >= 0:  # every non-zero is found, and sent, and so are the first zeros
            free = self._live.sizes - found.counts
            found = self._filled(found, np.clip(left - free.cumsum() + free, 0, free))
            return self._cut(found, np.full(len(quotas), -1, np.int32), found.counts)
        if left > 0:
            return None
        limits, numbers, lowest = found.share(quotas, room)
        # what was not found has at most the highest floor; and quotas may take the places of larger elements
        if lowest <= highest and highest > 0 or int(numbers.sum()) != room:
            return None
        return self._cut(found, limits, numbers)

    def merge(self, floors: Selection, others: Selection, room: int) -> Selection:
        return merged(torch.from_numpy(self._floats), floors, others, room)

    # -- floors ----------------------------------------------------------------------------------------------------

    def _floors(self, thresholds: Tensor) -> np.ndarray:
        return order_floors(thresholds.numpy()[self._live.places])

    def _no_lower(self, floors: np.ndarray, enough: np.ndarray) -> np.ndarray:
        """The floors, but not below those of segments that have that many (float [A]) candidates already."""
        if self._found is None:
            return floors
        return np.where(self._found.counts >= enough, np.maximum(floors, self._lowest), floors)

    def _guessed(self, floors: np.ndarray, ranks: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Floors, those of some segments (bool [A]) such that most likely ``ranks`` elements exceed them."""
        floors, live = floors.copy(), self._live
        small = wanted & (live.sizes <= _SMALL)
        if small.any():
            bits = self._floats.view(np.int32)
            kth = native.kth_largest(bits, live.starts[small], live.sizes[small], ranks[small], exact=False)
            floors[small] = np.maximum(kth - 1, 0)
        for place in np.flatnonzero(wanted & ~small).tolist():
            floors[place] = guessed_floor(self._run(place).view(np.int32), int(ranks[place]))
        return floors

    def _has_room(self, floors: np.ndarray) -> bool:
        """Collects what is above predicted floors; forgets these where there is no room for all of that."""
        self._look(native.Wanted(floors, self._live.room))
        if self._found is None:
            self._history.forget()
        return self._found is not None

    def _look(self, wanted: native.Wanted) -> None:
        self._keep(wanted, native.survey(self._floats, self._live.parts, wanted))

    def _keep(self, wanted: native.Wanted, found: native.Survey) -> None:
        if wanted.floors is not None and found.lists is not None:
            self._found, self._lowest = found.lists, wanted.floors
        if wanted.sums is not None and found.sums is not None and found.squares is not None:
            self._summed[wanted.sums] = found.sums, found.squares

    # -- candidates ------------------------------------------------------------------------------------------------

    def _run(self, place: int) -> np.ndarray:
        """float32, the elements of a live segment."""
        start = self._live.starts[place]
        return self._floats[start : start + self._live.sizes[place]]

    def _per_segment(self, per_live: np.ndarray) -> Tensor:
        result = np.zeros(len(self.segments), per_live.dtype)
        result[self._live.places] = per_live
        return torch.from_numpy(result)

    def _counts(self, found: native.Lists, floors: np.ndarray) -> np.ndarray:
        """int64 [A], candidates above floors (int32 [A]) that are no lower than theirs."""
        # a search for thresholds changes those of few segments in the end
        counts = found.number_above(floors, *(self._counted or (self._lowest, found.counts)))
        self._counted = floors, counts
        return counts

    def _above(self, floors: np.ndarray) -> native.Lists:
        """The elements above the floors (int32 [A])."""
        found = self._found
        if found is None or (self._lowest != floors).any():
            found = self._down_to(floors)
            if (self._lowest != floors).any():
                # in place: where many elements are sent, the lists are as large as the residual
                self._found = found = found.above(floors)
                self._lowest, self._counted = floors, None
        return found

    def _found_again(self, floors: np.ndarray, short: np.ndarray) -> tuple[np.ndarray, native.Lists]:
        """Reads the ``short`` segments (bool [A]) again, with floors from samples."""
        lower = self._guessed(floors, self._live.quotas, short)
        self._history.lower(lower, short)
        return lower, self._above(lower)

    def _down_to(self, floors: np.ndarray) -> native.Lists:
        """At least the elements above the floors; reads the segments again where no floor was as low so far."""
        found = self._found
        if found is not None:
            lowered = floors < self._lowest
            if not lowered.any():
                return found
            floors = np.minimum(floors, self._lowest)
            if not lowered.all():
                parts = native.Parts.of(self._live.starts[lowered], self._live.sizes[lowered])
                self._found = found.replaced(lowered, self._read(floors[lowered], parts))
                self._lowest = floors
                return self._found
            self._found = found = None  # freed before there are others
        self._found, self._lowest = self._read(floors, self._live.parts), floors
        return self._found

    def _read(self, floors: np.ndarray, parts: native.Parts) -> native.Lists:
        found = native.survey(self._floats, parts, native.Wanted(floors, self._live.room))
        if found.lists is None:  # now it is known how many
            found = native.survey(self._floats, parts, native.Wanted(floors, int(found.counts.sum())))
        if found.lists is None:
            raise RuntimeError("a span has changed while it was read")
        return found.lists

    def _complete(self, found: native.Lists, floors: np.ndarray, ranks: np.ndarray) -> native.Lists:
        """At least ``ranks`` (int64 [A]) candidates of every segment, from those above the floors."""
        if (wrong := (found.counts < ranks) & (floors > 0)).any():  # guessed from a sample that was not like the rest
            starts, sizes, exact = self._live.starts[wrong], self._live.sizes[wrong], floors.copy()
            kth = native.kth_largest(self._floats.view(np.int32), starts, sizes, ranks[wrong])
            exact[wrong] = np.maximum(kth - 1, 0)
            found = self._above(exact)
        return self._filled(found, np.maximum(ranks - found.counts, 0))

    def _filled(self, found: native.Lists, more: np.ndarray) -> native.Lists:
        """Candidates and, of each segment, the first ``more`` (int64 [A]) elements that are not among them."""
        if not more.any():
            return found
        live, marked, stops, filled = self._live, more > 0, found.counts.cumsum(), []
        for place in np.flatnonzero(marked).tolist():
            own = found.places[stops[place] - found.counts[place] : stops[place]]
            filled.append(with_first_others(own, int(live.starts[place]), int(live.sizes[place]), int(more[place])))
        places = np.concatenate(filled)
        others = native.Lists(places, self._floats.view(np.int32)[places], (found.counts + more)[marked])
        self._found = self._counted = None  # what is filled up is more than what is above the floors
        return found.replaced(marked, others)

    def _cut(self, found: native.Lists, floors: np.ndarray, numbers: np.ndarray) -> Selection:
        """Of each segment the largest candidates above its floor, up to a number (int64 [A])."""
        self._found = self._counted = None  # overwritten
        places, bits = found.largest(floors, numbers)
        return FoundSelection(torch.from_numpy(places), torch.from_numpy(bits.view(np.float32)))


def with_first_others(positions: np.ndarray, start: int, size: int, more: int) -> np.ndarray:
    """Some positions of a segment, ascending, and the first ``more`` of its other ones among them."""
    length = min(size, len(positions) + more)
    taken = np.zeros(length, np.bool_)
    inside = positions[: positions.searchsorted(start + length)]
    taken[inside - start] = True
    taken[(~taken).nonzero()[0][:more]] = True
    begin = (taken.nonzero()[0] + start).astype(positions.dtype, copy=False)
    return np.concatenate([begin, positions[len(inside) :]])

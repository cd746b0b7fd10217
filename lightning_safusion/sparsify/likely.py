"""What the next selection from the same segments will most likely find enough above; no result depends on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_safusion import native
from lightning_safusion.sparsify.base import Segments
from lightning_safusion.sparsify.candidates import Candidates, Swept
from lightning_safusion.sparsify.pieces import Pieces
from lightning_safusion.sparsify.view import MAGNITUDE_BITS

# Candidates that a floor should let through, in elements that are looked for: enough that the next step hardly ever
# finds too few, which costs another look at the segment.
_SPARE, _SIGMAS, _MORE = 1.5, 4, 32
# How thresholds follow the number that they let through. Whoever was above the last one has been sent, so that there
# are many residuals a little below it and few above, and the next one may be a little lower or higher: they stay where
# they let enough through in all steps, as long as these are not too many.
_FALLS, _RISES, _TOO_MANY, _SHARE = 0.93, 1.02, 4, 0.1
_FAR_FROM, _STEEPNESS, _HIGHER = 8, 0.2, 2
_FAR_OFF = 64  # times the candidates that it should let through: it is guessed anew
# Room for candidates: times the quotas, and a share of the elements that is not exceeded without need.
_ROOM, _ROOM_AT_LEAST, _ROOM_SHARE, _ROOM_NEEDED = 16, 1 << 12, 1 / 8, 4


@dataclass
class LikelyFloors:
    """What the next selection from the same segments will most likely find enough above; no result depends on it.

    Args:
        own: float32 [A], magnitudes for the quota of each active segment; NaN where nothing is known.
        common: A magnitude for all segments together; NaN if it is not known.
        sums: Which sums will most likely be asked for.
    """

    own: np.ndarray
    common: np.ndarray
    sums: native.Sums | None = None

    @classmethod
    def of(cls, segments: Segments, count: int) -> LikelyFloors:
        """Those of segments with ``count`` active ones, kept with them."""
        if "likely floors" not in segments.cache:
            segments.cache["likely floors"] = cls(np.full(count, np.nan, np.float32), np.full(1, np.nan, np.float32))
        likely: LikelyFloors = segments.cache["likely floors"]
        return likely

    def floors(self, segments: Segments) -> np.ndarray:
        """int32 [A], what will most likely do; that of a segment of which nothing is known lets nothing through."""
        floors = np.where(np.isnan(self.own), MAGNITUDE_BITS, self.own.view(np.int32))
        if segments.pool:
            common = self.common.view(np.int32)[0]
            floors = np.minimum(floors, MAGNITUDE_BITS if np.isnan(self.common[0]) else common)
        return np.where(Pieces.of(segments).idle, MAGNITUDE_BITS, floors).astype(np.int32)

    def forget(self) -> None:
        """Knows nothing any more: where far too many elements were above the floors, samples tell better."""
        self.own, self.common = np.full_like(self.own, np.nan), np.full_like(self.common, np.nan)

    def learn(self, floors: np.ndarray, counts: np.ndarray, ranks: np.ndarray, sizes: np.ndarray) -> None:
        """Takes in how many elements of each segment were above floors (int32 [A]; -2 tells nothing)."""
        told = (floors > -2) & (floors < MAGNITUDE_BITS) & (ranks > 0)
        self.own = np.where(told, _moved(floors, counts, ranks, sizes), self.own)

    def no_higher(self, floors: np.ndarray, short: np.ndarray) -> None:
        """Takes in floors (int32 [A]) for those segments (bool [A]) that too few were found in."""
        guessed = np.maximum(floors, 0).view(np.float32)
        self.own = np.where(short & (floors > 0), np.fmin(self.own, guessed), self.own)

    def learn_common(self, floor: int, count: int, rank: int, size: int) -> None:
        """The same for all segments together."""
        self.common = _moved(np.array([floor], np.int32), np.array([count]), np.array([rank]), np.array([size]))


def _moved(floors: np.ndarray, counts: np.ndarray, ranks: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Thresholds (float32) that more than ``ranks`` will be above; NaN where that is not to be expected."""
    shares = counts / (_SPARE * ranks + _SIGMAS * np.sqrt(ranks) + _MORE)
    many = np.clip(_SHARE * sizes / np.maximum(ranks, 1), 1, _TOO_MANY)
    factors = np.where(shares < 1, _FALLS, np.where(shares < many, 1, _RISES))
    factors = np.where(shares < _FAR_FROM, factors, np.minimum(shares**_STEEPNESS, _HIGHER))
    with np.errstate(invalid="ignore", over="ignore"):
        moved = np.maximum(floors, 0).view(np.float32) * factors.astype(np.float32)
    usable = (floors > 0) & (shares < _FAR_OFF) & np.isfinite(moved)
    return np.where(usable, moved, np.float32(np.nan))


class Seen(NamedTuple):
    """What is known of a span before anyone has asked for it.

    Args:
        swept: Some of its elements; None if there was no room for them.
        kind: What was summed, if anything.
        sums: float64 [A].
        squares: float64 [A], sums of squares.
    """

    swept: Swept | None
    kind: native.Sums | None
    sums: np.ndarray
    squares: np.ndarray


class Foresight:
    """Lets elements be found, and sums be made, while gradients are added, before anyone has asked for them.

    Args:
        segments: Cut of the span that will be selected from.
        edges: Where the tensors of the span begin and end: each lies in one segment.
    """

    def __init__(self, segments: Segments, edges: Sequence[int]) -> None:
        self._segments = segments
        bounds = np.asarray(edges, np.int64)
        starts = bounds[:-1][np.diff(bounds) > 0]
        self._owners = np.searchsorted(segments.edges, starts, side="right") - 1
        self._floors = np.empty(0, np.int32)
        self._kind: native.Sums | None = None

    def wanted(self) -> native.Wanted | None:
        """What is to be found, with a floor for each tensor that is not empty; None if nothing is known."""
        likely: LikelyFloors | None = self._segments.cache.get("likely floors")
        if likely is None or self._segments.numel >= native.MOST_ELEMENTS:
            return None
        self._floors, self._kind = likely.floors(self._segments), likely.sums
        per_segment = np.full(len(self._segments), MAGNITUDE_BITS, np.int32)
        per_segment[Pieces.of(self._segments).active] = self._floors
        return native.Wanted(per_segment[self._owners], room_of(self._segments), self._kind)

    @contextmanager
    def known(self, found: native.Survey | None) -> Iterator[None]:
        """Lets whoever looks at the span next begin with what has been found in it."""
        if found is not None:
            layout, swept = Pieces.of(self._segments), None
            if found.places is not None and found.bits is not None:
                counts = np.bincount(self._owners, found.counts, len(self._segments)).astype(np.int64)
                swept = Swept(self._floors, [], Candidates(found.places, found.bits, counts[layout.active]))
            else:
                LikelyFloors.of(self._segments, len(layout.active)).forget()
            sums, squares = (self._per_segment(totals)[layout.active] for totals in (found.sums, found.squares))
            self._segments.cache["seen"] = Seen(swept, self._kind, sums, squares)
            del swept
        del found  # whoever finds other candidates shall be able to free these
        try:
            yield
        finally:
            self._segments.cache.pop("seen", None)

    def _per_segment(self, per_tensor: np.ndarray | None) -> np.ndarray:
        if per_tensor is None:
            return np.zeros(len(self._segments))
        return np.bincount(self._owners, per_tensor, len(self._segments))


def room_of(segments: Segments) -> int:
    """For how many candidates there shall be room."""
    room = min(_ROOM * segments.capacity, int(_ROOM_SHARE * segments.numel))
    return max(_ROOM_AT_LEAST, _ROOM_NEEDED * segments.capacity, room)

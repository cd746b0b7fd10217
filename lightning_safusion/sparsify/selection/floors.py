"""Predicted thresholds. A wrong one costs time, never correctness."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Segments
from lightning_safusion.sparsify.selection.pieces import Pieces
from lightning_safusion.sparsify.selection.view import MAGNITUDE_BITS

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
    def unknown(cls, segments: Segments) -> LikelyFloors:
        """Those of segments of which nothing is known."""
        count = len(Pieces.of(segments).active)
        return cls(np.full(count, np.nan, np.float32), np.full(1, np.nan, np.float32))

    def floors(self, idle: np.ndarray, pooled: bool) -> np.ndarray:
        """What will most likely do; that of a segment of which nothing is known lets nothing through.

        Args:
            idle: bool [A], segments without a quota: nothing is above their floors.
            pooled: Segments share a pool.

        Returns:
            int32 [A].
        """
        floors = np.where(np.isnan(self.own), np.int32(MAGNITUDE_BITS), self.own.view(np.int32))
        if pooled and not np.isnan(self.common[0]):
            np.minimum(floors, self.common.view(np.int32)[0], out=floors)
        floors[idle] = MAGNITUDE_BITS
        return floors

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
        self.own = np.where(short & (floors >= 0), np.fmin(self.own, guessed), self.own)

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
    # a floor of 0 finds all non-zeros: there it stays as long as there are not too many of them
    usable = ((floors > 0) & (shares < _FAR_OFF) | (floors == 0) & (shares < many)) & np.isfinite(moved)
    return np.where(usable, moved, np.float32(np.nan))


def room_of(segments: Segments) -> int:
    """For how many candidates there shall be room."""
    room = min(_ROOM * segments.capacity, int(_ROOM_SHARE * segments.numel))
    return max(_ROOM_AT_LEAST, _ROOM_NEEDED * segments.capacity, room)

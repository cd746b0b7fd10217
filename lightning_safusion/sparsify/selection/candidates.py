"""Elements of a span that may be selected, ordered by the bits of their magnitudes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_safusion.sparsify.selection.pieces import BLOCK, Piece, lengths_between
from lightning_safusion.sparsify.selection.view import MAGNITUDE_BITS

ONE_BY_ONE = 32  # segments up to this number are looked at one by one
_FEW_WORDS = 4 / 7  # of the words of a mask: what a tenth of true places touches


@dataclass(frozen=True, eq=False)
class Candidates:
    """Some elements of every active segment.

    Args:
        indices: int64 [C], or int32 where compiled kernels have found them: ascending positions in the span.
        signed: int32 [C], their bits.
        counts: int64 [A], how many each active segment has.
    """

    indices: np.ndarray
    signed: np.ndarray
    counts: np.ndarray

    @cached_property
    def bits(self) -> np.ndarray:
        """int32 [C], bits of their magnitudes."""
        magnitudes: np.ndarray = self.signed & MAGNITUDE_BITS
        return magnitudes

    @cached_property
    def stops(self) -> np.ndarray:
        """int64 [A], place after the last candidate of each segment."""
        return self.counts.cumsum()

    def places_above(self, floors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of them have bits above the floor (int32 [A]) of their segment, and how many of each segment."""
        places = (self.bits > floors.repeat(self.counts)).nonzero()[0]
        return places, lengths_between(places.searchsorted(self.stops))

    def above(self, floors: np.ndarray, swept: np.ndarray) -> Candidates:
        """Those with bits above the floor (int32 [A]) of their segment.

        Args:
            floors: int32 [A], none below those of ``swept``.
            swept: int32 [A], floors that all of them are above.
        """
        changed = np.flatnonzero(floors != swept)
        if len(changed) > ONE_BY_ONE:
            places, counts = self.places_above(floors)
            return Candidates(self.indices.take(places), self.signed.take(places), counts)
        return self.cut(changed, lambda place, bits: (bits > floors[place]).nonzero()[0])

    def cut(self, segments: np.ndarray, keep: Callable[[int, np.ndarray], np.ndarray]) -> Candidates:
        """Leaves some of the candidates of a few segments out.

        Args:
            segments: int64, ascending.
            keep: Takes a segment and the bits of its candidates, and gives the ascending places of those that stay.
        """
        counts, parts, done = self.counts.copy(), [], 0
        for place in segments.tolist():
            start, stop = self.stops[place] - self.counts[place], self.stops[place]
            kept = keep(place, self.bits[start:stop])
            counts[place] = len(kept)
            parts += [slice(done, start), kept + start]
            done = stop
        parts.append(slice(done, None))
        indices = np.concatenate([self.indices[part] for part in parts])
        return Candidates(indices, np.concatenate([self.signed[part] for part in parts]), counts)

    def counts_above(self, floors: np.ndarray, known: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """How many of each segment have bits above the floor (int32 [A]) of their segment.

        Args:
            floors: int32 [A].
            known: int32 [A], floors for which that is known already.
            numbers: int64 [A], how many those are.
        """
        changed = np.flatnonzero(floors != known)
        if len(changed) > ONE_BY_ONE:
            return self.places_above(floors)[1]
        counts, stops = numbers.copy(), self.stops
        for place in changed.tolist():
            mine = self.bits[stops[place] - self.counts[place] : stops[place]]
            counts[place] = np.count_nonzero(mine > floors[place])
        return counts


def with_first_others(positions: np.ndarray, start: int, stop: int, more: int) -> np.ndarray:
    """Some positions of a segment ``[start, stop)``, ascending, and the first ``more`` of its other ones among them."""
    length = min(stop - start, len(positions) + more)
    taken = np.zeros(length, np.bool_)
    inside = positions[: positions.searchsorted(start + length)]
    taken[inside - start] = True
    taken[(~taken).nonzero()[0][:more]] = True
    begin = (taken.nonzero()[0] + start).astype(positions.dtype, copy=False)
    return np.concatenate([begin, positions[len(inside) :]])


class Swept(NamedTuple):
    """All elements above the lowest floors (int32 [A]) asked for so far: positions and bits by piece, and listed."""

    floors: np.ndarray
    parts: list[tuple[np.ndarray, np.ndarray]]
    found: Candidates


def true_places(mask: np.ndarray) -> np.ndarray:
    """Ascending places (int64) of what is true in a mask (bool, a multiple of 8 of them).

    NumPy mispredicts a branch at each of them as long as they are less than a tenth: there it is better to look at 8
    places at once first.
    """
    words = mask.view(np.uint64)
    hits = (words != 0).nonzero()[0]
    if len(hits) > _FEW_WORDS * len(words):
        return mask.nonzero()[0]
    inside = words.take(hits).view(np.bool_).nonzero()[0]
    places: np.ndarray = hits.take(inside >> 3)
    places <<= 3
    inside &= 7
    places += inside
    return places


class _Scratch(threading.local):
    """A block of each thread, in its cache: fresh memory for every block would be mapped, faulted in and unmapped."""

    def __init__(self) -> None:
        self.bits = np.empty(BLOCK, np.int32)
        self.mask = np.empty(BLOCK, np.bool_)


_scratch = _Scratch()


def read_above(span: np.ndarray, piece: Piece, floors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions and bits of the elements of a piece above the floors, while it is in the cache.

    Args:
        span: int32 [N], bits of the elements.
        piece: Of the span.
        floors: int32 [A], of the active segments.
    """
    block = span[piece.start : piece.stop]
    size, mask = len(block), _scratch.mask[: -(-len(block) // 8) * 8]
    bits = np.bitwise_and(block, MAGNITUDE_BITS, out=_scratch.bits[:size])
    np.greater(bits, piece.spread(floors), out=mask[:size])
    mask[size:] = False
    places = true_places(mask)
    signed = block.take(places)
    places += piece.start
    return places, signed


def order_floors(thresholds: np.ndarray, inclusive: bool) -> np.ndarray:
    """Integers such that ``bits > floor`` exactly where ``magnitude > threshold`` (``>=`` if inclusive)."""
    # The sum makes -0.0 a zero; the bits of what is still negative are negative integers.
    floors: np.ndarray = np.maximum((thresholds + np.float32(0)).view(np.int32) - inclusive, -1)
    floors[np.isnan(thresholds)] = MAGNITUDE_BITS
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

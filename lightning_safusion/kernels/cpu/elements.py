"""Passes over the elements of a span or of gradients, and lists of the elements found there."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from lightning_safusion.kernels.cpu.library import Parts, address, empty, kernels, shared

Sums: TypeAlias = Literal["values", "magnitudes"]

_SPARE = 33  # elements that are written behind the last one before the lack of room is noticed
MOST_ELEMENTS = 1 << 31  # of a span in which elements are found: positions have 32 bits until some are selected


class Weights(NamedTuple):
    """Second moments of the optimizer, for keys: ``x / (sqrt(moment) + epsilon)``."""

    #: int64 [S], where those of each run lie in memory; 0 for a run whose elements are their own keys.
    moments: np.ndarray
    epsilons: np.ndarray  #: float32 [S]

    def of(self, parts: Parts) -> Weights:
        """The weights of each part."""
        moments, epsilons = map(parts.spread, self)
        inside = 4 * (parts.starts - parts.spread(parts.starts[parts.firsts]))
        return Weights(np.where(moments == 0, 0, moments + inside), epsilons)


class Wanted(NamedTuple):
    """What to find in some runs of a span in one pass."""

    #: int32 [S]: elements with bits of magnitude above the floor of their run. None for no element. Of every part,
    #: int32 [P]: what is found is told part by part.
    floors: np.ndarray | None = None
    room: int = 0  #: most elements that each thread may find
    #: Of the elements or of their magnitudes, and of squares: of a thousand in float32, of these in float64.
    sums: Sums | None = None
    #: What is looked for, and summed, are keys; None for the elements themselves. Gradients only.
    weights: Weights | None = None
    keys: np.ndarray | None = None  #: float32 [N], are written: the keys. None does not keep them.


_NOTHING = Wanted()


class Survey(NamedTuple):
    """What one pass over some runs of a span has found."""

    lists: Lists | None  #: elements above the floors, a list for each run; None if there was no room for them
    counts: np.ndarray  #: int64 [S], how many there are in each run
    sums: np.ndarray | None  #: float64 [S]; None if not wanted
    squares: np.ndarray | None  #: float64 [S], sums of squares; None if not wanted


def survey(x: np.ndarray, parts: Parts, wanted: Wanted) -> Survey:
    """Reads runs of a span (float32 [N]) once."""
    return _look(kernels().safusion_survey, (), (x,), parts, wanted)


def _look(
    kernel: Any, runs: tuple[np.ndarray | None, ...], given: tuple[Any, ...], parts: Parts, wanted: Wanted
) -> Survey:
    """One pass over all parts; the kernel's arguments are ``runs``, one number for each part, and ``given``."""
    floors, room, kind, *_ = wanted
    number = len(parts.starts)
    cut = len(parts.firsts) != number and (floors is None or len(floors) != number)
    counts, sums = np.zeros(number, np.int64), None if kind is None else np.zeros((2, number))
    if floors is not None:
        floors = floors.astype(np.int32, copy=False)
        floors = parts.spread(floors) if cut else floors
    room = 0 if floors is None else room

    def read(low: int, high: int) -> tuple[np.ndarray, np.ndarray, int]:
        places, bits = empty(2 * (room + _SPARE), np.int32).reshape(2, -1)
        first, second = (None, None) if sums is None else map(address, sums[:, low:high])
        own = []
        for run in runs:  # a generator is entered again for every run of every step
            own.append(None if run is None else address(run[low:high]))
        found: int = kernel(
            *own,
            *given,
            parts.starts[low:high],
            parts.sizes[low:high],
            high - low,
            None if floors is None else address(floors[low:high]),
            int(kind == "magnitudes"),
            first,
            second,
            places,
            bits,
            room,
            counts[low:high],
        )
        return places[:found], bits[:found], found

    found = shared(read, parts.sizes)
    whole = parts.whole(counts) if cut else counts
    totals = (None, None) if sums is None else tuple(map(parts.whole, sums)) if cut else sums
    if floors is None or max(map(itemgetter(2), found)) > room:
        return Survey(None, whole, *totals)
    places, bits, _ = found[0]
    if len(found) > 1:
        size = sum(map(itemgetter(2), found))
        places, bits = (np.concatenate([part[i] for part in found], out=empty(size, np.int32)) for i in (0, 1))
    return Survey(Lists(places, bits, whole), whole, *totals)


def weigh(x: np.ndarray, parts: Parts, weights: Weights, keys: np.ndarray) -> None:
    """Writes the keys of runs of a span (float32 [N]); ``keys``: float32 [N]."""
    each = weights.of(parts)

    def write(low: int, high: int) -> None:
        own = [run[low:high] for run in (*each, parts.starts, parts.sizes)]
        kernels().safusion_weigh(x, *own, high - low, keys)

    shared(write, parts.sizes)


def largest(x: np.ndarray, parts: Parts) -> np.ndarray:
    """Bits (int32 [S]) of the largest magnitude of every run of a span (float32 [N])."""
    bits = np.zeros(len(parts.starts), np.int32)

    def read(low: int, high: int) -> None:
        runs = parts.starts[low:high], parts.sizes[low:high], high - low
        kernels().safusion_largest(x, *runs, bits[low:high])

    shared(read, parts.sizes)
    return bits if len(bits) == len(parts.firsts) else np.maximum.reduceat(bits, parts.firsts)


def kth_largest(
    bits: np.ndarray, starts: np.ndarray, sizes: np.ndarray, ranks: np.ndarray, exact: bool = True
) -> np.ndarray:
    """Bits (int32 [S]) of the magnitude that is the ``ranks``-th largest (1 to the size) of each run of int32 [N].

    Of each run the start, the size and the rank, int64 [S]. Not ``exact``: a magnitude that is no larger, and a little
    smaller at most, of short runs.
    """
    kth = np.empty(len(starts), np.int32)
    runs = (np.ascontiguousarray(each, np.int64) for each in (starts, sizes, ranks))
    kernels().safusion_kth_largest(bits, *runs, len(starts), exact, kth)
    return kth


def tail(x: np.ndarray, parts: Parts, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many magnitudes of every run of a span (float32 [N]) exceed its limit (float32 [S]), and by how much.

    Returns:
        Counts (int64 [S]), sums and sums of squares (float64 [S]).
    """
    spread = parts.spread(limits.astype(np.float32, copy=False))
    counts, (sums, squares) = np.empty(len(spread), np.int64), np.empty((2, len(spread)))

    def read(low: int, high: int) -> None:
        place, size = parts.starts[low:high], parts.sizes[low:high]
        found = counts[low:high], sums[low:high], squares[low:high]
        kernels().safusion_tail(x, place, size, high - low, spread[low:high], *found)

    shared(read, parts.sizes)
    return parts.whole(counts), parts.whole(sums), parts.whole(squares)


class Added(NamedTuple):
    """The outcome of :func:`add_finite`."""

    left_out: list[int]  #: places of the gradients that are not finite
    found: Survey | None  #: what was wanted of the new memory; None if nothing was, or a gradient was left out


def add_finite(
    memory: Tensor, parts: Parts, grads: Sequence[Tensor], decay: float, wanted: Wanted | None = None
) -> Added:
    """``memory = decay * memory + gradient`` for the finite gradients; the others are left out.

    (An infinity or NaN behind the first 32768 elements is noticed late: the sums before it are undone, to rounding.)

    Args:
        memory: float32 [D], contiguous.
        parts: Places of the gradients in it.
        grads: float32, contiguous, not empty.
        decay: Factor on the memory, positive.
        wanted: What to find in the new memory, as :func:`survey` does; positions count from the first gradient.
    """
    added, first = np.empty(len(parts.starts), np.int64), int(parts.starts[0])
    wanted = wanted or _NOTHING
    weights = wanted.weights
    if weights is not None and len(parts.firsts) != len(parts.starts):
        weights = weights.of(parts)
    keys = None if wanted.keys is None else address(wanted.keys)
    given = decay, memory.numpy()[first:], keys
    read = Parts(parts.starts - first, parts.sizes, parts.firsts)
    found = _look(
        kernels().safusion_add, (parts.addresses(grads), added, *(weights or (None, None))), given, read, wanted
    )
    if (added == parts.sizes).all():
        return Added([], None if wanted is _NOTHING else found)
    bad = np.flatnonzero(np.add.reduceat(added != parts.sizes, parts.firsts)).tolist()
    cuts = [*parts.firsts.tolist(), len(added)]
    for place in bad:
        first = int(parts.starts[cuts[place]])
        for part in range(cuts[place], cuts[place + 1]):
            start, size = int(parts.starts[part]), int(added[part])
            memory[start : start + size].sub_(grads[place].view(-1)[start - first :][:size]).div_(decay)
    return Added(bad, None)


def follow(
    tried: np.ndarray, found: np.ndarray, enough: np.ndarray, most: np.ndarray, before: np.ndarray
) -> np.ndarray:
    """The floors of the next step (int32 [S]): nearer to those that enough elements exceed, and not too many.

    Args:
        tried: int32 [S], is overwritten: floors, the largest int32 for one that is unknown.
        found: float64 [S], elements above each.
        enough, most: float64 [S], so many should exceed a floor, and less than these.
        before: int32 [S], floors for those that are unknown.
    """
    kernels().safusion_follow(tried, found, enough, most, before, len(tried))
    return tried


class Lists(NamedTuple):
    """Elements that have been found, in lists one behind the other. Results lie in the same memory."""

    places: np.ndarray  #: int32 [C], positions in the span
    bits: np.ndarray  #: int32 [C]
    counts: np.ndarray  #: int64 [S], entries of each list

    def number_above(self, floors: np.ndarray, known: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """How many (int64 [S]) of each list have bits of magnitude above its floor (int32 [S]).

        ``numbers`` are above the floors that are ``known``.
        """
        found, count = numbers.astype(np.int64), len(self.counts)
        floors, known = np.ascontiguousarray(floors, np.int32), np.ascontiguousarray(known, np.int32)
        kernels().safusion_number_above(self.bits, self.counts, floors, known, count, found)
        return found

    def above(self, floors: np.ndarray) -> Lists:
        """Leaves the elements with bits of magnitude above the floor (int32 [S]) of their list."""
        numbers, floors = np.empty(len(self.counts), np.int64), np.ascontiguousarray(floors, np.int32)
        kept = kernels().safusion_keep_above(*self, floors, len(self.counts), numbers)
        return Lists(self.places[:kept], self.bits[:kept], numbers)

    def largest(self, floors: np.ndarray, quotas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Leaves the largest magnitudes above the floor of each list, of equal ones the first; places and bits.

        Args:
            floors: int32 [S]; no bits of magnitude are below -1.
            quotas: int64 [S], most that are kept of each.
        """
        quotas, floors = np.ascontiguousarray(quotas, np.int64), np.ascontiguousarray(floors, np.int32)
        kept = kernels().safusion_keep_largest(*self, floors, quotas, len(self.counts))
        return self.places[:kept], self.bits[:kept]

    def replaced(self, marked: np.ndarray, others: Lists) -> Lists:
        """Replaces the lists that are ``marked`` (bool [S]).

        Raises:
            ValueError: If one is shorter than the list that it replaces.
        """
        if (others.counts < self.counts[marked]).any():
            raise ValueError("a list can only be replaced by one that is no shorter: the others would be overwritten")
        counts = self.counts.copy()
        counts[marked] = others.counts
        places, bits = empty(2 * int(counts.sum()), np.int32).reshape(2, -1)
        places[: len(self.places)], bits[: len(self.bits)] = self.places, self.bits
        kernels().safusion_replace(places, bits, self.counts, marked.astype(np.uint8), len(counts), *others)
        return Lists(places, bits, counts)

    def share(self, quotas: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Shares a room: of each list its quota at least, and otherwise the largest of all, of equal ones the first.

        Args:
            quotas: int64 [S], no more than the counts.
            room: Not less than all quotas, and not more than all entries.

        Returns:
            Of each list the floor (int32 [S]) and how many are taken (int64 [S]), the largest above it; and the bits of
            the least magnitude among the largest of all. The numbers exceed the room where the last of the largest have
            equals, and where quotas take the places of larger ones.
        """
        count, quotas = len(self.counts), np.ascontiguousarray(quotas, np.int64)
        floors, numbers, few = np.empty(count, np.int32), np.empty((2, count), np.int64), np.zeros(count, np.uint8)
        given = self.bits, self.counts, quotas, count, room
        lowest: int = kernels().safusion_share(*given, few, numbers[1], floors, numbers[0])
        return floors, numbers[0], lowest

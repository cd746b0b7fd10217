"""What is done to every element of a span or of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from lightning_safusion.kernels.cpu.library import Parts, address, kernels, shared
from lightning_safusion.kernels.cpu.messages import Message
from lightning_safusion.kernels.cpu.workspace import empty

Sums: TypeAlias = Literal["values", "magnitudes"]

_SPARE = 33  # places behind the last that are written to before it is noticed that there is no more room
MOST_ELEMENTS = 1 << 31  # of a span in which elements are found: positions have 32 bits until some are selected
_PAST_CACHES = 1 << 18  # elements that have left the caches by the time that they are read


class Wanted(NamedTuple):
    """What shall be found in some runs of a span, while they are read anyway.

    Args:
        floors: int32 [S]: elements with bits of magnitude above the floor of their run. None for no element.
        room: For how many elements there shall be room; that many are allowed for each thread.
        sums: Of the elements or of their magnitudes, and of squares: in float32 over a thousand, in float64 from there
            on.
    """

    floors: np.ndarray | None = None
    room: int = 0
    sums: Sums | None = None


_NOTHING = Wanted()


class Survey(NamedTuple):
    """What one look at some runs of a span has found.

    Args:
        places: int32 [K], ascending positions of what is above the floors; None if there was no room for them.
        bits: int32 [K], their bits.
        counts: int64 [S], how many of each run.
        sums: float64 [S], or None if they were not asked for.
        squares: float64 [S], sums of squares, or None.
    """

    places: np.ndarray | None
    bits: np.ndarray | None
    counts: np.ndarray
    sums: np.ndarray | None
    squares: np.ndarray | None


class _Look:
    """Where several threads write what is wanted of their share of the parts.

    Args:
        wanted: What that is.
        parts: Of the span.
        starts: int64 [P], where the parts begin in what is read.
    """

    def __init__(self, wanted: Wanted, parts: Parts, starts: np.ndarray) -> None:
        floors, self._room, kind = wanted
        count = len(starts)
        self._cut = count != len(parts.firsts)
        if floors is None:
            self._room = 0
        else:
            floors = floors.astype(np.int32, copy=False)
            floors = parts.spread(floors) if self._cut else floors
        self._floors = floors
        self._counts = np.zeros(count, np.int64)
        self._sums = None if kind is None else np.zeros((2, count))
        self._magnitudes = int(kind == "magnitudes")
        self._parts, self._starts = parts, starts

    def read(self, kernel: Any, given: tuple[Any, ...], low: int, high: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Calls a function for the parts from ``low`` up to ``high``: what it has found, and how much of that."""
        sums, floors, size = self._sums, self._floors, self._room + _SPARE
        places, bits = empty(size, np.int32), empty(size, np.int32)
        found: int = kernel(
            *given,
            self._starts[low:high],
            self._parts.sizes[low:high],
            high - low,
            None if floors is None else address(floors[low:high]),
            self._magnitudes,
            None if sums is None else address(sums[0, low:high]),
            None if sums is None else address(sums[1, low:high]),
            places,
            bits,
            self._room,
            self._counts[low:high],
        )
        return places[:found], bits[:found], found

    def joined(self, found: Sequence[tuple[np.ndarray, np.ndarray, int]]) -> Survey:
        """What all threads have found."""
        counts, (sums, squares) = self._counts, (None, None) if self._sums is None else self._sums
        if self._cut:
            whole = self._parts.whole
            counts = whole(counts)
            sums, squares = None if sums is None else whole(sums), None if squares is None else whole(squares)
        places, bits, most = found[0]
        if len(found) > 1:
            most = max(number for _, _, number in found)
        if self._floors is None or most > self._room:
            return Survey(None, None, counts, sums, squares)
        if len(found) > 1:
            places, bits = _joined([part[0] for part in found]), _joined([part[1] for part in found])
        return Survey(places, bits, counts, sums, squares)


def _joined(lists: Sequence[np.ndarray]) -> np.ndarray:
    """int32 lists, one behind the other."""
    joined = empty(sum(map(len, lists)), np.int32)
    np.concatenate(lists, out=joined)
    return joined


def survey(x: np.ndarray, parts: Parts, wanted: Wanted) -> Survey:
    """Reads runs of a span (float32 [N]) once."""
    look, kernel = _Look(wanted, parts, parts.starts), kernels().safusion_survey
    return look.joined(shared(lambda low, high: look.read(kernel, (x,), low, high), parts.sizes))


def largest(x: np.ndarray, parts: Parts) -> np.ndarray:
    """Bits (int32 [S]) of the largest magnitude of every run of a span (float32 [N])."""
    bits = np.zeros(len(parts.starts), np.int32)

    def read(low: int, high: int) -> None:
        runs = parts.starts[low:high], parts.sizes[low:high], high - low
        kernels().safusion_largest(x, *runs, bits[low:high])

    shared(read, parts.sizes)
    return bits if len(bits) == len(parts.firsts) else np.maximum.reduceat(bits, parts.firsts)


def tail(x: np.ndarray, parts: Parts, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many magnitudes of every run exceed its limit, and by how much: counts, sums and sums of squares.

    Args:
        x: float32 [N].
        parts: Runs of it.
        limits: float32 [S].
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
    """What became of gradients.

    Args:
        left_out: Places of those that are not finite.
        found: What was wanted of the memory afterwards; None if nothing was, or something was left out.
    """

    left_out: list[int]
    found: Survey | None


def add_finite(
    memory: Tensor, parts: Parts, grads: Sequence[Tensor], decay: float, wanted: Wanted | None = None
) -> Added:
    """``memory = decay * memory + gradient`` for the gradients without infinities and NaNs, and nothing for the others.

    (What the others had changed before that was noticed is taken back: after 32768 elements, to rounding.)

    Args:
        memory: float32 [D], contiguous.
        parts: Where the gradients belong in it.
        grads: float32, contiguous, not empty.
        decay: Factor on the memory, positive.
        wanted: What is to be found in the new memory, as by :func:`survey`; positions count from the first gradient.
    """
    addresses = _addresses(grads, parts)
    added = np.empty(len(parts.starts), np.int64)
    # positions count from here, and so do the places of the gradients
    target, base = memory.numpy()[parts.starts[0] :], parts.starts - parts.starts[0]
    look, kernel = _Look(wanted or _NOTHING, parts, base), kernels().safusion_add

    def add(low: int, high: int) -> tuple[np.ndarray, np.ndarray, int]:
        return look.read(kernel, (addresses[low:high], added[low:high], decay, target), low, high)

    found = shared(add, parts.sizes)
    if np.array_equal(added, parts.sizes):
        return Added([], None if wanted is None else look.joined(found))
    bad = np.flatnonzero(np.add.reduceat(added != parts.sizes, parts.firsts)).tolist()
    cuts = [*parts.firsts.tolist(), len(added)]
    for place in bad:
        first = int(parts.starts[cuts[place]])
        for part in range(cuts[place], cuts[place + 1]):
            start, size = int(parts.starts[part]), int(added[part])
            memory[start : start + size].sub_(grads[place].view(-1)[start - first :][:size]).div_(decay)
    return Added(bad, None)


def mean_into(grads: Sequence[Tensor], parts: Parts, messages: Sequence[Message], scale: float) -> bool:
    """Writes sums of scaled entries, added in the order of ranks, and zeros everywhere else.

    Args:
        grads: float32, contiguous, not empty: tensors that follow each other in a span.
        parts: Where they belong in it.
        messages: Those of all ranks.
        scale: Factor on the values.

    Returns:
        Whether all sums are finite.
    """
    return mean_in_pieces(grads, parts, lambda start, stop: messages, scale, int(parts.sizes.sum()))


def mean_in_pieces(
    grads: Sequence[Tensor],
    parts: Parts,
    read: Callable[[int, int], Sequence[Message]],
    scale: float,
    piece: int,
) -> bool:
    """:func:`mean_into` where messages are decoded before: entries take several times their bytes.

    Args:
        grads: As there.
        parts: As there.
        read: Gives what messages have of the elements from one up to another, or more; threads call it at once.
        scale: As there.
        piece: Elements of the span whose entries are read together.
    """
    if not grads:
        return True
    addresses, ends = _addresses(grads, parts), parts.starts + parts.sizes
    past_caches = int(parts.sizes.sum() > _PAST_CACHES)

    def write(low: int, high: int) -> bool:
        finite = True
        while low < high:
            stop = max(low + 1, min(high, int(ends.searchsorted(parts.starts[low] + piece, side="right"))))
            messages = read(int(parts.starts[low]), int(ends[stop - 1]))
            described = np.array(list(map(Message.described, messages)), np.int64)
            runs = addresses[low:stop], parts.starts[low:stop], parts.sizes[low:stop], stop - low
            finite &= bool(kernels().safusion_mean(*runs, described, len(messages), scale, past_caches))
            low = stop
        return finite

    return all(shared(write, parts.sizes))


def take_out(memory: Tensor, indices: Tensor, sent: Tensor) -> None:
    """``memory[indices] -= sent``, one after the other: float32 [D], int64 [K], float32 [K], all contiguous."""
    kernels().safusion_take_out(memory.numpy(), indices.numpy(), sent.numpy(), len(indices))


def _addresses(tensors: Sequence[Tensor], parts: Parts) -> np.ndarray:
    """int64 [P], where the parts of tensors lie in memory."""
    own = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
    if len(own) == len(parts.starts):
        return own
    addresses: np.ndarray = parts.spread(own) + 4 * (parts.starts - parts.spread(parts.starts[parts.firsts]))
    return addresses

"""What is done to every element of a span or of gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lightning_safusion.native.library import Parts, call, shared

_SPARE = 33  # places behind the last that are written to before it is noticed that there is no more room
_PAST_CACHES = 1 << 18  # elements that have left the caches by the time that they are read


class Survey(NamedTuple):
    """What one look at some runs of a span has found.

    Args:
        places: int64 [K], ascending positions of what is above the floors; None if there was no room for them.
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


def survey(
    x: np.ndarray,
    parts: Parts,
    floors: np.ndarray | None,
    room: int = 0,
    *,
    sums: bool = False,
    magnitudes: bool = False,
) -> Survey:
    """Reads runs of a span once.

    Args:
        x: float32 [N].
        parts: The runs.
        floors: int32 [S]: wanted are elements with bits of magnitude above the floor of their run. None for no element.
        room: For how many elements there shall be room; that many are allowed for each thread.
        sums: Whether to sum the elements and their squares: in float32 over a few hundred, in float64 from there on.
        magnitudes: Whether to sum magnitudes instead of elements.
    """
    spread = None if floors is None else parts.spread(floors.astype(np.int32, copy=False))
    counts = np.zeros(len(parts.starts), np.int64)
    totals = np.zeros((2, len(parts.starts))) if sums else None

    def read(low: int, high: int) -> tuple[np.ndarray, np.ndarray, int]:
        # not touched, not in memory: room for many costs nothing
        places, bits = np.empty(room + _SPARE, np.int64), np.empty(room + _SPARE, np.int32)
        found = call(
            "safusion_survey",
            x,
            parts.starts[low:high],
            parts.sizes[low:high],
            None if spread is None else spread[low:high],
            high - low,
            int(magnitudes),
            None if totals is None else totals[0, low:high],
            None if totals is None else totals[1, low:high],
            places,
            bits,
            room,
            counts[low:high],
        )
        return places[:found], bits[:found], found

    found = shared(read, parts.sizes)
    joined = _joined(found, room if floors is not None else -1, parts.whole(counts))
    return joined if totals is None else joined._replace(sums=parts.whole(totals[0]), squares=parts.whole(totals[1]))


def _joined(found: Sequence[tuple[np.ndarray, np.ndarray, int]], room: int, counts: np.ndarray) -> Survey:
    """What several threads have found."""
    if any(number > room for _, _, number in found):
        return Survey(None, None, counts, None, None)
    if len(found) == 1:
        return Survey(found[0][0], found[0][1], counts, None, None)
    places, bits = (np.concatenate([part[i] for part in found]) for i in (0, 1))
    return Survey(places, bits, counts, None, None)


def largest(x: np.ndarray, parts: Parts) -> np.ndarray:
    """Bits (int32 [S]) of the largest magnitude of every run of a span (float32 [N])."""
    bits = np.zeros(len(parts.starts), np.int32)

    def read(low: int, high: int) -> None:
        call("safusion_largest", x, parts.starts[low:high], parts.sizes[low:high], high - low, bits[low:high])

    shared(read, parts.sizes)
    return bits if len(bits) == len(parts.firsts) else np.maximum.reduceat(bits, parts.firsts)


class Added(NamedTuple):
    """What became of gradients.

    Args:
        left_out: Places of those that are not finite.
        found: What is above floors afterwards; None if it was not asked for, or something was left out.
    """

    left_out: list[int]
    found: Survey | None


def add_finite(
    memory: Tensor,
    parts: Parts,
    grads: Sequence[Tensor],
    decay: float,
    floors: np.ndarray | None = None,
    room: int = 0,
) -> Added:
    """``memory = decay * memory + gradient`` for the gradients without infinities and NaNs, and nothing for the others.

    (What the others had changed before that was noticed is taken back: after 32768 elements, to rounding.)

    Args:
        memory: float32 [D], contiguous.
        parts: Where the gradients belong in it.
        grads: float32, contiguous, not empty.
        decay: Factor on the memory, positive.
        floors: int32 [G]: wanted are elements of the new memory with bits of magnitude above these, as in
            :func:`survey`; positions count from the first gradient. None for no element.
        room: For how many.
    """
    addresses = _addresses(grads, parts)
    added, counts = np.empty((2, len(parts.starts)), np.int64)
    target = memory.numpy()
    spread = None if floors is None else parts.spread(floors.astype(np.int32, copy=False))
    room = 0 if floors is None else room

    def add(low: int, high: int) -> tuple[np.ndarray, np.ndarray, int]:
        places, bits = np.empty(room + _SPARE, np.int64), np.empty(room + _SPARE, np.int32)
        found = call(
            "safusion_add",
            addresses[low:high],
            target,
            parts.starts[low:high],
            parts.sizes[low:high],
            high - low,
            ctypes.c_float(decay),
            added[low:high],
            None if spread is None else spread[low:high],
            int(parts.starts[0]),
            places,
            bits,
            room,
            counts[low:high],
        )
        return places[:found], bits[:found], found

    found = shared(add, parts.sizes)
    if np.array_equal(added, parts.sizes):
        return Added([], None if floors is None else _joined(found, room, parts.whole(counts)))
    bad = np.flatnonzero(np.add.reduceat(added != parts.sizes, parts.firsts)).tolist()
    cuts = [*parts.firsts.tolist(), len(added)]
    for place in bad:
        first = int(parts.starts[cuts[place]])
        for part in range(cuts[place], cuts[place + 1]):
            start, size = int(parts.starts[part]), int(added[part])
            memory[start : start + size].sub_(grads[place].view(-1)[start - first :][:size]).div_(decay)
    return Added(bad, None)


def mean_into(
    grads: Sequence[Tensor], parts: Parts, entries: Sequence[tuple[np.ndarray, np.ndarray]], scale: float
) -> bool:
    """Writes sums of scaled entries, added in the order of ranks, and zeros everywhere else.

    Args:
        grads: float32, contiguous, not empty: tensors that follow each other in a span.
        parts: Where they belong in it.
        entries: Ascending positions in the span (int64 [K]) and values (float32 [K]) of every rank.
        scale: Factor on the values.

    Returns:
        Whether all sums are finite.
    """
    if not grads:
        return True
    addresses = _addresses(grads, parts)
    places = np.array([indices.ctypes.data for indices, _ in entries], np.int64)
    values = np.array([numbers.ctypes.data for _, numbers in entries], np.int64)
    ends = np.append(parts.starts, parts.starts[-1] + parts.sizes[-1])
    cuts = [indices.searchsorted(ends) for indices, _ in entries]
    past_caches = int(parts.sizes.sum() > _PAST_CACHES)

    def write(low: int, high: int) -> bool:
        mine = np.array([cut[low : high + 1] for cut in cuts], np.int64)
        finite = call(
            "safusion_mean",
            addresses[low:high],
            parts.starts[low:high],
            parts.sizes[low:high],
            high - low,
            places,
            values,
            mine,
            len(entries),
            ctypes.c_float(scale),
            past_caches,
        )
        return bool(finite)

    return all(shared(write, parts.sizes))


def take_out(memory: Tensor, indices: Tensor, sent: Tensor) -> None:
    """``memory[indices] -= sent``, one after the other: float32 [D], int64 [K], float32 [K], all contiguous."""
    call("safusion_take_out", memory.numpy(), indices.numpy(), sent.numpy(), len(indices))


def _addresses(tensors: Sequence[Tensor], parts: Parts) -> np.ndarray:
    """int64 [P], where the parts of tensors lie in memory."""
    own = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
    if len(own) == len(parts.starts):
        return own
    addresses: np.ndarray = parts.spread(own) + 4 * (parts.starts - parts.spread(parts.starts[parts.firsts]))
    return addresses

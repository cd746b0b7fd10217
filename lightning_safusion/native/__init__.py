"""Compiled kernels for the CPU: what is done to every element of a gradient, in as few passes as there can be.

They are built with the package where there is a C compiler (``kernels.c``, ``setup.py``), for GCC and Clang. Without
them NumPy and PyTorch do the same work with the same results, but for the rounding of sums, in more passes.

============== ============================================================= =====================================
function       work                                                          passes over the elements
============== ============================================================= =====================================
``add_finite`` looks for what is not finite, adds a gradient to a memory,    3 (reads both, writes one)
               and finds what is above a floor then
``survey``     sums, sums of squares, and what is above a floor              1
``largest``    largest magnitudes                                            1
``mean_into``  decoded mean of sparse messages, zeros included               1 (written past the caches)
``take_out``   subtracts what was sent                                       1, over what was sent
``positions``, wire formats: positions from offsets, codes of a few bits     1, over what was sent
``codes``,     and back
``values``
============== ============================================================= =====================================

Work is cut into parts, which as many threads share as PyTorch uses.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Added",
    "Parts",
    "Survey",
    "add_finite",
    "codes",
    "largest",
    "mean_into",
    "positions",
    "serves",
    "survey",
    "take_out",
    "unused",
    "usable",
    "values",
]

VERSION = 3  # of the functions in kernels.c that are called here
_SPARE = 33  # places behind the last that are written to before it is noticed that there is no more room
_PART = 1 << 20  # elements of a part
_SHARED = 1 << 18  # elements that are worth another thread
_PAST_CACHES = 1 << 18  # elements that have left the caches by the time that they are read

_switched_off = False


@cache
def _library() -> ctypes.CDLL | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_kernels" + suffix)
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
                library.safusion_version.restype = ctypes.c_int64
                if library.safusion_version() != VERSION:
                    return None  # left over from another version: an editable installation that was not built again
            except (OSError, AttributeError):
                return None
            for name in ("add", "survey", "mean"):
                getattr(library, f"safusion_{name}").restype = ctypes.c_int64
            return library
    return None


def usable() -> bool:
    """Whether there are compiled kernels, for tensors on the CPU."""
    return not _switched_off and _library() is not None


def serves(*tensors: Tensor) -> bool:
    """Whether there are compiled kernels for all of these: contiguous, on the CPU, of float32, or int64 for places."""
    return usable() and all(
        tensor.is_cpu and tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.int64) for tensor in tensors
    )


@contextmanager
def unused() -> Iterator[None]:
    """Lets NumPy and PyTorch do the work meanwhile, to compare."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


class Parts(NamedTuple):
    """Runs of elements, ascending, cut for several threads.

    Args:
        starts: int64 [P], first element of each.
        sizes: int64 [P], elements of each.
        firsts: int64 [S], the first part of every run that was cut.
    """

    starts: np.ndarray
    sizes: np.ndarray
    firsts: np.ndarray

    @classmethod
    def between(cls, edges: Sequence[int]) -> Parts:
        """Parts of the runs between ascending edges, but for the empty ones."""
        bounds = np.asarray(edges, np.int64)
        sizes = np.diff(bounds)
        return cls.of(bounds[:-1][sizes > 0], sizes[sizes > 0])

    @classmethod
    def of(cls, starts: np.ndarray, sizes: np.ndarray) -> Parts:
        """Cuts runs (int64 [S], none of them empty) into parts of at most about a million elements."""
        numbers = -(-sizes // _PART)
        firsts = numbers.cumsum() - numbers
        offsets = (np.arange(int(numbers.sum())) - firsts.repeat(numbers)) * _PART
        return cls(starts.repeat(numbers) + offsets, np.minimum(sizes.repeat(numbers) - offsets, _PART), firsts)

    def whole(self, per_part: np.ndarray) -> np.ndarray:
        """Sums of the parts of every run."""
        if len(self.firsts) == len(per_part):
            return per_part
        total: np.ndarray = np.add.reduceat(per_part, self.firsts)
        return total

    def spread(self, per_run: np.ndarray) -> np.ndarray:
        """The number of every run for each of its parts."""
        if len(self.firsts) == len(self.starts):
            return per_run
        return per_run.repeat(np.diff(self.firsts, append=len(self.starts)))


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
        found = _call(
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

    found = _shared(read, parts.sizes)
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
        _call("safusion_largest", x, parts.starts[low:high], parts.sizes[low:high], high - low, bits[low:high])

    _shared(read, parts.sizes)
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
        found = _call(
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

    found = _shared(add, parts.sizes)
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
        finite = _call(
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

    return all(_shared(write, parts.sizes))


def take_out(memory: Tensor, indices: Tensor, sent: Tensor) -> None:
    """``memory[indices] -= sent``, one after the other: float32 [D], int64 [K], float32 [K], all contiguous."""
    _call("safusion_take_out", memory.numpy(), indices.numpy(), sent.numpy(), len(indices))


def positions(offsets: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Positions (int64 [K]) from offsets (uint8 or uint16 [K or more]) in blocks of 256 or 65536 elements.

    Args:
        offsets: Those of the first block, of the second, and so on.
        counts: Entries of each block.

    Raises:
        ValueError: If there are fewer offsets than entries.
    """
    found = np.empty(_number(counts, len(offsets)), np.int64)
    _call("safusion_positions", offsets, 8 * offsets.itemsize, counts.astype(np.int64), len(counts), found)
    return found


def codes(values: np.ndarray, scales: np.ndarray, counts: np.ndarray, bits: int) -> np.ndarray:
    """Signs and levels of values, packed: uint8, a multiple of 8 bits of each.

    Args:
        values: float32 [K].
        scales: float32 [P], the largest magnitude of each part, finite.
        counts: int64 [P], values of each part.
        bits: Of a code: 1, 2 or 4.
    """
    packed = np.zeros(-(-len(values) // 8) * bits, np.uint8)
    _call("safusion_codes", values, scales, counts, len(counts), bits, packed)
    return packed


def values(packed: np.ndarray, scales: np.ndarray, counts: np.ndarray, bits: int) -> np.ndarray:
    """What :func:`codes` stand for, float32 [K].

    Raises:
        ValueError: If there are fewer codes than values.
    """
    found = np.empty(_number(counts, len(packed) * 8 // bits), np.float32)
    _call("safusion_values", packed, scales, counts, len(counts), bits, found)
    return found


def _number(counts: np.ndarray, most: int) -> int:
    number = int(counts.sum())
    if not 0 <= number <= most:
        raise ValueError(f"a message with {number} entries has room for {most}: it is damaged")
    return number


def _addresses(tensors: Sequence[Tensor], parts: Parts) -> np.ndarray:
    """int64 [P], where the parts of tensors lie in memory."""
    own = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
    if len(own) == len(parts.starts):
        return own
    addresses: np.ndarray = parts.spread(own) + 4 * (parts.starts - parts.spread(parts.starts[parts.firsts]))
    return addresses


def _call(name: str, *arguments: Any) -> int:
    """Calls a function with arrays, None for no array, whole numbers (int64) and ctypes' own."""
    library = _library()
    if library is None:
        raise RuntimeError("there are no compiled kernels: ask usable() first")
    converted = [
        ctypes.c_void_p(argument.ctypes.data if isinstance(argument, np.ndarray) else None)
        if argument is None or isinstance(argument, np.ndarray)
        else ctypes.c_int64(argument)
        if isinstance(argument, int)
        else argument
        for argument in arguments
    ]
    result: int = getattr(library, name)(*converted)
    return result


def _shared(work: Callable[[int, int], Any], sizes: np.ndarray) -> list[Any]:
    """Lets as many threads as PyTorch uses do their share of parts, if there is enough for them."""
    threads = min(torch.get_num_threads(), len(sizes), 1 + int(sizes.sum()) // _SHARED)
    if threads <= 1:
        return [work(0, len(sizes))]
    ends = sizes.cumsum()
    cuts = [0, *ends.searchsorted(ends[-1] * np.arange(1, threads) / threads).tolist(), len(sizes)]
    shares = [(low, high) for low, high in zip(cuts[:-1], cuts[1:], strict=True) if low < high]
    others = [_helpers(os.getpid(), threads).submit(work, low, high) for low, high in shares[1:]]
    return [work(*shares[0]), *(other.result() for other in others)]


@cache
def _helpers(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of one process: those of the process that forked it do not run in it."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="safusion-kernels")

"""Large arrays that live for a moment: their memory is kept and used again.

The C library's allocator would fault such memory in and give it back in every step, or, once it has learned to keep it,
scatter what lives longer among it: together that cost up to a copy of the parameters.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import count
from threading import Lock
from typing import Any

import numpy as np

_LARGE = 1 << 18  # bytes; what is smaller finds its place between other things


def zeros(length: int, dtype: type) -> np.ndarray:
    """Zeros in pages that are the system's again as soon as nobody holds them, whatever lies beside them.

    The C library's allocator would put what lives long on top of what a backward pass has just given back, and ask the
    system for other memory in the next pass.
    """
    size = length * np.dtype(dtype).itemsize
    if size < _LARGE or not hasattr(mmap, "MAP_PRIVATE"):
        return np.zeros(length, dtype)
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype)


def rearranged(array: np.ndarray, runs: Sequence[tuple[int, int]]) -> np.ndarray:
    """Runs of an array of :func:`zeros` (first elements, and those behind the last) one behind the other, in another.

    The old one is lost: its pages are given back while it is read, so that the two never lie in memory as a whole.
    """
    moved, at = zeros(sum(stop - start for start, stop in runs), array.dtype.type), 0
    pages = getattr(array.base, "obj", None)
    for start, stop in runs:
        moved[at : at + stop - start] = array[start:stop]
        at += stop - start
        if isinstance(pages, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            first, last = -(-start * array.itemsize // mmap.PAGESIZE), stop * array.itemsize // mmap.PAGESIZE
            if first < last:
                pages.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
    return moved


class _Block:
    """Memory that is not there before it is touched, so that room for many costs nothing.

    Args:
        size: Bytes.
    """

    def __init__(self, size: int) -> None:
        self.size, self.number = size, next(_numbers)
        self._memory = zeros(size, np.uint8)
        self.interface = self._memory.__array_interface__


class _Loan:
    """What an array and its views hold on to as long as there are any."""

    def __init__(self, block: _Block, length: int, dtype: np.dtype[Any], free: list[_Block]) -> None:
        self.__array_interface__ = {**block.interface, "shape": (length,), "typestr": dtype.str, "descr": dtype.descr}
        self._block, self._free = block, free

    def __del__(self) -> None:
        self._free.append(self._block)


_numbers = count(1)
_free: list[_Block] = []
_lock = Lock()


def empty(length: int, dtype: type) -> np.ndarray:
    """An array of ``length`` elements with any content; its memory is used again once nobody holds it or a view."""
    kind = np.dtype(dtype)
    if length * kind.itemsize < _LARGE:
        return np.empty(length, kind)
    return np.asarray(_Loan(_block(length * kind.itemsize), length, kind, _free))


def grown(array: np.ndarray, length: int) -> np.ndarray:
    """The beginning of an array with room for ``length`` elements: where it lies, if there is more behind it."""
    room = array.base if isinstance(array.base, np.ndarray) else array
    same_place = room.dtype == array.dtype and room.ctypes.data == array.ctypes.data
    if same_place and len(room) >= length:
        return room[:length]
    more = empty(length, array.dtype.type)
    more[: len(array)] = array
    return more


def _block(size: int) -> _Block:
    """The smallest of the free ones that is large enough, or else another in place of the largest.

    Of equal ones the oldest, so that what is asked for in the same order in every step lies where it lay: of each there
    is as much as has been written to.
    """
    with _lock:
        large_enough = [block for block in _free if block.size >= size]
        if large_enough or _free:
            taken = min(large_enough, key=_order) if large_enough else max(_free, key=_order)
            _free.remove(taken)
            if taken.size >= size:
                return taken
    return _Block(1 << (size - 1).bit_length())


def _order(block: _Block) -> tuple[int, int]:
    return block.size, block.number


def release() -> None:
    """Gives the memory back that nobody holds."""
    with _lock:
        _free.clear()

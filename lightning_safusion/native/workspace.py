"""Large arrays that live for a moment: their memory is kept and used again.

The C library's allocator would fault such memory in and give it back in every step, or, once it has learned to keep it,
scatter what lives longer among it: together that cost up to a copy of the parameters.
"""

from __future__ import annotations

import mmap
from threading import Lock
from typing import Any

import numpy as np

_LARGE = 1 << 18  # bytes; what is smaller finds its place between other things


class _Block:
    """Memory that is not there before it is touched, so that room for many costs nothing.

    Args:
        size: Bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.interface = np.frombuffer(memory, np.uint8).__array_interface__
        self._memory = memory


class _Loan:
    """What an array and its views hold on to as long as there are any."""

    def __init__(self, block: _Block, count: int, dtype: np.dtype[Any], free: list[_Block]) -> None:
        self.__array_interface__ = {**block.interface, "shape": (count,), "typestr": dtype.str, "descr": dtype.descr}
        self._block, self._free = block, free

    def __del__(self) -> None:
        self._free.append(self._block)


_free: list[_Block] = []
_lock = Lock()


def empty(count: int, dtype: type) -> np.ndarray:
    """An array of ``count`` elements with any content; its memory is used again once nobody holds it or a view."""
    kind = np.dtype(dtype)
    if count * kind.itemsize < _LARGE:
        return np.empty(count, kind)
    return np.asarray(_Loan(_block(count * kind.itemsize), count, kind, _free))


def grown(array: np.ndarray, count: int) -> np.ndarray:
    """The beginning of an array with room for ``count`` elements: where it lies, if there is more behind it."""
    room = array.base if isinstance(array.base, np.ndarray) else array
    same_place = room.dtype == array.dtype and room.ctypes.data == array.ctypes.data
    if same_place and len(room) >= count:
        return room[:count]
    more = empty(count, array.dtype.type)
    more[: len(array)] = array
    return more


def _block(size: int) -> _Block:
    """The smallest of the free ones that is large enough, or else another in place of the largest."""
    with _lock:
        large_enough = [block for block in _free if block.size >= size]
        if large_enough or _free:
            taken = min(large_enough, key=_size) if large_enough else max(_free, key=_size)
            _free.remove(taken)
            if taken.size >= size:
                return taken
    return _Block(1 << (size - 1).bit_length())


def _size(block: _Block) -> int:
    return block.size


def release() -> None:
    """Gives the memory back that nobody holds."""
    with _lock:
        _free.clear()

"""The compiled library: loaded, shared by several threads, and the memory that its results lie in."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

VERSION = 8  # of the compiled functions that are called here, as in kernels.h, which setup.py names the library after
_PART = 1 << 20  # elements of a part
_SHARED = 1 << 18  # elements that are worth another thread
_LARGE = 1 << 18  # bytes of an array whose memory is kept

_DTYPES = (torch.float32, torch.int32, torch.int64)

#: Where an array that may be written to lies, as a function takes it: a quarter of the time that NumPy takes to tell.
address: Callable[[Any], Any] = (ctypes.c_char * 0).from_buffer


class _Array:
    """A parameter that an array is given for: contiguous, and not read-only."""

    from_param = staticmethod(address)


_KINDS = {"a": _Array, "p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
# Of each function the parameters: arrays (a), addresses or None (p), whole numbers (i) and floats (f).
_RETURNING = {
    "add": "aafaaaipippaaia",
    "survey": "aaaipippaaia",
    "keep_above": "aaaaia",
    "keep_largest": "aaaaai",
    "marked": "aip",
    "mean": "aaaiaifi",
    "quantize": "aiiaaiiaap",
    "share": "aaaiiaaaa",
    "values": "aiaiiaiaa",
}
_OTHERS = {
    "add_message": "aifa",
    "kth_largest": "aaaaiia",
    "largest": "aaaia",
    "mark": "aiiia",
    "number_above": "aaaaia",
    "offsets": "aiiiiaa",
    "positions": "aiaiia",
    "replace": "aaaaiaaa",
    "tail": "aaaiaaaa",
    "take_out": "aaai",
}

_switched_off = False


@cache
def library() -> ctypes.CDLL | None:
    try:
        loaded = ctypes.CDLL(str(Path(__file__).with_name(f"libkernels.so.{VERSION}")))
        loaded.safusion_version.restype = ctypes.c_int64
        if loaded.safusion_version() != VERSION:
            return None
    except (OSError, AttributeError):
        return None
    for name, kinds in (_RETURNING | _OTHERS).items():
        function = getattr(loaded, f"safusion_{name}")
        function.restype = ctypes.c_int64 if name in _RETURNING else None
        function.argtypes = [_KINDS[kind] for kind in kinds]
    return loaded


@cache
def kernels() -> ctypes.CDLL:
    """The functions, which take arrays, ``None`` for none, and numbers.

    Raises:
        RuntimeError: If there are none.
    """
    loaded = library()
    if loaded is None:
        raise RuntimeError("there are no compiled kernels: ask usable() first")
    return loaded


def usable() -> bool:
    """Whether there are compiled kernels, for tensors on the CPU."""
    return not _switched_off and library() is not None


def serves(*tensors: Tensor) -> bool:
    """Whether there are compiled kernels for all of these: contiguous, on the CPU, of float32 or integers."""
    if _switched_off or library() is None:
        return False
    for tensor in tensors:  # noqa: SIM110 - a generator is entered again for every tensor of every step
        if not (tensor.is_cpu and tensor.is_contiguous() and tensor.dtype in _DTYPES):
            return False
    return True


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
    def between(cls, edges: Sequence[int], most: int | None = None) -> Parts:
        """Parts of the runs between ascending edges, but for the empty ones."""
        bounds = np.asarray(edges, np.int64)
        sizes = np.diff(bounds)
        return cls.of(bounds[:-1][sizes > 0], sizes[sizes > 0], most)

    @classmethod
    def of(cls, starts: np.ndarray, sizes: np.ndarray, most: int | None = None) -> Parts:
        """Cuts runs (int64 [S], none of them empty) into parts of at most so many elements: about a million."""
        length = min(_PART, most or _PART)
        numbers = -(-sizes // length)
        firsts = numbers.cumsum() - numbers
        offsets = (np.arange(int(numbers.sum())) - firsts.repeat(numbers)) * length
        return cls(starts.repeat(numbers) + offsets, np.minimum(sizes.repeat(numbers) - offsets, length), firsts)

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

    def addresses(self, tensors: Sequence[Tensor]) -> np.ndarray:
        """int64 [P], where the parts of tensors lie in memory, one tensor for each run."""
        own = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
        if len(own) == len(self.starts):
            return own
        addresses: np.ndarray = self.spread(own) + 4 * (self.starts - self.spread(self.starts[self.firsts]))
        return addresses


def shared(work: Callable[[int, int], Any], sizes: np.ndarray) -> list[Any]:
    """Lets as many threads as PyTorch uses do their share of parts, if there is enough for them."""
    threads = 1 if len(sizes) < 2 else min(torch.get_num_threads(), len(sizes), 1 + int(sizes.sum()) // _SHARED)
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


# -- memory ------------------------------------------------------------------------------------------------------------
# The C library's allocator would fault large arrays in and give them back in every step, or, once it has learned to
# keep them, scatter what lives longer among them: together that cost up to a copy of the parameters.


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

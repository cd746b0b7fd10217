"""The compiled library: loaded, shared by several threads, and the memory that its results lie in."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor

VERSION = 18  # of the compiled functions and their arguments, as in kernels.h: setup.py names the library after it
_PART = 1 << 20  # elements of a part
_SHARED = 1 << 18  # elements that are worth another thread
_LARGE = 1 << 18  # bytes of an array whose memory is kept

_DTYPES = (torch.float32, torch.int32, torch.int64)
FLOAT32 = (torch.float32,)

#: Address of a writable array as a function takes it, in a quarter of the time that NumPy takes.
address: Callable[[Any], Any] = (ctypes.c_char * 0).from_buffer


class _Array:
    """A parameter that an array is given for: contiguous, and not read-only."""

    from_param = staticmethod(address)


_KINDS = {"a": _Array, "p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
# Of each function the parameters: arrays (a), addresses or None (p), whole numbers (i) and floats (f).
_RETURNING = {
    "add": "ppppfapaaipippaaia",
    "add_message": "aifa",
    "crc32c": "aii",
    "elias_fano": "aiiiaiiiaiaiai",
    "survey": "aaaipippaaia",
    "keep_above": "aaaaia",
    "keep_largest": "aaaaai",
    "leaving": "aaaiaaiiaa",
    "marked": "aip",
    "mean": "aaaiaifi",
    "quantize": "aiiaaiiaap",
    "share": "aaaiiaaaa",
    "sound": "ai",
    "values": "aiaiiaiaa",
    "write": "aiaaaip",
}
_OTHERS = {
    "follow": "aaaaai",
    "kth_largest": "aaaaiia",
    "largest": "aaaia",
    "mark": "aiiia",
    "number_above": "aaaaia",
    "replace": "aaaaiaaa",
    "tail": "aaaiaaaa",
    "take": "aaia",
    "take_out": "aaai",
    "weigh": "aaaaaia",
}

_switched_off = False


@cache
def kernels() -> Any:
    """The functions, which take arrays, ``None`` for none, and numbers; None if there are none."""
    try:
        loaded = ctypes.CDLL(str(Path(__file__).with_name(f"libkernels.so.{VERSION}")))
    except OSError:
        return None
    for name, kinds in (_RETURNING | _OTHERS).items():
        function = getattr(loaded, f"safusion_{name}")
        function.restype = ctypes.c_int64 if name in _RETURNING else None
        function.argtypes = [_KINDS[kind] for kind in kinds]
    return loaded


@cache
def usable() -> bool:
    """Whether there are compiled kernels, for tensors on the CPU."""
    return not _switched_off and kernels() is not None


def serves(*tensors: Tensor, dtypes: Sequence[torch.dtype] = _DTYPES) -> bool:
    """Whether there are compiled kernels for all of these: contiguous, on the CPU, of one of these dtypes."""
    if not usable():
        return False
    for tensor in tensors:  # noqa: SIM110 - a generator is entered again for every tensor of every step
        if not (tensor.is_cpu and tensor.is_contiguous() and tensor.dtype in dtypes):
            return False
    return True


@contextmanager
def unused() -> Iterator[None]:
    """Switches the kernels off, to compare them with NumPy and PyTorch."""
    global _switched_off
    before, _switched_off = _switched_off, True
    usable.cache_clear()
    try:
        yield
    finally:
        _switched_off = before
        usable.cache_clear()


class Parts(NamedTuple):
    """Runs of elements, ascending, cut for several threads."""

    starts: np.ndarray  #: int64 [P], first element of each
    sizes: np.ndarray  #: int64 [P], elements of each
    firsts: np.ndarray  #: int64 [S], the first part of every run that was cut

    @classmethod
    def between(cls, edges: Sequence[int]) -> Parts:
        """Parts of the runs between ascending edges, but for the empty ones."""
        bounds = np.asarray(edges, np.int64)
        sizes = np.diff(bounds)
        return cls.of(bounds[:-1][sizes > 0], sizes[sizes > 0])

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
        return np.add.reduceat(per_part, self.firsts)

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
        return self.spread(own) + 4 * (self.starts - self.spread(self.starts[self.firsts]))


def shared(work: Callable[[int, int], Any], sizes: np.ndarray) -> list[Any]:
    """Calls ``work(first, last)`` for shares of parts of these sizes, on as many threads as PyTorch uses if it pays."""
    threads = min(torch.get_num_threads(), len(sizes))
    if threads <= 1 or (threads := min(threads, 1 + int(sizes.sum()) // _SHARED)) <= 1:
        return [work(0, len(sizes))]
    ends = sizes.cumsum()
    cuts = [0, *ends.searchsorted(ends[-1] * np.arange(1, threads) / threads).tolist(), len(sizes)]
    shares = [(low, high) for low, high in zip(cuts[:-1], cuts[1:], strict=True) if low < high]
    others = [_helpers(os.getpid(), threads).submit(work, low, high) for low, high in shares[1:]]
    return [work(*shares[0]), *(other.result() for other in others)]


@cache
def _helpers(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of one process: a forked process does not have those of its parent."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="safusion-kernels")


# -- memory ------------------------------------------------------------------------------------------------------------
# The C library's allocator would fault large arrays in and give them back in every step, or put arrays that live long
# on top of those that a backward pass has just given back: together that cost up to a copy of the parameters.


def zeros(length: int, dtype: type) -> np.ndarray:
    """Zeros in pages of their own, which the system gets back with the last view of them."""
    size = length * np.dtype(dtype).itemsize
    return np.zeros(length, dtype) if size < _LARGE else np.frombuffer(_pages(size), dtype)


def _pages(size: int) -> mmap.mmap | bytearray:
    """Memory that takes no room before it is touched."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return bytearray(size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


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
    """Memory that one array after the other lies in."""

    def __init__(self, size: int) -> None:
        self.size, self.memory = size, _pages(size)  # bytes
        self.array: Callable[[], np.ndarray | None] = lambda: None  # a weak reference


_blocks: list[_Block] = []
_lock = Lock()


def empty(length: int, dtype: type) -> np.ndarray:
    """An array of ``length`` elements with any content; its memory is used again once no view of it is left.

    It takes the smallest free block that is large enough, of equal ones the oldest: arrays that are made in the same
    order in every step lie where they lay. Where none is large enough, a new one takes the place of the largest.
    """
    size = length * np.dtype(dtype).itemsize
    if size < _LARGE:
        return np.empty(length, dtype)
    with _lock:
        best = largest = None
        for block in _blocks:
            if block.array() is None:
                largest = block if largest is None or block.size >= largest.size else largest
                if block.size >= size and (best is None or block.size < best.size):
                    best = block
        if best is None:
            if largest is not None:
                _blocks.remove(largest)
            best = _Block(1 << (size - 1).bit_length())
            _blocks.append(best)
        array: np.ndarray = np.frombuffer(best.memory, dtype, length)
        best.array = ref(array)
    return array


def release() -> None:
    """Gives the free memory back."""
    with _lock:
        _blocks[:] = [block for block in _blocks if block.array() is not None]

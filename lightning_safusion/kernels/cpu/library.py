"""The compiled library: found, called, and shared by several threads."""

from __future__ import annotations

import ctypes
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

VERSION = 7  # of the compiled functions that are called here, as in kernels.h, which setup.py names the library after
_PART = 1 << 20  # elements of a part
_SHARED = 1 << 18  # elements that are worth another thread

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

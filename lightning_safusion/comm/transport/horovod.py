"""The transport over Horovod (Sergeev and Del Balso, 2018), for jobs that horovodrun or mpirun starts.

Nothing else in the package imports Horovod.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_safusion.comm.transport.interface import FinishedWork, ReduceOp, Transport, Work, as_bytes, check_sizes

# Seconds between two polls. Horovod's own wait spins, and takes the core from the thread that carries the bytes; that
# thread itself looks for work once in a millisecond only.
_POLL_S = 5e-5

# Operations of one kind and size that may be under way at once, each under a name of its own. Horovod negotiates a
# name that it has cached, with the same size, in a fraction of the messages; its cache holds the names of 128 sizes.
_SLOTS = 32
_REMEMBERED = 128 * _SLOTS

# Horovod reduces no other types; narrower ones are reduced in the type given here and rounded once, at the end.
_REDUCED_AS = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.float16: torch.float16,
    torch.bfloat16: torch.float32,
    torch.int64: torch.int64,
    torch.int32: torch.int32,
    torch.int16: torch.int32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
}

_RECIPE = """transport='horovod' needs Horovod 0.28.1, compiled for torch {torch}; importing it failed: {error}.
Plain `pip install horovod` fails with torch 2.1 and later: Horovod asks its compiler for C++14, and torch needs C++17.
Run scripts/install_horovod.sh of lightning-safusion's repository (two to five minutes on two cores), or by hand:
  printf '#!/bin/bash\\nexec c++ "${{@/#-std=*14/-std=c++17}}"\\n' > cxx17 && chmod +x cxx17
  pip install 'setuptools<81' wheel packaging 'cmake<4'
  CXX=$PWD/cxx17 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 MAKEFLAGS=-j2 \\
    pip install --no-build-isolation --no-cache-dir horovod==0.28.1"""


def load_horovod() -> ModuleType:
    """``horovod.torch``.

    Raises:
        ModuleNotFoundError: If it cannot be imported, with the way to install it.
    """
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise ModuleNotFoundError(_RECIPE.format(torch=torch.__version__, error=error), name="horovod") from error
    return hvd


def start_horovod() -> ModuleType:
    """:func:`load_horovod`, initialised. Collective, the first time in a process."""
    hvd = load_horovod()
    if not hvd.is_initialized():
        # The plan has decided what is sent together, and sums must not depend on what happens to be ready.
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
        os.environ.setdefault("HOROVOD_CACHE_CAPACITY", str(_REMEMBERED))
        hvd.init()
    return hvd


class HorovodWork:
    """An operation of Horovod.

    Args:
        hvd: The module ``horovod.torch``.
        handle: What the asynchronous operation returned.
        finish: Called by the first :meth:`wait` with the result; None if the result is in place.
        watcher: Calls back when the operation has ended.
    """

    def __init__(self, hvd: ModuleType, handle: int, finish: Callable[[Any], Any] | None, watcher: Watcher) -> None:
        self._hvd = hvd
        self._handle: int | None = handle
        self._finish = finish
        self._result: Any = None
        self._watcher = watcher
        self._callbacks: list[Callable[[float], None]] = []
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Blocks the host until the result is there; raises Horovod's error, the first time."""
        self.set_aside()
        with self._lock:
            finish, self._finish = self._finish, None
            result, self._result = self._result, None
            if finish is not None:
                finish(result)

    def set_aside(self) -> None:
        """Blocks until the operation has ended, and keeps its result for :meth:`wait`, which may never be called."""
        while not self.ended():
            time.sleep(_POLL_S)
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None:
                finish, self._finish = self._finish, None  # an operation that failed has no result
                self._result = self._hvd.synchronize(handle)
                self._finish = finish

    def on_done(self, callback: Callable[[float], None]) -> None:
        """See :meth:`Work.on_done`; the time is late by a fraction of a millisecond, since Horovod must be polled."""
        with self._lock:
            under_way = self._handle is not None
            if under_way:
                self._callbacks.append(callback)
        if under_way:
            self._watcher.watch(self)
        else:
            callback(time.perf_counter())

    def ended(self) -> bool:
        """Whether the operation has ended; if so, calls back."""
        with self._lock:
            if self._handle is not None and not self._hvd.poll(self._handle):
                return False
            callbacks, self._callbacks = self._callbacks, []
        now = time.perf_counter()
        for callback in callbacks:
            callback(now)
        return True


class Watcher:
    """Polls operations whose end calls back, in a thread of its own while there are any."""

    def __init__(self) -> None:
        self._works: list[HorovodWork] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def watch(self, work: HorovodWork) -> None:
        """Polls an operation until it has ended."""
        with self._lock:
            self._works.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="horovod-watcher", daemon=True)
                self._thread.start()

    def forget(self) -> None:
        """Ends the thread."""
        with self._lock:
            self._works = []
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                works = list(self._works)
            ended = [work for work in works if work.ended()]
            with self._lock:
                self._works = [work for work in self._works if work not in ended]
                if not self._works:
                    self._thread = None
                    return
            time.sleep(_POLL_S)


class HorovodTransport(Transport):
    """The collectives of Horovod over all its processes, always asynchronous.

    Horovod matches operations by name, not by order. Each launch takes the next name of its kind and size, so that one
    order of launches on all ranks gives the same names. A name is used again once its operation has ended on this rank:
    all ranks had joined it then, so that the next one of that name cannot be matched with it.

    Args:
        name: First part of all names; None agrees on a unique one.

    Raises:
        ModuleNotFoundError: If Horovod is not installed, with the way to install it.
    """

    def __init__(self, name: str | None = None) -> None:
        self._hvd = start_horovod()
        self.rank = self._hvd.rank()
        self.world_size = self._hvd.size()
        # Operations that an earlier fit of this process has not finished must not be matched with those of this one.
        self._name = name or self._hvd.broadcast_object(f"safusion-{uuid.uuid4().hex}", name="lightning_safusion")
        self._watcher = Watcher()
        self._launched: dict[str, int] = {}
        self._under_way: dict[str, deque[HorovodWork]] = {}
        self._objects = 0
        self._subgroups: list[HorovodTransport] = []

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return self._launch("gather", as_bytes(tensor), as_bytes(output).copy_, self._hvd.allgather_async)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See :meth:`Transport.all_reduce`.

        Raises:
            TypeError: If Horovod cannot reduce tensors of this dtype.
        """
        dtype = _REDUCED_AS.get(tensor.dtype)
        if dtype is None:
            raise TypeError(f"Horovod reduces {', '.join(map(str, _REDUCED_AS))}, got a tensor of {tensor.dtype}")
        operation = {"sum": self._hvd.Sum, "min": self._hvd.Min, "max": self._hvd.Max}[op]
        buffer = tensor if dtype == tensor.dtype else tensor.to(dtype)
        finish = None if buffer is tensor else tensor.copy_
        return self._launch(op, buffer, finish, self._hvd.allreduce_async_, op=operation)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Work:
        return self._launch(f"from{source}", as_bytes(tensor), None, self._hvd.broadcast_async_, root_rank=source)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], tensor_sizes: Sequence[int]
    ) -> Work:
        check_sizes(output, tensor, output_sizes, tensor_sizes, self.world_size)
        splits = torch.tensor([size * tensor.itemsize for size in tensor_sizes], dtype=torch.int32)

        def finish(result: Sequence[Tensor]) -> None:
            as_bytes(output).copy_(result[0])

        # ranks send different numbers of elements, under one name
        return self._launch("to_all", as_bytes(tensor), finish, self._hvd.alltoall_async, 0, splits=splits)

    def gather_objects(self, value: Any) -> list[Any]:
        self._objects += 1
        # Horovod's default name is the object's type; it would wait for ever where types differ.
        return self._hvd.allgather_object(value, name=f"{self._name}.objects.{self._objects}")

    def subgroup(self) -> Transport:
        """See :meth:`Transport.subgroup`; here a communicator is a set of names."""
        transport = HorovodTransport(f"{self._name}.{len(self._subgroups)}")
        self._subgroups.append(transport)
        return transport

    def close(self) -> None:
        """See :meth:`Transport.close`; Horovod itself runs until the process ends."""
        for transport in self._subgroups:
            transport.close()
        self._watcher.forget()
        for works in self._under_way.values():
            for work in works:
                if work.ended():  # others may never end: another rank has not launched them
                    work.set_aside()
        self._under_way.clear()

    def _launch(
        self,
        kind: str,
        tensor: Tensor,
        finish: Callable[[Any], Any] | None,
        collective: Callable[..., int],
        numel: int | None = None,
        **options: Any,
    ) -> Work:
        if numel is None and not tensor.numel():
            return FinishedWork()
        key = f"{self._name}.{kind}.{tensor.dtype}.{tensor.numel() if numel is None else numel}"
        works = self._under_way.setdefault(key, deque())
        if len(works) == _SLOTS:
            works.popleft().set_aside()
        launched = self._launched.get(key, 0)
        self._launched[key] = launched + 1
        handle = collective(tensor, name=f"{key}.{launched % _SLOTS}", **options)
        work = HorovodWork(self._hvd, handle, finish, self._watcher)
        works.append(work)
        return work

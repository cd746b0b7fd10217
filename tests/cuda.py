"""A CUDA device that is not there: fake tensors know their device and shape only, and refuse to show their numbers.

What runs on them runs on a real device without the host ever waiting: reading a number raises, and so does every copy
between host and device that is not asynchronous. Streams and events have stand-ins that note what was asked of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_safusion.comm.transport.interface import FinishedWork, Work, check_sizes
from lightning_safusion.comm.transport.torch_backend import SoloTransport
from lightning_safusion.fusion import fused
from lightning_safusion.fusion.ending.device import DeviceEnding
from lightning_safusion.fusion.ending.host import HostEnding
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.kernels import cuda as kernels


class Silent(SoloTransport):
    """As one of several ranks, from which nothing comes. Counts collectives."""

    def __init__(self, world_size: int, rank: int = 0) -> None:
        self.world_size, self.rank, self.calls = world_size, rank, 0

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        self.calls += 1
        return FinishedWork()

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Work:
        self.calls += 1
        return FinishedWork()

    def all_to_all(self, output: Tensor, tensor: Tensor, output_sizes: Any, tensor_sizes: Any) -> Work:
        check_sizes(output, tensor, output_sizes, tensor_sizes, self.world_size)
        self.calls += 1
        return FinishedWork()

    def split(self, groups: Any) -> Silent:
        return self


class NoWaiting(TorchDispatchMode):
    """Refuses copies between host and device for which the host would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            source, target = args[0].device.type, torch.device(kwargs.get("device") or args[0].device).type
            self._check(func, source, target, bool(kwargs.get("non_blocking")))
        if func is torch.ops.aten.copy_.default:
            blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            self._check(func, args[1].device.type, args[0].device.type, bool(blocking))
        if func is torch.ops.aten.view.dtype and args[0].device.type == "cuda":  # asks for a driver, even if fake
            size = args[0].shape[-1] * args[0].itemsize // args[1].itemsize
            return torch.empty((*args[0].shape[:-1], size), dtype=args[1], device=args[0].device)
        return func(*args, **kwargs)

    def _check(self, func: Any, source: str, target: str, non_blocking: bool) -> None:
        if source != target and not non_blocking:
            raise AssertionError(f"{func} from {source} to {target} makes the host wait")


class Launches(TorchDispatchMode):
    """Counts operations that a device would be given, while it is active; grouped ones are one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.name().startswith(("aten::empty", "prim::")):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors of a fake device that are alive; of those made while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        return sum(nbytes for _, nbytes in self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        same = func is torch.ops.aten.view.dtype  # its stand-in has memory of its own, where a device has none
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                storage = tensor.untyped_storage()
                known = self._alive.get(storage._cdata)
                if known is None or known[0].expired():
                    self._alive[storage._cdata] = StorageWeakRef(storage), 0 if same else storage.nbytes()
        self.peak = max(self.peak, self.now)
        return results


class Unguarded(TorchFunctionMode):
    """Does by way of the dispatcher what Python bindings do under a device guard, which asks for a driver."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and args[0].device.type == "cuda":
            return self._view(args[0], args[1])
        if func is Tensor.__setitem__ and args[0].device.type == "cuda":
            return self._store(*args)
        func = {Tensor.copy_: torch.ops.aten.copy_, Tensor.__invert__: torch.ops.aten.bitwise_not}.get(func, func)
        return func(*args, **(kwargs or {}))

    def _store(self, tensor: Tensor, index: Any, value: Any) -> Tensor:
        view = self._view(tensor, index)
        if isinstance(value, Tensor):
            return torch.ops.aten.copy_(view, value)
        # a number is copied from pageable memory to one element, and to elements chosen by a tensor; it fills a slice
        parts = index if isinstance(index, tuple) else (index,)
        if view.dim() == 0 or any(isinstance(part, Tensor) for part in parts):
            raise AssertionError(f"storing {value!r} at {index!r} makes the host wait: fill a slice")
        return view.fill_(value)

    def _view(self, tensor: Tensor, index: Any) -> Tensor:
        dim = 0
        for part in index if isinstance(index, tuple) else (index,):
            if part is None:
                tensor, dim = tensor.unsqueeze(dim), dim + 1
            elif isinstance(part, slice):
                tensor, dim = torch.ops.aten.slice(tensor, dim, part.start, part.stop, part.step or 1), dim + 1
            elif isinstance(part, int):
                tensor = tensor.select(dim, part)
            elif isinstance(part, Tensor):
                assert part.dtype != torch.bool, "indexing by a mask makes the host wait for the device"
                tensor, dim = torch.ops.aten.index(tensor, [None] * dim + [part]), dim + 1
            else:
                raise AssertionError(f"indexing a device tensor by {part!r} makes the host wait for the device")
        return tensor


class Stream:
    """Stands in for torch.cuda.Stream; notes who waited for whom. Its clock moves only where a test moves it."""

    log: list[tuple[Any, ...]] = []

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device
        self.now = 0.0  #: seconds

    def wait_stream(self, other: Stream) -> None:
        Stream.log.append((self, "waits for", other))
        self.now = max(self.now, other.now)

    def synchronize(self) -> None:
        raise AssertionError("the host waits for a stream")


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded = False
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.recorded, self.at = True, (stream or torch.cuda.current_stream()).now

    def query(self) -> bool:
        return self.recorded

    def synchronize(self) -> None:
        assert self.recorded, "waits for an event that was never recorded"

    def elapsed_time(self, end: Event) -> float:
        assert self.recorded
        assert end.recorded
        return 1e3 * (end.at - self.at)


def read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine reads one window later, or once for every new plan, does not exist on fake tensors."""
    monkeypatch.setattr(Planner, "verify", lambda *_: None)
    monkeypatch.setattr(DeviceEnding, "read", lambda _: None)
    monkeypatch.setattr(HostEnding, "read", lambda _: None)


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Inside, tensors on the returned device are fake, and waiting for it fails."""
    streams = [Stream()]

    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    Stream.log = []
    if fused.serves_buffers is kernels.serves_buffers:  # or a test has said whether they do
        # they read numbers, which fake tensors have not
        monkeypatch.setattr(fused, "serves_buffers", lambda device: False)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[-1])
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    with FakeTensorMode(allow_non_fake_inputs=True), NoWaiting(), Unguarded():
        yield torch.device("cuda", 0)

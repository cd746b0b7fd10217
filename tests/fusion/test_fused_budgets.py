"""What a step of BERT-base costs the device and the host, counted on fake CUDA tensors: launches, memory, waits."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.comm.transport.torch_backend import SoloTransport
from lightning_safusion.fusion import fused
from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.layout import TensorSpec
from lightning_safusion.kernels.cuda import launch
from lightning_safusion.sparsify.selection.units import Moment, UpdateUnits
from lightning_safusion.tools.plan import work
from lightning_safusion.tools.plan.paths import FusedKernels, FusedShards
from lightning_safusion.tools.plan.traces import resolve_trace
from tests.cluster import settings
from tests.cuda import Allocated, Event, Silent, Stream, fake_cuda, read_nothing
from tests.quick import slow

# Operations of PyTorch that start nothing on the device.
FREE = ("empty", "view", "split", "slice", "alias", "detach", "select", "as_strided", "unbind", "unsqueeze", "reshape")
GROUPS = 4


class Counting(TorchDispatchMode):
    """Counts what is started on the device, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.started: Counter[str] = Counter()
        self.uploads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").lstrip("_")
        result = func(*args, **(kwargs or {}))
        out = result[0] if isinstance(result, (list, tuple)) and result else result
        moved = name in ("to_copy", "copy_") and isinstance(args[0], Tensor)
        if moved and {args[0].device.type, getattr(out, "device", HOST).type} == {"cpu", "cuda"}:
            self.uploads += 1
        if isinstance(out, Tensor) and out.device.type == "cuda" and not name.startswith(FREE):
            self.started[name] += 1
        return result


HOST = torch.device("cpu")


#: Of BERT-base: those of its embeddings and first layer.
FIRST = 21


def described(dtype: torch.dtype = torch.float32, number: int | None = None) -> list[TensorSpec]:
    """BERT-base's tensors, or the first of them; they take the fake device as long as small ones."""
    shapes = [tuple(tensor.shape) for tensor in resolve_trace("bert-base").tensors[:number]]
    return [TensorSpec(f"t{i}", i, shape, math.prod(shape), dtype) for i, shape in enumerate(shapes)]


def alternating() -> list[TensorSpec]:
    """BERT-base's tensors, every other one of 16 bits."""
    return [replace(spec, dtype=torch.bfloat16) if spec.index % 2 else spec for spec in described()]


def short(number: int = 300) -> list[TensorSpec]:
    """Many short tensors; some have one element, some are dense."""
    sizes = [1 if i % 10 == 3 else 1500 for i in range(number)]
    return [TensorSpec(f"t{i}", i, (n,), n, torch.float32, dense=i % 7 == 0) for i, n in enumerate(sizes)]


def long(dtype: torch.dtype = torch.float32, number: int = 30) -> list[TensorSpec]:
    """Tensors of one length."""
    return [TensorSpec(f"t{i}", i, (1000, 1000), 1_000_000, dtype) for i in range(number)]


class Device:
    """An engine with BERT-base's tensors on a device that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, specs: list[TensorSpec], **options: Any) -> None:
        read_nothing(monkeypatch)
        monkeypatch.setattr(fused, "serves_buffers", lambda device: True)
        monkeypatch.setattr(launch, "launch", self.launch)
        monkeypatch.setattr(launch, "address_of", id)
        self.counting, self.specs = Counting(), specs
        self.grads: dict[int, Tensor] = {}
        self.options = {"collective": "allgather", "wire": "q4", "density": 0.1} | options

    def launch(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        assert not any(isinstance(argument, Tensor) and argument.device.type == "cpu" for argument in arguments)
        if programs:
            self.counting.started[kernel.fn.__name__] += 1

    def engine(self, device: torch.device, transport: Transport | None = None) -> Engine:
        transport = transport or SoloTransport()
        made = build_engine(
            settings(**self.options), self.specs, transport, device, JobTraits(measure=False, deferred=True)
        )
        self.grads = self.grads or {s.index: torch.empty(s.numel, dtype=s.dtype, device=device) for s in self.specs}
        return made

    def compare_by_update(self, engine: Engine, device: torch.device) -> None:
        """Gives every tensor a second moment."""
        moments = [Moment(torch.empty(spec.numel, device=device), 1e-8) for spec in self.specs]
        engine.space.compare_in(UpdateUnits(moments.__getitem__, device))

    def temporary(self, engine: Engine) -> int:
        """Bytes that selections use in turn, without keys."""
        return sum(workspace._memory.nbytes for workspace in engine.fused._workspaces)

    def window(self, engine: Engine) -> None:
        for spec in reversed(self.specs):
            engine.push(spec.index, self.grads[spec.index])
        engine.drain()

    def count(self, engine: Engine, transport: Silent | None = None) -> None:
        """Counts what one window starts, after those in which orders and plans become known."""
        for _ in range(4):
            self.window(engine)
        if transport is not None:
            transport.calls = 0
        with self.counting:
            self.counting.started.clear()
            self.window(engine)


@pytest.mark.parametrize(
    ("dtype", "number", "options", "by_update", "per_buffer"),
    [
        (torch.bfloat16, FIRST, {"memory": "decoupled"}, True, 9),
        (torch.float32, FIRST, {"quota": "pooled"}, False, 10),
        *slow([(torch.float32, None, {}, True, 9)]),
    ],
)
def test_launches_of_a_window(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    number: int | None,
    options: Any,
    by_update: bool,
    per_buffer: int,
) -> None:
    job = Device(monkeypatch, described(dtype, number), **options)
    with fake_cuda(monkeypatch) as device:
        engine = job.engine(device)
        if by_update:
            job.compare_by_update(engine, device)
        job.count(engine)
    started = job.counting.started
    report = engine.record
    assert report is not None
    buffers = len(report._shipments)
    assert all(isinstance(shipment, fused.FusedShipment) for shipment in report._shipments)
    sizes = [shipment.buffer.edges[-1] for shipment in report._shipments]
    assert started["compensate"] == started["decode"] == started["write"] == started["pack"] == buffers
    assert started["commit"] == 1
    # as the planner is told; buffers of short tensors have another digit, and dense ones no pool
    span = work.Span(1e6, 1e5, pooled=options.get("quota") == "pooled")
    told = work.selection(span) | work.decoding(span, 2) | {"all-gather": work.Work(1)}
    launches = sum(part.launches for part in told.values()) * buffers + work.END["commit"].launches
    assert sum(started.values()) == pytest.approx(launches, abs=4)
    # short tensors have one more digit
    assert sum(started.values()) <= (2 + per_buffer) * buffers + 2 + len([size for size in sizes if size < 6400]) * 2
    assert job.counting.uploads <= 1  # the verdict, to the host
    assert job.temporary(engine) <= 2 * max(sizes)


def test_an_ordinary_window_has_no_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first windows, and then of one in 16, each tensor has one; they are read when the next window begins."""
    job, moments = Device(monkeypatch, long(number=8)), Counter[str]()

    class Counted(Event):
        def record(self, stream: Stream | None = None) -> None:
            super().record(stream)
            moments["recorded"] += 1

        def elapsed_time(self, end: Event) -> float:
            moments["read"] += 1
            return super().elapsed_time(end)

    def event(enable_timing: bool = False) -> Event:
        return Counted(enable_timing) if enable_timing else Event()

    counted: dict[int, tuple[int, int]] = {}
    with fake_cuda(monkeypatch) as device:
        monkeypatch.setattr(torch.cuda, "Event", event)
        engine = job.engine(device)
        assert not engine.clock.instant
        for number in (0, 1, 2, 79, 80, 81, 82, 83):
            engine.windows = number
            moments.clear()
            job.window(engine)
            counted[number] = moments["recorded"], moments["read"]
    assert counted[2][0] >= len(job.specs)
    assert counted[79][0] == 0
    assert counted[80][0] >= len(job.specs)
    assert counted[81][0] == 0
    assert counted[81][1] >= len(job.specs)
    assert counted[82] == counted[83] == (0, 0)


@pytest.mark.parametrize(
    ("compressor", "shipment", "by_update"),
    [
        ("gaussiank", fused.ThresholdShipment, True),
        ("randomk", fused.PlacedShipment, False),
    ],
)
def test_other_compressors_cost_what_the_planner_is_told(
    monkeypatch: pytest.MonkeyPatch, compressor: str, shipment: type[Any], by_update: bool
) -> None:
    job = Device(monkeypatch, long(number=8), compressor=compressor)
    with fake_cuda(monkeypatch) as device:
        engine = job.engine(device)
        if by_update:
            job.compare_by_update(engine, device)
        job.count(engine)
    report, started = engine.record, job.counting.started
    assert report is not None
    assert all(type(own) is shipment for own in report._shipments)
    buffers = len(report._shipments)
    span, path = work.Span(1e6, 1e5), FusedKernels(compressor=compressor)
    told = path.selection(span) | path.decoding(span, 2) | {"all-gather": work.Work(1)}
    launches = sum(part.launches for part in told.values()) * buffers + work.END["commit"].launches
    print(dict(started), buffers)
    assert sum(started.values()) == pytest.approx(launches, rel=0.05)
    assert job.counting.uploads <= 1 + buffers * (compressor == "randomk")  # the verdict; and positions


@pytest.mark.parametrize(
    ("specs", "options", "workers"),
    [
        pytest.param(partial(short, 60), {}, 32, id="short"),
        pytest.param(alternating, {"quota": "pooled"}, 8, id="fp32 and bf16, pooled", marks=pytest.mark.slow),
        pytest.param(
            short, {"fusion": "single", "quota": "pooled"}, 8, id="short, pooled in one buffer", marks=pytest.mark.slow
        ),
    ],
)
def test_launches_do_not_depend_on_workers_nor_on_the_number_of_tensors(
    monkeypatch: pytest.MonkeyPatch, specs: Callable[[], list[TensorSpec]], options: Any, workers: int
) -> None:
    job = Device(monkeypatch, specs(), **options)
    with fake_cuda(monkeypatch) as device:
        transport = Silent(workers)
        engine = job.engine(device, transport)
        job.count(engine, transport)
    report = engine.record
    assert report is not None
    assert all(isinstance(shipment, fused.FusedShipment) for shipment in report._shipments)
    dtypes, buffers = len({spec.dtype for spec in job.specs}), len(report._shipments)
    assert transport.calls == buffers
    # pooled quotas need two more, and for short tensors three
    most = 15 if "quota" in options else 13
    assert sum(job.counting.started.values()) + transport.calls <= 2 * dtypes + most * buffers
    assert job.counting.uploads <= 1  # the verdict, to the host
    largest = max(shipment.buffer.edges[-1] for shipment in report._shipments)
    assert job.temporary(engine) <= (2 if specs is alternating else 4) * largest


@pytest.mark.parametrize(
    ("dtype", "number", "by_update", "workers", "most"),
    [
        (torch.bfloat16, FIRST, True, 16, 2),
        *slow([(torch.float32, FIRST, False, 2, 6), (torch.float32, None, False, 64, 2)]),
    ],
)
def test_launches_of_a_window_in_which_owners_reduce(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, number: int | None, by_update: bool, workers: int, most: float
) -> None:
    """``most``: bytes that selections use in turn, per element of the largest buffer. An owner holds its part again."""
    job = Device(monkeypatch, described(dtype, number), collective="sharded")
    with fake_cuda(monkeypatch) as device:
        transport = Silent(workers, rank=1)
        engine = job.engine(device, transport)
        if by_update:
            job.compare_by_update(engine, device)
        job.count(engine, transport)
    started, report = job.counting.started, engine.record
    assert report is not None
    buffers = len(report._shipments)
    assert all(isinstance(shipment, fused.OwnerShipment) for shipment in report._shipments)
    assert started["compensate"] == started["decode"] == buffers
    assert started["pack"] == started["write"] == buffers + started["reduce"]
    assert 0.9 * buffers <= started["reduce"] <= buffers  # of the smallest buffers a worker may own nothing
    assert started["commit"] == 1
    assert transport.calls == 2 * buffers
    sizes = [shipment.buffer.edges[-1] for shipment in report._shipments]
    assert job.temporary(engine) <= most * max(sizes)
    # as the planner is told
    launches = sum(part.launches for part in work.END.values())
    for shipment in report._shipments:
        span = work.Span(shipment.buffer.edges[-1], 0.1 * shipment.buffer.edges[-1], len(shipment.buffer.edges) - 1)
        path = FusedShards(workers, ShardedExchange.scattered, ShardedExchange.gathered)
        stages = path.selection(span), path.decoding(span, workers), path.commitment(span)
        told = [part for stage in stages for part in stage.values()]
        launches += sum(part.launches for part in told)
    assert sum(started.values()) == pytest.approx(launches, rel=0.06)
    # of 26: selections 7 and 6, a digit more each for short pieces; 2 collectives, means, and zeros for two workspaces
    assert sum(started.values()) + transport.calls <= 2 + 21 * buffers
    assert job.counting.uploads <= 1


def message_bytes(buffer: Buffer) -> int:
    """Of all messages of a buffer."""
    exchange = buffer.exchange
    if isinstance(exchange, ShardedExchange):
        memory = [exchange.sending, exchange.arriving, exchange.sums, exchange.gathered_sums, exchange.lane.message]
    else:
        assert isinstance(exchange, SparseAllGather)
        memory = list(exchange.messages)
    return sum(tensor.untyped_storage().nbytes() for tensor in memory)


@pytest.mark.parametrize(
    ("specs", "options", "workers", "most"),
    [
        pytest.param(long, {}, 8, 6, id="fp32"),
        pytest.param(
            partial(long, torch.bfloat16), {"collective": "sharded"}, 16, 10, id="bf16, shards", marks=pytest.mark.slow
        ),
        pytest.param(partial(short, 100), {}, 8, 6, id="short", marks=pytest.mark.slow),
    ],
)
def test_memory_that_stays(
    monkeypatch: pytest.MonkeyPatch, specs: Callable[[], list[TensorSpec]], options: Any, workers: int, most: float
) -> None:
    """Bytes per element without gradients, moments and messages; with keys, and what selections use in turn."""
    job = Device(monkeypatch, specs(), **options)
    with fake_cuda(monkeypatch) as device:
        moments = [Moment(torch.empty(spec.numel, device=device), 1e-8) for spec in job.specs]
        job.grads = {s.index: torch.empty(s.numel, dtype=s.dtype, device=device) for s in job.specs}
        with Allocated() as memory:
            engine = job.engine(device, Silent(workers, rank=1))
            engine.space.compare_in(UpdateUnits(moments.__getitem__, device))
            for _ in range(3):
                job.window(engine)
            gc.collect()
            report, buffers = engine.record, engine.space.buffers.values()
            held = memory.now - sum(map(message_bytes, buffers))
    assert report is not None
    assert all(isinstance(shipment, fused.FusedShipment) for shipment in report._shipments)
    assert len(buffers) > 3  # the first window had one
    numel = sum(spec.numel for spec in job.specs)
    assert held <= most * numel

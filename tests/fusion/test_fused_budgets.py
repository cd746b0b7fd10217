"""What a step of BERT-base costs the device and the host, counted on fake CUDA tensors: launches, memory, waits."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion import fused
from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.layout import TensorSpec
from lightning_safusion.kernels.cuda import launch
from lightning_safusion.sparsify.selection.units import Moment, UpdateUnits
from lightning_safusion.tools.plan import work
from lightning_safusion.tools.plan.paths import FusedKernels, FusedShards
from lightning_safusion.tools.plan.traces import resolve_trace
from tests.cluster import specs
from tests.cuda import Allocated, Silent, fake_cuda, read_nothing
from tests.fusion.windows import compare_by_update, engine_on
from tests.quick import slow

# Operations of PyTorch that start nothing on the device.
FREE = ("empty", "view", "split", "slice", "alias", "detach", "select", "as_strided", "unbind", "unsqueeze", "reshape")
HOST = torch.device("cpu")
FIRST = 21  # tensors of BERT-base: its embeddings and first layer


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


def described(dtype: torch.dtype = torch.float32, number: int | None = None) -> list[TensorSpec]:
    """BERT-base's tensors, or the first of them; they take the fake device as long as small ones."""
    return specs([tuple(tensor.shape) for tensor in resolve_trace("bert-base").tensors[:number]], dtype)


def alternating() -> list[TensorSpec]:
    """BERT-base's tensors, every other one of 16 bits."""
    return [replace(spec, dtype=torch.bfloat16) if spec.index % 2 else spec for spec in described()]


def short(number: int = 300) -> list[TensorSpec]:
    """Many short tensors; some have one element, some are dense."""
    return specs([(1 if i % 10 == 3 else 1500,) for i in range(number)], dense=range(0, number, 7))


def long(dtype: torch.dtype = torch.float32, number: int = 30) -> list[TensorSpec]:
    """Tensors of one length."""
    return specs([(1000, 1000)] * number, dtype)


class Device:
    """An engine with BERT-base's tensors on a device that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, specs: list[TensorSpec], **options: Any) -> None:
        read_nothing(monkeypatch)
        self.monkeypatch = monkeypatch
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
        made = engine_on(device, transport, self.specs, **self.options)
        self.grads = self.grads or {s.index: torch.empty(s.numel, dtype=s.dtype, device=device) for s in self.specs}
        return made

    def window(self, engine: Engine) -> None:
        for spec in reversed(self.specs):
            engine.push(spec.index, self.grads[spec.index])
        engine.drain()

    def count(self, kind: type[Any], by_update: bool = False, transport: Silent | None = None) -> None:
        """Counts what one window starts, after those in which orders and plans become known.

        ``kind``: class of all its shipments. ``temporary``: bytes that selections use in turn, without keys, per
        element of the largest buffer.
        """
        with fake_cuda(self.monkeypatch) as device:
            engine = self.engine(device, transport)
            if by_update:
                compare_by_update(engine)
            for _ in range(4):
                self.window(engine)
            if transport is not None:
                transport.calls = 0
            with self.counting:
                self.counting.started.clear()
                self.window(engine)
        self.started, self.total = self.counting.started, self.counting.started.total()
        buffers = [shipment.buffer for shipment in engine.record._shipments if isinstance(shipment, kind)]
        assert len(buffers) == len(engine.record._shipments)
        self.buffers, self.sizes = buffers, [each.edges[-1] for each in buffers]
        self.temporary = sum(each._memory.nbytes for each in engine.fused.workspaces) / max(self.sizes)


def launches_of(*parts: Mapping[str, work.Work]) -> int:
    """As many as the planner is told."""
    return sum(part.launches for each in parts for part in each.values())


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
    job.count(fused.FusedShipment, by_update)
    started, buffers = job.started, len(job.buffers)
    assert started["compensate"] == started["decode"] == started["write"] == started["pack"] == buffers
    assert started["commit"] == 1
    # as the planner is told; buffers of short tensors have another digit, and dense ones no pool
    span = work.Span(1e6, 1e5, pooled=options.get("quota") == "pooled")
    told = launches_of(work.selection(span), work.decoding(span, 2), {"all-gather": work.Work(1)})
    assert job.total == pytest.approx(told * buffers + work.END["commit"].launches, abs=4)
    # short tensors have one more digit
    assert job.total <= (2 + per_buffer) * buffers + 2 + len([size for size in job.sizes if size < 6400]) * 2
    assert job.counting.uploads <= 1  # the verdict, to the host
    assert job.temporary <= 2


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
    job.count(shipment, by_update)
    buffers, span, path = len(job.buffers), work.Span(1e6, 1e5), FusedKernels(compressor=compressor)
    told = launches_of(path.selection(span), path.decoding(span, 2), {"all-gather": work.Work(1)})
    print(dict(job.started), buffers)  # docs/guide/compressors.md
    assert job.total == pytest.approx(told * buffers + work.END["commit"].launches, rel=0.05)
    assert job.counting.uploads <= 1 + buffers * (compressor == "randomk")  # the verdict; and positions


@pytest.mark.parametrize(
    ("tensors", "options", "workers"),
    [
        pytest.param(partial(short, 60), {}, 32, id="short"),
        pytest.param(alternating, {"quota": "pooled"}, 8, id="fp32 and bf16, pooled", marks=pytest.mark.slow),
        pytest.param(
            short, {"fusion": "single", "quota": "pooled"}, 8, id="short, pooled in one buffer", marks=pytest.mark.slow
        ),
    ],
)
def test_launches_do_not_depend_on_workers_nor_on_the_number_of_tensors(
    monkeypatch: pytest.MonkeyPatch, tensors: Callable[[], list[TensorSpec]], options: Any, workers: int
) -> None:
    job, transport = Device(monkeypatch, tensors(), **options), Silent(workers)
    job.count(fused.FusedShipment, transport=transport)
    assert transport.calls == len(job.buffers)
    # pooled quotas need two more, and for short tensors three
    most = 15 if "quota" in options else 13
    assert job.total + transport.calls <= 2 * len({spec.dtype for spec in job.specs}) + most * len(job.buffers)
    assert job.counting.uploads <= 1  # the verdict, to the host
    assert job.temporary <= (2 if tensors is alternating else 4)


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
    job, transport = Device(monkeypatch, described(dtype, number), collective="sharded"), Silent(workers, rank=1)
    job.count(fused.OwnerShipment, by_update, transport)
    started, buffers = job.started, len(job.buffers)
    assert started["compensate"] == started["decode"] == buffers
    assert started["pack"] == started["write"] == buffers + started["reduce"]
    assert 0.9 * buffers <= started["reduce"] <= buffers  # of the smallest buffers a worker may own nothing
    assert started["commit"] == 1
    assert transport.calls == 2 * buffers
    assert job.temporary <= most
    # as the planner is told
    launches = launches_of(work.END)
    path = FusedShards(workers, ShardedExchange.scattered, ShardedExchange.gathered)
    for size, each in zip(job.sizes, job.buffers, strict=True):
        span = work.Span(size, 0.1 * size, len(each.edges) - 1)
        launches += launches_of(path.selection(span), path.decoding(span, workers), path.commitment(span))
    assert job.total == pytest.approx(launches, rel=0.06)
    # of 26: selections 7 and 6, a digit more each for short pieces; 2 collectives, means, and zeros for two workspaces
    assert job.total + transport.calls <= 2 + 21 * buffers
    assert job.counting.uploads <= 1


def message_bytes(buffer: Buffer) -> int:
    """Of all messages of a buffer."""
    exchange = buffer.exchange
    if isinstance(exchange, ShardedExchange):
        memory = [exchange.sending, exchange.arriving, exchange.sums, exchange.gathered_sums, exchange.lane.message]
    else:
        memory = list(exchange.messages)
    return sum(tensor.untyped_storage().nbytes() for tensor in memory)


@pytest.mark.parametrize(
    ("tensors", "options", "workers", "most"),
    [
        pytest.param(long, {}, 8, 6, id="fp32"),
        pytest.param(
            partial(long, torch.bfloat16), {"collective": "sharded"}, 16, 10, id="bf16, shards", marks=pytest.mark.slow
        ),
        pytest.param(partial(short, 100), {}, 8, 6, id="short", marks=pytest.mark.slow),
    ],
)
def test_memory_that_stays(
    monkeypatch: pytest.MonkeyPatch, tensors: Callable[[], list[TensorSpec]], options: Any, workers: int, most: float
) -> None:
    """Bytes per element without gradients, moments and messages; with keys, and what selections use in turn."""
    job = Device(monkeypatch, tensors(), **options)
    with fake_cuda(monkeypatch) as device:
        moments = [Moment(torch.empty(spec.numel, device=device), 1e-8) for spec in job.specs]
        job.grads = {s.index: torch.empty(s.numel, dtype=s.dtype, device=device) for s in job.specs}
        with Allocated() as memory:
            engine = job.engine(device, Silent(workers, rank=1))
            engine.space.compare_in(UpdateUnits(lambda indices: [moments[index] for index in indices], device))
            for _ in range(3):
                job.window(engine)
            gc.collect()
            buffers = engine.space.buffers.values()
            held = memory.now - sum(map(message_bytes, buffers))
    assert all(isinstance(shipment, fused.FusedShipment) for shipment in engine.record._shipments)
    assert len(buffers) > 3  # the first window had one
    numel = sum(spec.numel for spec in job.specs)
    assert held <= most * numel

"""Windows that the device ends by itself: the same numbers as where the host decides, and the host never waits.

Covers: gradients and residuals bitwise equal to those of the other drain; bad numbers, huge ones and narrow ones; an
    error on one rank; a tensor without a gradient on one rank; notices; a rolled-back and a forgotten window; no
    waiting, on a CUDA device of fake tensors; the order of streams, the times of exchanges and the memory of an
    abandoned window there.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.exchange import Notice
from lightning_safusion.comm.transport.interface import LaterWork, Work
from lightning_safusion.comm.transport.torch_backend import SoloTransport
from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.ending.device import DeviceEnding
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.fusion.gradients import deliver, zeroed
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.fusion.recorder import ProfileRecorder, service_seconds
from lightning_safusion.fusion.shares import LargestCounts, Shares
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.integration.engine_exchange import EngineExchange
from lightning_safusion.sparsify import available_sparsifiers
from lightning_safusion.sparsify.selection.survey import Selector
from lightning_safusion.sparsify.selection.units import Moment, UpdateUnits
from lightning_safusion.sparsify.sidco import SIDCo
from tests.cluster import Cluster, settings, specs
from tests.cuda import Allocated, Launches, Silent, Stream, fake_cuda, read_nothing
from tests.fusion.test_hard_windows import Failing
from tests.quick import slow

DEFERRED = JobTraits(measure=False, deferred=True)
#: For the fake device, on which every operation takes a millisecond.
FEW = ((40, 30), (40,), (1,), (0,), (90, 70), (7, 11))


@pytest.fixture
def make(make: Callable[..., Cluster]) -> Callable[..., Cluster]:
    return partial(make, deferred=True, collective="allgather")


@pytest.fixture
def device_ends_windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A CUDA device of fake tensors."""
    read_nothing(monkeypatch)
    with fake_cuda(monkeypatch) as device:
        yield device


SHARDED = {"collective": "sharded", "world_size": 3}
OPTIONS: list[dict[str, Any]] = [
    {"collective": "auto", "compressor": "oktopk", "fusion": "adaptive"},
    SHARDED | {"wire": "q4", "tensors": specs(dense=(1, 4))},
    {"memory": "dgc"},
    {"tensors": specs(dtype=torch.float16), "collective": "allreduce"},
    {"wire": "bitmap-fp16", "world_size": 3, "tensors": specs(((40, 30), (0,), (0, 3), (7, 11)))},
]
MORE: list[dict[str, Any]] = [
    {"compressor": "gaussiank"},
    {"compressor": "none"},
    SHARDED,
    SHARDED | {"compressor": "gaussiank", "tensors": specs(dtype=torch.bfloat16)},
    SHARDED | {"scope": "group", "fusion": "wfbp"},
    {"memory": "ef21"},
    {"memory": "none", "wire": "bf16"},
    {"scope": "group"},
    {"tensors": specs(dense=(1, 4, 7))},
]


@pytest.mark.parametrize("options", [*OPTIONS, *slow(MORE)])
def test_the_numbers_are_those_of_the_other_drain(make: Callable[..., Cluster], options: Any) -> None:
    clusters = [make(**options, deferred=deferred) for deferred in (True, False)]
    for step in range(4):
        device, host = (cluster.step(cluster.random_grads(step)) for cluster in clusters)
        for ours, theirs in zip(device, host, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(*(cluster.residuals() for cluster in clusters), strict=True))


@pytest.mark.parametrize(
    ("collective", "value"), [("allgather", float("nan")), ("allreduce", float("inf")), ("sharded", -float("inf"))]
)
def test_a_bad_gradient_is_seen_by_all_ranks_and_poisons_nothing(
    make: Callable[..., Cluster], collective: str, value: float
) -> None:
    cluster = make(collective=collective)
    for step in range(3):
        cluster.step(cluster.random_grads(step))
    before = cluster.residuals()
    grads = cluster.random_grads(9)
    grads[1][3][5] = value
    means = cluster.step(grads)
    for rank in range(2):
        assert not torch.isfinite(means[rank][3]).all()
        assert all(torch.isfinite(means[rank][i]).all() for i in range(len(cluster.specs)) if i != 3)
    added = [torch.zeros_like(g) if g is grads[1][3] else g for mine in grads for g in mine]
    for old, new, grad in zip(before, cluster.residuals(), added, strict=True):
        torch.testing.assert_close(new, old + grad.double(), rtol=1e-5, atol=1e-6)
    after = cluster.step(cluster.random_grads(10))
    assert all(torch.isfinite(mean).all() for mean in after[0])


def test_a_sum_that_overflows_is_a_bad_step(make: Callable[..., Cluster]) -> None:
    cluster = make(density=1.0, collective="allreduce")
    cluster.step(cluster.random_grads(0))  # the first one adds nothing to the memory
    huge = [[torch.full((s.numel,), 3e38) for s in cluster.specs]] * 2
    for settings_ in cluster.settings:
        settings_.memory.add(0, 10, torch.full((10,), 1e38))
    cluster.step(huge)
    assert all(cluster.residual(rank, 6).abs().min() > 2e38 for rank in range(2))


def test_a_bad_step_leaves_no_tensor_waiting_for_its_optimizer(make: Callable[..., Cluster]) -> None:
    cluster = make()
    for engine in cluster.engines:
        engine.steps.tracked[:] = True
    cluster.step(cluster.random_grads(0))
    assert all(engine.steps.unstepped.all() for engine in cluster.engines)
    for engine in cluster.engines:
        engine.steps.unstepped[:] = False
    grads = cluster.random_grads(1)
    grads[0][0][0] = torch.nan
    cluster.step(grads)
    for engine in cluster.engines:
        engine.settle()
        assert not engine.steps.unstepped.any()


def test_an_error_on_one_rank_is_raised_there_and_one_window_later_elsewhere(make: Callable[..., Cluster]) -> None:
    cluster = make()
    failing = Failing()
    cluster.engines[1].space.selector = Selector(failing)
    cluster.step(cluster.random_grads(0))
    failing.fail = True
    before = cluster.residual(0, 0).clone()
    grads = cluster.random_grads(1)

    first, second = cluster.errors(grads)
    assert len(second) == 1
    assert "another rank could not select" in first[0]
    torch.testing.assert_close(cluster.residual(0, 0), before + grads[0][0].double(), rtol=1e-5, atol=1e-6)


def test_a_tensor_without_gradient_on_one_rank_is_an_error_with_its_name(make: Callable[..., Cluster]) -> None:
    cluster = make()
    cluster.step(cluster.random_grads(0))
    fresh = [[not (rank == 1 and i == 6) for i in range(len(cluster.specs))] for rank in range(2)]
    cluster.step(cluster.random_grads(1), fresh)
    for engine in cluster.engines:
        with pytest.raises(RuntimeError, match=r"\(t6\) got a gradient on some ranks only .* find_unused_parameters"):
            engine.settle()


def test_notices_are_heard_when_the_window_is_settled(make: Callable[..., Cluster]) -> None:
    cluster = make()
    cluster.step(cluster.random_grads(0))
    cluster.engines[0].notices.own = int(Notice.TERMINATE)
    cluster.step(cluster.random_grads(1))
    assert [engine.notices.heard for engine in cluster.engines] == [0, 0]
    cluster.step(cluster.random_grads(2))
    assert [engine.notices.heard for engine in cluster.engines] == [int(Notice.TERMINATE)] * 2
    assert cluster.engines[0].notices.own == 0


def test_notices_are_heard_after_a_dense_window_too(make: Callable[..., Cluster]) -> None:
    cluster = make()
    for engine in cluster.engines:
        engine.launching.dense_first = True
    cluster.engines[1].notices.own = int(Notice.REQUEUE)
    cluster.step(cluster.random_grads(0))
    assert [engine.notices.heard for engine in cluster.engines] == [0, 0]
    cluster.step(cluster.random_grads(1))
    assert [engine.notices.heard for engine in cluster.engines] == [int(Notice.REQUEUE)] * 2
    assert [engine.notices.own for engine in cluster.engines] == [0, 0]


def test_a_forgotten_window_says_nothing_later(make: Callable[..., Cluster]) -> None:
    cluster = make()
    grads = cluster.random_grads(0)
    grads[0][0][0] = torch.nan
    cluster.step(grads)
    for engine in cluster.engines:
        engine.reset()
        engine.settle()
    assert torch.isfinite(cluster.step(cluster.random_grads(1))[0][0]).all()


def windows(engine: Engine, device: torch.device) -> None:
    tensors = sorted(engine.space.layout.specs, key=lambda spec: -spec.index)
    for _ in range(4):
        for spec in tensors:
            engine.push(spec.index, torch.zeros(spec.numel, device=device, dtype=spec.dtype))
        engine.drain()


F32 = torch.float32
UNAWAITED: list[tuple[torch.dtype, dict[str, Any]]] = [
    (F32, {"compressor": "gaussiank"}),
    (F32, {"memory": "dgc", "scope": "group"}),
    (torch.float16, {"wire": "coo-fp16", "collective": "auto"}),
]
MORE_UNAWAITED: list[tuple[torch.dtype, dict[str, Any]]] = [
    *((F32, {"compressor": name}) for name in available_sparsifiers() if name != "gaussiank"),
    (F32, {"compressor": SIDCo(adapt=True)}),
    (F32, {"memory": "ef21"}),
    (F32, {"collective": "allreduce"}),
    (torch.bfloat16, {"wire": "bitmap-fp32", "memory": "none"}),
]


@pytest.mark.parametrize(("dtype", "options"), [*UNAWAITED, *slow(MORE_UNAWAITED)])
def test_the_host_never_waits_for_a_cuda_device(
    device_ends_windows: torch.device, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    device, described = device_ends_windows, specs(FEW, dtype=dtype, dense=(1,))
    chosen = settings(**({"collective": "allgather"} | options))
    windows(build_engine(chosen, described, SoloTransport(), device, DEFERRED), device)


OWNED: list[tuple[dict[str, Any], bool]] = [({"wire": "q4"}, True), ({"compressor": "gaussiank"}, False)]
MORE_OWNED: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"scope": "group"}, True),
    ({"memory": "dgc", "compressor": "randomk"}, False),
]


@pytest.mark.parametrize(("options", "by_update"), [*OWNED, *slow(MORE_OWNED)])
def test_the_host_never_waits_for_an_owner(
    device_ends_windows: torch.device, options: dict[str, Any], by_update: bool
) -> None:
    device, described = device_ends_windows, specs(FEW, dense=(1,))
    chosen = settings(**({"collective": "sharded"} | options))
    engine = build_engine(chosen, described, Silent(3), device, DEFERRED)
    if by_update:
        moments = [Moment(torch.zeros(spec.numel, device=device), 1e-8) for spec in described]
        engine.space.compare_in(UpdateUnits(moments.__getitem__, device))
    windows(engine, device)


def test_a_device_does_not_say_when_a_phase_has_ended(
    device_ends_windows: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback would take a stream of the pool, and have it wait for the phase."""
    called: list[Any] = []
    monkeypatch.setattr(ShardedExchange, "_note_arrival", called.append)
    chosen = settings(collective="sharded")
    windows(
        build_engine(chosen, specs(FEW), Silent(3), device_ends_windows, DEFERRED),
        device_ends_windows,
    )
    assert not called


@pytest.mark.parametrize("collective", ["hybrid", "sharded", *slow(("allgather", "allreduce"))])
def test_the_host_does_not_wait_to_send_a_notice(device_ends_windows: torch.device, collective: str) -> None:
    device, chosen = device_ends_windows, settings(collective=collective)
    engine = build_engine(chosen, specs(FEW, dense=(1,)), SoloTransport(), device, DEFERRED)
    engine.notices.own = int(Notice.TERMINATE | Notice.REQUEUE)
    windows(engine, device)


def test_a_number_for_one_element_is_seen_to_make_the_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda(monkeypatch) as device:
        x, places = torch.zeros(4, 3, device=device), torch.zeros(2, dtype=torch.int64, device=device)
        x[1] = 1.0
        x[0, 1:2] = 1.0
        for index in ((0, 1), places):
            with pytest.raises(AssertionError, match="makes the host wait"):
                x[index] = 1.0


@pytest.mark.parametrize(("dtype", "memory"), [(torch.bfloat16, "residual"), (torch.float16, "dgc")])
def test_means_of_narrow_gradients_take_as_many_launches_for_many_tensors_as_for_few(
    monkeypatch: pytest.MonkeyPatch, device_ends_windows: torch.device, dtype: torch.dtype, memory: str
) -> None:
    counts = []
    for number in (3, 12):
        launches = Launches()

        def counted(call: Callable[..., Any], launches: Launches = launches) -> Callable[..., Any]:
            def inside(*args: Any, **options: Any) -> Any:
                with launches:
                    return call(*args, **options)

            return inside

        with monkeypatch.context() as patched:
            patched.setattr("lightning_safusion.fusion.ending.device.deliver", counted(deliver))
            patched.setattr(Shipment, "commit", counted(Shipment.commit))
            tensors = specs(((64, 3),) * number, dtype=dtype)
            chosen = settings(collective="allgather", memory=memory)
            engine = build_engine(chosen, tensors, SoloTransport(), device_ends_windows, DEFERRED)
            for spec in reversed(tensors):
                engine.push(spec.index, torch.zeros(spec.numel, device=device_ends_windows, dtype=dtype))
            engine.drain()
        counts.append(launches.names)
    assert counts[0] == counts[1]
    assert any("_foreach_copy" in name for name in counts[0])


@pytest.mark.parametrize(
    ("dtype", "by_update", "persistent", "temporary"), [(torch.bfloat16, False, 18, 36), (torch.float32, True, 22, 52)]
)
def test_memory_of_a_device_is_what_the_documents_say(
    device_ends_windows: torch.device, dtype: torch.dtype, by_update: bool, persistent: int, temporary: int
) -> None:
    """Bytes per element, where torch's operations select: see "Memory on CUDA" in docs/limits.md."""
    tensors = specs(((128, 64),) * 18, dtype=dtype)
    numel = sum(spec.numel for spec in tensors)
    grads = [torch.zeros(spec.numel, device=device_ends_windows, dtype=dtype) for spec in tensors]
    moments = [Moment(torch.zeros(spec.numel, device=device_ends_windows), 1e-8) for spec in tensors]
    with Allocated() as memory:
        chosen = settings(collective="allgather", density=0.1, wire="q4")
        engine = build_engine(chosen, tensors, SoloTransport(), device_ends_windows, DEFERRED)
        if by_update:
            engine.space.compare_in(UpdateUnits(moments.__getitem__, device_ends_windows))
        for _ in range(4):
            memory.peak = 0
            for spec in reversed(tensors):
                engine.push(spec.index, grads[spec.index])
            engine.drain()
        gc.collect()
        largest = max(buffer.stop - buffer.start for buffer in engine.space.buffers.values())
        assert largest < numel / 2
        assert memory.now <= persistent * numel
        rounding = 4 * numel if dtype.itemsize < 4 else 0
        assert memory.peak - memory.now <= temporary * largest + rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2e19, 1e30])
def test_a_gradient_is_bad_only_if_an_element_is_not_finite(dtype: torch.dtype, scale: float) -> None:
    scale = min(scale, torch.finfo(dtype).max / 2)
    bad = torch.tensor([1.0, torch.nan, 2.0]), torch.tensor([torch.inf, 0.0]), torch.tensor([-torch.inf, torch.inf])
    good = torch.tensor([scale, -scale, 0.5]), torch.zeros(4), torch.full((9,), -scale), torch.zeros(0)
    grads = [grad.to(dtype) for grad in (*bad, *good)]
    kept, norms, finite = zeroed(grads)
    assert finite.tolist() == [False] * 3 + [True] * 4
    assert not any(grad.any() for grad in kept[:3])
    assert all(torch.equal(grad, same) for grad, same in zip(kept[3:], grads[3:], strict=True))
    assert norms.dtype == torch.float32
    assert norms[3:].tolist() == pytest.approx([float(grad.double().norm()) for grad in grads[3:]])


def test_the_drain_where_the_host_decides_does_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "verify", lambda *_: None)
    chosen = settings(collective="allgather")
    with fake_cuda(monkeypatch) as device, pytest.raises(DataDependentOutputException):
        windows(build_engine(chosen, specs(FEW), SoloTransport(), device, JobTraits(measure=False)), device)


def test_each_stream_waits_for_the_one_before_it(device_ends_windows: torch.device) -> None:
    chosen = settings(collective="allgather")
    engine = build_engine(chosen, specs(FEW), SoloTransport(), device_ends_windows, DEFERRED)
    windows(engine, device_ends_windows)
    backward = torch.cuda.current_stream()
    waits = [(who, whom) for who, _, whom in Stream.log]
    select, arrivals, decode = waits[0][0], waits[1][0], waits[2][0]
    plan = engine.planner.current
    assert plan is not None
    buffers = len(plan.groups)
    one_window = [(select, backward), (arrivals, select), (decode, arrivals)] * buffers
    one_window += [(backward, select), (backward, decode)]
    assert len({backward, select, arrivals, decode}) == 4
    assert waits[-len(one_window) :] == one_window


def test_a_shard_of_dense_tensors_is_decoded_when_its_headers_are_there(device_ends_windows: torch.device) -> None:
    """No later collective is waited for then: the headers are made in the stream of the phases."""
    described = specs(FEW, dense=tuple(range(len(FEW))))
    chosen = settings(collective="sharded", fusion="wfbp")
    windows(
        build_engine(chosen, described, Silent(3), device_ends_windows, DEFERRED),
        device_ends_windows,
    )
    select, phases, arrivals = Stream.log[0][0], Stream.log[1][0], Stream.log[2][0]
    assert len({select, phases, arrivals}) == 3
    waits = [(who, whom) for who, _, whom in Stream.log]
    assert waits[1:4] == [(phases, select), (arrivals, select), (arrivals, phases)]


def test_units_live_until_the_phases_have_read_them(
    monkeypatch: pytest.MonkeyPatch, device_ends_windows: torch.device
) -> None:
    """Adafactor's second moment is made for the selection alone; the owner's selection reads it later."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def moment(index: int) -> Moment:
        values = torch.zeros(specs(FEW)[index].numel, device=device_ends_windows)
        made.append(weakref.ref(values))
        return Moment(values, 1e-8)

    commit = Shipment.commit

    def committed(shipment: Shipment, *args: Any, **kwargs: Any) -> None:
        alive.append(sum(values() is not None for values in made))
        commit(shipment, *args, **kwargs)
        made.clear()

    monkeypatch.setattr(Shipment, "commit", committed)
    chosen = settings(collective="sharded", fusion="single")
    engine = build_engine(chosen, specs(FEW), Silent(3), device_ends_windows, DEFERRED)
    engine.space.compare_in(UpdateUnits(moment, device_ends_windows))
    windows(engine, device_ends_windows)
    assert alive[-1] >= len(specs(FEW)) - 1  # an empty tensor has none


def test_a_review_of_shared_quotas_waits_when_the_next_window_begins(
    monkeypatch: pytest.MonkeyPatch, device_ends_windows: torch.device
) -> None:
    reviews: list[Any] = []
    monkeypatch.setattr(Shares, "review", lambda shares, counts, *_: reviews.append(counts))
    monkeypatch.setattr(LargestCounts, "read", lambda counts: counts)
    chosen = settings(collective="allgather", quota="shared")
    windows(
        build_engine(chosen, specs(FEW), SoloTransport(), device_ends_windows, DEFERRED),
        device_ends_windows,
    )
    assert len(reviews) == 2


def trained(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> tuple[Engine, list[Stream]]:
    """An engine after some windows, and the streams that the host waits for from now on."""
    awaited: list[Stream] = []
    monkeypatch.setattr(Stream, "synchronize", lambda stream: awaited.append(stream))
    chosen = settings(collective="allgather", fusion="wfbp")
    engine = build_engine(chosen, specs(FEW), SoloTransport(), device, DEFERRED)
    windows(engine, device)
    return engine, awaited


def test_a_backward_pass_begins_when_nothing_writes_gradients_of_an_abandoned_one(
    monkeypatch: pytest.MonkeyPatch, device_ends_windows: torch.device
) -> None:
    engine, awaited = trained(monkeypatch, device_ends_windows)
    engine.push(specs(FEW)[-1].index, torch.zeros(specs(FEW)[-1].numel, device=device_ends_windows))
    engine.reset()
    awaited.clear()
    EngineExchange.begin_backward(SimpleNamespace(engine=engine), 0)  # type: ignore[arg-type]
    assert len(awaited) == 3
    EngineExchange.begin_backward(SimpleNamespace(engine=engine), 0)  # type: ignore[arg-type]
    assert len(awaited) == 3


class Clock:
    """Seconds, which move only where a test moves them."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class OneLink(SoloTransport):
    """A link that carries one message after the other, each in a second of the streams' clocks."""

    def __init__(self) -> None:
        self.free = 0.0

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        self.free = ended = max(self.free, torch.cuda.current_stream().now) + 1.0

        def wait() -> None:
            stream = torch.cuda.current_stream()
            stream.now = max(stream.now, ended)

        return LaterWork(wait)


def test_exchanges_are_timed_without_the_decoding_of_the_buffer_before(
    monkeypatch: pytest.MonkeyPatch, device_ends_windows: torch.device
) -> None:
    decode = DeviceEnding._decode

    def slow(drain: DeviceEnding, shipment: Shipment) -> None:
        decode(drain, shipment)
        torch.cuda.current_stream().now += 10.0

    monkeypatch.setattr(DeviceEnding, "_decode", slow)
    seen: list[WindowEvents] = []
    chosen = settings(collective="allgather", fusion="wfbp")
    engine = build_engine(chosen, specs(FEW), OneLink(), device_ends_windows, DEFERRED)
    engine.observers.append(SimpleNamespace(observe=seen.append))
    windows(engine, device_ends_windows)
    buffers = seen[-1].buffers
    assert len(buffers) > 2
    service = service_seconds([each.launched for each in buffers], [each.finished for each in buffers])
    assert service == pytest.approx([1.0] * len(buffers))
    assert [each.decoded - each.decode_begin for each in buffers] == pytest.approx([10.0] * len(buffers))


@pytest.mark.parametrize("behind", [False, True])
def test_arrivals_are_those_without_the_engine_where_the_host_is_the_bottleneck(
    monkeypatch: pytest.MonkeyPatch, device_ends_windows: torch.device, behind: bool
) -> None:
    host = Clock()
    for module in ("engine", "window", "backward"):
        monkeypatch.setattr(f"lightning_safusion.fusion.{module}.perf_counter", host)
    fill = Shipment.fill

    def slow(shipment: Shipment, *args: Any) -> None:
        fill(shipment, *args)
        host.now += 0.5

    monkeypatch.setattr(Shipment, "fill", slow)
    seen: list[WindowEvents] = []
    chosen = settings(collective="allgather", fusion="wfbp")
    engine = build_engine(chosen, specs(FEW), SoloTransport(), device_ends_windows, DEFERRED)
    engine.observers.append(SimpleNamespace(observe=seen.append))
    backward = torch.cuda.current_stream()
    for _ in range(4):
        for spec in reversed(specs(FEW)):
            host.now += 1.0
            backward.now = max(host.now, backward.now + 2.5 * behind)
            engine.push(spec.index, torch.zeros(spec.numel, device=device_ends_windows))
        engine.drain()
    engine.settle()
    recorder = ProfileRecorder(len(specs(FEW)))
    recorder.record(seen[-1])
    arrivals = -recorder.to_vector()[: len(specs(FEW))]
    assert arrivals.tolist() == pytest.approx([(2.5 if behind else 1.0) * place for place in range(len(specs(FEW)))])


def test_memory_that_an_abandoned_window_still_uses_is_kept_until_the_next_begins(
    monkeypatch: pytest.MonkeyPatch, device_ends_windows: torch.device
) -> None:
    engine, awaited = trained(monkeypatch, device_ends_windows)
    Stream.log, engine.record = [], None
    *pushed, last = [(spec.index, torch.zeros(spec.numel, device=device_ends_windows)) for spec in reversed(specs(FEW))]
    for gradient in pushed:
        engine.push(*gradient)
    select, arrivals, decode = (who for who, _, _ in Stream.log[:3])
    buffers = [weakref.ref(buffer) for buffer in engine.space.buffers.values()]
    engine.reset()
    assert awaited == [select]  # the others may wait for a worker that is lost
    gc.collect()
    assert sum(buffer() is not None for buffer in buffers) == len(pushed)
    engine.release()
    gc.collect()
    assert sum(buffer() is not None for buffer in buffers) == len(pushed)
    for gradient in (*pushed, last):
        engine.push(*gradient)
    assert [who for who in awaited if who in (select, arrivals, decode)] == [select, arrivals, decode]
    gc.collect()
    assert not any(buffer() is not None for buffer in buffers)
    engine.drain()
    engine.reset()
    windows(engine, device_ends_windows)
    assert [who for who in awaited if who in (select, arrivals, decode)] == [select, arrivals, decode]

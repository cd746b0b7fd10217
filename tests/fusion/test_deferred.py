"""Windows that the device ends by itself: the same numbers as where the host decides, and the host never waits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
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
from lightning_safusion.fusion.build import JobTraits
from lightning_safusion.fusion.ending.device import DeviceEnding
from lightning_safusion.fusion.gradients import deliver, zeroed
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.fusion.quota import LargestCounts, Shares
from lightning_safusion.fusion.recorder import ProfileRecorder, service_seconds
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.integration.engine_exchange import EngineExchange
from lightning_safusion.sparsify import available_sparsifiers
from lightning_safusion.sparsify.selection.units import Moment, UpdateUnits
from lightning_safusion.sparsify.sidco import SIDCo
from tests.cluster import specs
from tests.cuda import Allocated, Launches, Silent, Stream, fake_cuda
from tests.fusion.windows import (
    FEW,
    Clock,
    Make,
    compare_by_update,
    engine_on,
    failing,
    observed,
    push,
    random_window,
    train,
    windows,
)
from tests.models import equal
from tests.quick import slow

ARRIVALS = range(len(FEW) - 1, -1, -1)  # tensors in the order in which their gradients come


@pytest.fixture
def make(make: Make) -> Make:
    return partial(make, deferred=True, collective="allgather")


SHARDED = {"collective": "sharded", "world_size": 3}


@pytest.mark.parametrize(
    "options",
    [
        {"collective": "auto", "compressor": "oktopk", "fusion": "adaptive"},
        SHARDED | {"wire": "q4", "tensors": specs(dense=(1, 4))},
        {"memory": "dgc"},
        {"fusion": "selective", "collective": "hybrid", "world_size": 3},
        {"tensors": specs(dtype=torch.float16), "collective": "allreduce"},
        {"wire": "bitmap-fp16", "world_size": 3, "tensors": specs(((40, 30), (0,), (0, 3), (7, 11)))},
        *slow([{"compressor": "gaussiank"}, {"compressor": "none"}, {"memory": "ef21"}, {"scope": "group"}]),
        *slow([{"memory": "none", "wire": "bf16"}, {"tensors": specs(dense=(1, 4, 7))}, SHARDED]),
        *slow([SHARDED | {"compressor": "gaussiank", "tensors": specs(dtype=torch.bfloat16)}]),
        *slow([SHARDED | {"scope": "group", "fusion": "wfbp"}]),
    ],
)
def test_the_numbers_are_those_of_the_other_drain(make: Make, options: Any) -> None:
    device, host = (make(**options, deferred=deferred) for deferred in (True, False))
    for step in range(4):
        assert equal(random_window(device, step), random_window(host, step))
        assert equal(device.residuals(), host.residuals())


def test_an_error_on_one_rank_is_raised_there_and_one_window_later_elsewhere(make: Make) -> None:
    cluster = make()
    compressor = failing(cluster.engines[1])
    random_window(cluster, 0)
    compressor.fail = True
    before, grads = cluster.residual(0, 0).clone(), cluster.random_grads(1)
    first, second = cluster.errors(grads)
    assert len(second) == 1
    assert "another rank could not select" in first[0]
    torch.testing.assert_close(cluster.residual(0, 0), before + grads[0][0].double(), rtol=1e-5, atol=1e-6)


def test_a_tensor_without_gradient_on_one_rank_is_an_error_with_its_name(make: Make) -> None:
    cluster = make()
    random_window(cluster, 0)
    cluster.step(cluster.random_grads(1), [[(rank, i) != (1, 6) for i in cluster.order[::-1]] for rank in range(2)])
    for engine in cluster.engines:
        with pytest.raises(RuntimeError, match=r"\(t6\) got a gradient on some ranks only .* find_unused_parameters"):
            engine.settle()


@pytest.mark.parametrize("dense", [False, True])
def test_notices_are_heard_when_the_window_is_settled(make: Make, dense: bool) -> None:
    cluster = make()
    for engine in cluster.engines:
        engine.launching.dense_first = dense
    train(cluster, not dense)
    cluster.engines[1].notices.own = int(Notice.REQUEUE)
    random_window(cluster, 1)
    assert [engine.notices.heard for engine in cluster.engines] == [0, 0]
    random_window(cluster, 2)
    assert [engine.notices.heard for engine in cluster.engines] == [int(Notice.REQUEUE)] * 2
    assert [engine.notices.own for engine in cluster.engines] == [0, 0]


F32 = torch.float32


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (F32, {"compressor": "gaussiank"}),
        (F32, {"memory": "dgc", "scope": "group"}),
        (torch.float16, {"wire": "coo-fp16", "collective": "auto"}),
        *slow((F32, {"compressor": name}) for name in available_sparsifiers() if name != "gaussiank"),
        *slow((F32, options) for options in ({"memory": "ef21"}, {"collective": "allreduce"})),
        *slow([(F32, {"compressor": SIDCo(adapt=True)}), (torch.bfloat16, {"wire": "bitmap-fp32", "memory": "none"})]),
    ],
)
def test_the_host_never_waits_for_a_cuda_device(
    device: torch.device, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    windows(engine_on(device, tensors=specs(FEW, dtype=dtype, dense=(1,)), **options))


@pytest.mark.parametrize(
    ("options", "by_update"),
    [
        ({"wire": "q4"}, True),
        ({"compressor": "gaussiank"}, False),
        *slow([({}, True), ({"scope": "group"}, True), ({"memory": "dgc", "compressor": "randomk"}, False)]),
    ],
)
def test_the_host_never_waits_for_an_owner(device: torch.device, options: dict[str, Any], by_update: bool) -> None:
    engine = engine_on(device, Silent(3), specs(FEW, dense=(1,)), collective="sharded", **options)
    if by_update:
        compare_by_update(engine)
    windows(engine)


def test_a_device_does_not_say_when_a_phase_has_ended(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback would take a stream of the pool, and have it wait for the phase."""
    called: list[Any] = []
    monkeypatch.setattr(ShardedExchange, "_note_arrival", called.append)
    windows(engine_on(device, Silent(3), collective="sharded"))
    assert not called


@pytest.mark.parametrize("collective", ["hybrid", "sharded", *slow(("allgather", "allreduce"))])
def test_the_host_does_not_wait_to_send_a_notice(device: torch.device, collective: str) -> None:
    engine = engine_on(device, tensors=specs(FEW, dense=(1,)), collective=collective)
    engine.notices.own = int(Notice.TERMINATE | Notice.REQUEUE)
    windows(engine)


def test_a_number_for_one_element_is_seen_to_make_the_host_wait(device: torch.device) -> None:
    x, places = torch.zeros(4, 3, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    x[1] = 1.0
    x[0, 1:2] = 1.0
    for index in ((0, 1), places):
        with pytest.raises(AssertionError, match="makes the host wait"):
            x[index] = 1.0


@pytest.mark.parametrize(("dtype", "memory"), [(torch.bfloat16, "residual"), (torch.float16, "dgc")])
def test_means_of_narrow_gradients_take_as_many_launches_for_many_tensors_as_for_few(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype, memory: str
) -> None:
    launches = Launches()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **options: Any) -> Any:
            with launches:
                return call(*args, **options)

        return inside

    monkeypatch.setattr("lightning_safusion.fusion.ending.device.deliver", counted(deliver))
    monkeypatch.setattr(Shipment, "commit", counted(Shipment.commit))
    counts = []
    for number in (3, 12):
        launches.names = []
        windows(engine_on(device, tensors=specs(((64, 3),) * number, dtype=dtype), memory=memory), 1)
        counts.append(launches.names)
    assert counts[0] == counts[1]
    assert any("_foreach_copy" in name for name in counts[0])


@pytest.mark.parametrize(
    ("dtype", "by_update", "persistent", "temporary"), [(torch.bfloat16, False, 18, 36), (torch.float32, True, 22, 52)]
)
def test_memory_of_a_device_is_what_the_documents_say(
    device: torch.device, dtype: torch.dtype, by_update: bool, persistent: int, temporary: int
) -> None:
    """Bytes per element, where torch's operations select: see "Memory on CUDA" in docs/limits.md."""
    tensors = specs(((128, 64),) * 18, dtype=dtype)
    numel = sum(spec.numel for spec in tensors)
    grads = [torch.zeros(spec.numel, device=device, dtype=dtype) for spec in tensors]
    moments = [Moment(torch.zeros(spec.numel, device=device), 1e-8) for spec in tensors]
    with Allocated() as memory:
        engine = engine_on(device, tensors=tensors, density=0.1, wire="q4")
        if by_update:
            engine.space.compare_in(UpdateUnits(lambda indices: [moments[index] for index in indices], device))
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
    kept, norms, sound = zeroed(grads)
    assert sound.tolist() == [False] * 3 + [True] * 4
    assert not any(grad.any() for grad in kept[:3])
    assert equal(kept[3:], grads[3:])
    assert norms.dtype == torch.float32
    assert norms[3:].tolist() == pytest.approx([float(grad.double().norm()) for grad in grads[3:]])


def test_the_drain_where_the_host_decides_does_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "verify", lambda *_: None)
    with fake_cuda(monkeypatch) as device, pytest.raises(DataDependentOutputException):
        windows(engine_on(device, traits=JobTraits(measure=False)))


def test_each_stream_waits_for_the_one_before_it(device: torch.device) -> None:
    engine = engine_on(device)
    windows(engine)
    backward = torch.cuda.current_stream()
    waits = [(who, whom) for who, _, whom in Stream.log]
    select, arrivals, decode = (who for who, _ in waits[:3])
    one_window = [(select, backward), (arrivals, select), (decode, arrivals)] * len(engine.planner.current.groups)
    one_window += [(backward, select), (backward, decode)]
    assert len({backward, select, arrivals, decode}) == 4
    assert waits[-len(one_window) :] == one_window


def test_a_shard_of_dense_tensors_is_decoded_when_its_headers_are_there(device: torch.device) -> None:
    """No later collective is waited for then: the headers are made in the stream of the phases."""
    windows(engine_on(device, Silent(3), specs(FEW, dense=ARRIVALS), collective="sharded", fusion="wfbp"))
    waits = [(who, whom) for who, _, whom in Stream.log]
    select, phases, arrivals = (who for who, _ in waits[:3])
    assert len({select, phases, arrivals}) == 3
    assert waits[1:4] == [(phases, select), (arrivals, select), (arrivals, phases)]


def test_units_live_until_the_phases_have_read_them(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Adafactor's second moment is made for the selection alone; the owner's selection reads it later."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def moment(index: int) -> Moment:
        values = torch.zeros(specs(FEW)[index].numel, device=device)
        made.append(weakref.ref(values))
        return Moment(values, 1e-8)

    commit = Shipment.commit

    def committed(shipment: Shipment, *args: Any, **kwargs: Any) -> None:
        alive.append(sum(values() is not None for values in made))
        commit(shipment, *args, **kwargs)
        made.clear()

    monkeypatch.setattr(Shipment, "commit", committed)
    engine = engine_on(device, Silent(3), collective="sharded", fusion="single")
    engine.space.compare_in(UpdateUnits(lambda indices: list(map(moment, indices)), device))
    windows(engine)
    assert alive[-1] >= len(FEW) - 1  # an empty tensor has none


def test_a_review_of_shared_quotas_waits_when_the_next_window_begins(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    reviews: list[Any] = []
    monkeypatch.setattr(Shares, "review", lambda shares, counts, *_: reviews.append(counts))
    monkeypatch.setattr(LargestCounts, "read", lambda counts: counts)
    windows(engine_on(device, quota="shared"))
    assert len(reviews) == 2


@pytest.fixture
def awaited(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[Stream]:
    """The streams that the host waits for."""
    found: list[Stream] = []
    monkeypatch.setattr(Stream, "synchronize", lambda stream: found.append(stream))
    return found


def test_a_backward_pass_begins_when_nothing_writes_gradients_of_an_abandoned_one(
    device: torch.device, awaited: list[Stream]
) -> None:
    engine = engine_on(device, fusion="wfbp")
    windows(engine)
    push(engine, ARRIVALS[0])
    engine.reset()
    awaited.clear()
    for _ in range(2):
        EngineExchange.begin_backward(SimpleNamespace(engine=engine), 0)
        assert len(awaited) == 3


class OneLink(SoloTransport):
    """A link that carries one message after the other, each in a second of the streams' clocks."""

    free = 0.0

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        self.free = ended = max(self.free, torch.cuda.current_stream().now) + 1.0

        def wait() -> None:
            stream = torch.cuda.current_stream()
            stream.now = max(stream.now, ended)

        return LaterWork(wait)


def test_exchanges_are_timed_without_the_decoding_of_the_buffer_before(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    decode = DeviceEnding._decode

    def slow(drain: DeviceEnding, shipment: Shipment) -> None:
        decode(drain, shipment)
        torch.cuda.current_stream().now += 10.0

    monkeypatch.setattr(DeviceEnding, "_decode", slow)
    engine = engine_on(device, OneLink(), fusion="wfbp")
    seen = observed(engine)
    windows(engine)
    buffers = seen[-1].buffers
    assert len(buffers) > 2
    service = service_seconds([each.launched for each in buffers], [each.finished for each in buffers])
    assert service == pytest.approx([1.0] * len(buffers))
    assert [each.decoded - each.decode_begin for each in buffers] == pytest.approx([10.0] * len(buffers))


@pytest.mark.parametrize("behind", [False, True])
def test_arrivals_are_those_without_the_engine_where_the_host_is_the_bottleneck(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, behind: bool
) -> None:
    host = Clock()
    for module in ("engine", "window"):
        monkeypatch.setattr(f"lightning_safusion.fusion.{module}.perf_counter", host.now)
    fill = Shipment.fill

    def slow(shipment: Shipment, *args: Any) -> None:
        fill(shipment, *args)
        host.pause(0.5)

    monkeypatch.setattr(Shipment, "fill", slow)
    engine = engine_on(device, fusion="wfbp")
    seen, backward = observed(engine), torch.cuda.current_stream()
    for _ in range(4):
        for index in ARRIVALS:
            host.pause(1.0)
            backward.now = max(host.now(), backward.now + 2.5 * behind)
            push(engine, index)
        engine.drain()
    engine.settle()
    recorder = ProfileRecorder(len(FEW))
    recorder.record(seen[-1])
    arrivals = -recorder.to_vector()[: len(FEW)]
    assert arrivals.tolist() == pytest.approx([(2.5 if behind else 1.0) * place for place in range(len(FEW))])


def test_memory_that_an_abandoned_window_still_uses_is_kept_until_the_next_begins(
    device: torch.device, awaited: list[Stream]
) -> None:
    engine = engine_on(device, fusion="wfbp")
    windows(engine)
    Stream.log, engine.record = [], None
    *pushed, last = ARRIVALS
    push(engine, *pushed)
    lanes = [who for who, _, _ in Stream.log[:3]]  # that selects, awaits arrivals, decodes
    buffers = [weakref.ref(buffer) for buffer in engine.space.buffers.values()]

    def kept() -> int:
        gc.collect()
        return sum(buffer() is not None for buffer in buffers)

    engine.reset()
    assert awaited == lanes[:1]  # the others may wait for a worker that is lost
    assert kept() == len(pushed)
    engine.release()
    assert kept() == len(pushed)
    push(engine, *pushed, last)
    assert [who for who in awaited if who in lanes] == lanes
    assert not kept()
    engine.drain()
    engine.reset()
    windows(engine)
    assert [who for who in awaited if who in lanes] == lanes

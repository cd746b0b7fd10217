"""Hard windows: bad numbers, stale and half-fresh tensors, gradients thrown away, failing ranks, changing orders."""

from __future__ import annotations

import traceback
from functools import partial
from typing import Any

import pytest
import torch

from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.comm.transport.interface import ReduceOp, Work
from lightning_safusion.comm.transport.torch_backend import SoloTransport
from lightning_safusion.fusion import build
from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.events import Clock
from lightning_safusion.fusion.plans.policy import Naive
from lightning_safusion.sparsify import ExponentialRamp
from lightning_safusion.sparsify.selection.units import UpdateUnits
from tests.cluster import settings, specs
from tests.cuda import Silent, fake_cuda
from tests.fusion.windows import (
    Make,
    assert_seen_and_kept,
    attempt,
    engine_on,
    failing,
    flat,
    push,
    random_window,
    train,
    unreadable,
    windows,
)
from tests.models import equal

CPU = torch.device("cpu")
EACH = range(len(specs()))


@pytest.fixture
def make(make: Make) -> Make:
    return partial(make, collective="allgather")


class Late(Clock):
    """Moments that are read later, as those of a device."""

    instant = False


class Noting(SoloTransport):
    """Notes where collectives are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        self.calls += [frame.name for frame in traceback.extract_stack() if frame.name in ("push", "drain")]
        return super().all_reduce(tensor, op)


@pytest.mark.parametrize("options", [{}, {"quota": "shared"}])
def test_where_ranks_submit_at_different_points_nothing_is_asked_when_a_window_begins(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("lightning_safusion.fusion.engine.clock_for", lambda device: Late())
    transport = Noting()
    windows(engine_on(CPU, transport, specs(), JobTraits(measure=False, overlap=False), **options), 18)
    assert set(transport.calls) == {"drain"}


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({}, float("nan")),
        ({"collective": "allreduce"}, float("inf")),
        ({"fusion": "naive"}, -float("inf")),
        ({"fusion": "horovod", "collective": "allreduce"}, float("nan")),
        ({"fusion": "selective", "collective": "hybrid"}, float("nan")),
        ({"deferred": True}, float("nan")),
        ({"deferred": True, "collective": "allreduce"}, float("inf")),
        ({"deferred": True, "collective": "sharded"}, -float("inf")),
    ],
)
def test_a_bad_gradient_is_seen_by_all_ranks_and_poisons_nothing(make: Make, options: Any, value: float) -> None:
    cluster = make(**options)
    train(cluster, 3)
    assert_seen_and_kept(cluster, 3, {5: value})


def test_a_large_finite_gradient_is_not_bad(make: Make) -> None:
    cluster = make(1)
    grads = cluster.random_grads(0)
    grads[0][0][:] = 1e30  # the norm overflows float32, no element does
    mean = cluster.step(grads)[0][0]
    assert torch.isfinite(mean).all()
    assert mean.abs().max() > 1e29


@pytest.mark.parametrize(
    "options", [{"density": 1.0}, {"density": 1.0, "collective": "allreduce"}, {}, {"wire": "fp32"}]
)
def test_what_half_precision_cannot_hold_is_sent_later(make: Make, options: Any) -> None:
    cluster = make(2, tensors=specs(((50,),), dtype=torch.float16), **options)
    held = torch.zeros(50)
    held[3] = 1e5  # beyond float16
    for each in cluster.settings:
        each.memory.add(0, 50, held)
    zero = [[torch.zeros(50, dtype=torch.float16)]] * 2
    received = sum(cluster.step(zero)[0][0].double() for _ in range(3))
    assert received[3] + cluster.residual(0, 0)[3] == pytest.approx(1e5)
    assert cluster.residual(0, 0)[3].abs() < 100


def test_a_sum_that_overflows_is_a_bad_step(make: Make) -> None:
    cluster = make(2, density=1.0, collective="allreduce")
    train(cluster, 3)
    huge = [[torch.full((s.numel,), 4e37) for s in cluster.specs]] * 2
    for each in cluster.settings:
        each.memory.add(0, 1, torch.tensor([3.3e38]))  # the first residual cannot even take the gradient
    cluster.step(huge)
    with pytest.warns(UserWarning, match="overflowed"):
        cluster.each(lambda rank: cluster.engines[rank].settle())
    # others have been used, also in the same buffer
    assert not any(cluster.residual(rank, 6).any() for rank in range(2))


def test_a_sum_that_overflows_on_a_device_is_a_bad_step(make: Make) -> None:
    cluster = make(deferred=True, density=1.0, collective="allreduce")
    random_window(cluster, 0)  # the first one adds nothing to the memory
    huge = [[torch.full((s.numel,), 3e38) for s in cluster.specs]] * 2
    for each in cluster.settings:
        each.memory.add(0, 10, torch.full((10,), 1e38))
    cluster.step(huge)
    assert all(cluster.residual(rank, 6).abs().min() > 2e38 for rank in range(2))


def test_all_zero_gradients(make: Make) -> None:
    for compressor in ("topk", "gaussiank", "sidco", "redsync", "dgc", "oktopk", "adtopk", "randomk", "threshold"):
        cluster = make(2, compressor=compressor)
        zeros = [[torch.zeros(s.numel) for s in cluster.specs]] * 2
        means = [cluster.step(zeros) for _ in range(4)]
        assert not flat(means[-1]).any()


def test_a_stale_tensor_is_left_as_it_is(make: Make) -> None:
    for options in ({}, {"collective": "allreduce"}, {"fusion": "naive"}, {"fusion": "horovod"}, {"scope": "group"}):
        cluster = make(2, **options)
        train(cluster, 3)
        before, grads = cluster.residuals(), cluster.random_grads(5)
        means = cluster.step(grads, [[i not in (2, 6) for i in EACH]] * 2)
        after = cluster.residuals()
        for rank in range(2):
            for i in (2, 6):
                assert torch.equal(means[rank][i], grads[rank][i])
                assert torch.equal(after[rank * len(EACH) + i], before[rank * len(EACH) + i])
            assert not torch.equal(means[rank][0], grads[rank][0])


@pytest.mark.parametrize("fusion", ["aligned", "naive", "horovod"])
def test_a_tensor_fresh_on_some_ranks_is_averaged_as_ddp_does(make: Make, fusion: str) -> None:
    cluster = make(3, fusion=fusion)
    train(cluster, 3)
    before, grads = flat(cluster.residuals()).view(3, -1), cluster.random_grads(5)
    grads[1][6].zero_()
    with pytest.warns(UserWarning, match="computed on some ranks only"):
        means = cluster.step(grads, [[(rank, i) != (1, 6) for i in EACH] for rank in range(3)])
    mean, after = sum(own[6] for own in grads) / 3, flat(cluster.residuals()).view(3, -1)
    for own in means:
        torch.testing.assert_close(own[6], mean, rtol=1e-5, atol=1e-5)
        assert torch.equal(own[6], means[0][6])
    start = sum(spec.numel for spec in cluster.specs[:6])
    sixth = slice(start, start + cluster.specs[6].numel)
    torch.testing.assert_close(after[:, sixth], before[:, sixth], rtol=1e-4, atol=1e-4)
    # its neighbours go on as ever
    held, left = sum(before) + sum(map(flat, grads)), sum(after) + 3 * flat(means[0])
    held[sixth] = left[sixth] = 0
    torch.testing.assert_close(left, held, rtol=1e-4, atol=1e-3)


def test_a_gradient_submitted_again_before_its_optimizer_stepped_carries_no_residual(make: Make) -> None:
    cluster = make(2)
    for engine in cluster.engines:
        engine.steps.tracked[:5] = True
    for step in range(3):
        random_window(cluster, step)
        for engine in cluster.engines:
            engine.steps.unstepped[:] = False
    random_window(cluster, 3)  # thrown away: no optimizer steps
    before, grads = cluster.residuals(), cluster.random_grads(4)
    with pytest.warns(UserWarning, match="toggle_optimizer"):
        means = cluster.step(grads)
    for i in range(5):
        torch.testing.assert_close(means[0][i], (grads[0][i] + grads[1][i]) / 2, rtol=1e-5, atol=1e-5)
        assert torch.equal(cluster.residual(0, i), before[i])
    # tensors of no optimizer are never waited for
    assert not torch.equal(cluster.residual(0, 6), before[6])


@pytest.mark.parametrize("fusion", ["aligned", "naive", "horovod"])
def test_an_error_on_one_rank_is_raised_on_all_and_no_rank_hangs(make: Make, fusion: str) -> None:
    cluster = make(3, fusion=fusion)
    compressors = [failing(engine) for engine in cluster.engines]
    train(cluster, 3)
    compressors[1].fail = True
    first, second, third = attempt(cluster, cluster.random_grads(4))
    assert second == "no selection in step 3"
    assert "another rank could not select" in first
    assert third == first
    if fusion != "naive":  # the window has ended on all ranks: the next one is in step again
        compressors[1].fail = False
        one, *others = random_window(cluster, 5)
        assert all(equal(one, other) for other in others)


@pytest.mark.parametrize("collective", ["allgather", "sharded", "hierarchical", "hierarchical-sharded"])
def test_units_that_cannot_be_read_stop_all_ranks(make: Make, collective: str) -> None:
    cluster = make(2, collective=collective)
    random_window(cluster, 0)
    cluster.engines[0].space.compare_in(UpdateUnits(unreadable, CPU))
    said = attempt(cluster, cluster.random_grads(1))
    assert all(said)
    assert not any("did not launch" in each for each in said)  # nobody waited in vain


def test_a_window_that_never_completes_is_named_and_forgotten(make: Make) -> None:
    cluster = make(1)
    train(cluster, 3)
    (engine,) = cluster.engines
    push(engine, *cluster.order[:4])
    assert engine.missing() == [f"t{i}" for i in range(5, -1, -1)]
    with pytest.raises(RuntimeError, match="t5"):
        engine.drain()
    # the same tensors again: a new window, in which nothing of the residual was lost
    random_window(cluster, 4)
    assert engine.windows == 4


@pytest.mark.parametrize(
    "options",
    [
        {"collective": "sharded", "fusion": "wfbp"},  # when the second one sends, what the first has sent is there
        {"compressor": "gaussiank", "fusion": Naive(buffer_elements=2710)},  # which only the first one fills
    ],
    ids=["phases", "rounds"],
)
def test_what_only_some_ranks_have_launched_of_an_abandoned_window_meets_nothing_later(
    make: Make, options: dict[str, Any]
) -> None:
    cluster = make(2, **options)
    train(cluster, 3)
    for engine in cluster.engines:
        push(engine, *cluster.order[:4])
    for engine in cluster.engines:
        engine.reset()
    before, given = flat(cluster.residuals()).view(2, -1), cluster.random_grads(3)
    first, second = cluster.step(given)
    assert equal(first, second)
    left = sum(flat(cluster.residuals()).view(2, -1)) + 2 * flat(first)
    torch.testing.assert_close(left, sum(before) + sum(map(flat, given)), rtol=0, atol=1e-3)


def test_the_density_of_a_schedule_is_followed(make: Make) -> None:
    cluster = make(2, density=ExponentialRamp(0.5, 0.01, 6), fusion="adaptive", collective="auto")
    sent = []
    for step in range(8):
        random_window(cluster, step)
        sent.append(cluster.engines[0].record.as_dict()["achieved_density"])
    assert sent[1] > sent[3] > sent[5] > 0
    assert sent[7] == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize("resumed", [0, 5])
def test_only_gradients_of_the_first_window_are_dropped(make: Make, resumed: int) -> None:
    """DDP puts other buckets in the place of theirs; observers may read those of later windows."""
    cluster = make(2)
    for engine in cluster.engines:
        engine.windows = resumed
    for step in range(3):
        random_window(cluster, step)
        for engine in cluster.engines:
            engine.begin_batch()
            grads = engine.record._window.grads
            assert len(grads) == len(EACH)
            assert all(grad is None for grad in grads) == (step == 0)


def test_buffers_are_announced_once() -> None:
    said: list[str] = []
    options = settings(fusion="aligned", collective="allreduce")
    windows(build_engine(options, specs(), SoloTransport(), CPU, JobTraits(measure=False), said.append))
    assert said == ["10 tensors travel in 2 buffers, 0 sparse and 2 dense"]


@pytest.mark.parametrize(("workers", "per_byte", "shards"), [(6, 1e-4, True), (6, 1e-12, False), (3, 1e-4, False)])
def test_the_links_of_devices_decide_on_shards(
    monkeypatch: pytest.MonkeyPatch, workers: int, per_byte: float, shards: bool
) -> None:
    costs = {"allgather": LinearCost(1e-4, per_byte), "allreduce": LinearCost(1.0, 1.0)}
    monkeypatch.setattr(build, "calibrate", lambda transport, device: dict(costs))
    said: list[str] = []

    def carried_on(device: torch.device) -> bool:
        options = settings(fusion="adaptive", collective="auto", quota="auto")
        made = build_engine(options, specs(), Silent(workers), device, announce=said.append)
        return made.space.collective.exchange is ShardedExchange

    with fake_cuda(monkeypatch) as device:
        assert carried_on(device) is shards
    assert sum("go to owners and back (collective='sharded'): " in line for line in said) == shards
    assert not carried_on(CPU)

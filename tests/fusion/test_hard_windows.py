"""Hard windows: bad numbers, stale and half-fresh tensors, gradients thrown away, failing ranks, changing orders.

Covers: NaN and Inf on one rank; a bad step keeps everything; stale tensors untouched; tensors fresh on some ranks only;
    tensors submitted again before their optimizer stepped; an exception in one rank's selection; incomplete windows;
    order changes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lab.virtual.transport import local_transports
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.comm.transport.interface import ReduceOp, Work
from lightning_safusion.comm.transport.torch_backend import SoloTransport
from lightning_safusion.fusion import build
from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.events import Clock
from lightning_safusion.sparsify import NoMemory, Segments, Selection, TopK
from lightning_safusion.sparsify.selection.survey import Selector
from tests.cluster import Cluster, settings, specs
from tests.cuda import Silent, fake_cuda


@pytest.fixture
def make(make: Callable[..., Cluster]) -> Callable[..., Cluster]:
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
    transport, tensors = Noting(), specs()
    held = build_engine(
        settings(collective="allgather", **options),
        tensors,
        transport,
        torch.device("cpu"),
        JobTraits(measure=False, overlap=False),
    )
    for _ in range(18):
        for spec in reversed(tensors):
            held.push(spec.index, torch.randn(spec.numel))
        held.drain()
    assert set(transport.calls) == {"drain"}


def settle(cluster: Cluster, steps: int = 3) -> None:
    """Runs until the order is known and plans are used."""
    for step in range(steps):
        cluster.step(cluster.random_grads(step))


def snapshot(cluster: Cluster) -> list[list[torch.Tensor]]:
    return [
        [cluster.residual(rank, i).clone() for i in range(len(cluster.specs))]
        for rank in range(len(cluster.transports))
    ]


@pytest.mark.parametrize(
    ("fusion", "collective", "value"),
    [
        ("aligned", "allgather", float("nan")),
        ("aligned", "allreduce", float("inf")),
        ("naive", "allgather", -float("inf")),
        ("horovod", "allreduce", float("nan")),
    ],
)
def test_a_bad_gradient_is_seen_by_all_ranks_and_poisons_nothing(
    make: Callable[..., Cluster], fusion: str, collective: str, value: float
) -> None:
    cluster = make(2, fusion=fusion, collective=collective)
    settle(cluster)
    before = snapshot(cluster)
    grads = cluster.random_grads(9)
    grads[1][3][5] = value
    means = cluster.step(grads)
    for rank in range(2):
        assert not torch.isfinite(means[rank][3]).all()
        assert all(torch.isfinite(means[rank][i]).all() for i in range(len(cluster.specs)) if i != 3)
    # nothing was taken out of the residuals, and every finite gradient is in them
    for rank in range(2):
        for i, (old, new) in enumerate(zip(before[rank], snapshot(cluster)[rank], strict=True)):
            added = torch.zeros_like(old) if (rank, i) == (1, 3) else grads[rank][i].double()
            torch.testing.assert_close(new, old + added, rtol=1e-5, atol=1e-6)
    after = cluster.step(cluster.random_grads(10))
    assert all(torch.isfinite(mean).all() for mean in after[0])


def test_a_large_finite_gradient_is_not_bad(make: Callable[..., Cluster]) -> None:
    cluster = make(1)
    grads = cluster.random_grads(0)
    grads[0][0][:] = 1e30  # the norm overflows float32, no element does
    means = cluster.step(grads)
    assert torch.isfinite(means[0][0]).all()
    assert means[0][0].abs().max() > 1e29


@pytest.mark.parametrize(
    "options", [{"density": 1.0}, {"density": 1.0, "collective": "allreduce"}, {}, {"wire": "fp32"}]
)
def test_what_half_precision_cannot_hold_is_sent_later(make: Callable[..., Cluster], options: Any) -> None:
    cluster = make(2, tensors=specs(((50,),), dtype=torch.float16), **options)
    held = torch.zeros(50)
    held[3] = 1e5  # beyond float16
    for settings_ in cluster.settings:
        settings_.memory.add(0, 50, held)
    zero = [[torch.zeros(50, dtype=torch.float16)]] * 2
    received = sum(cluster.step(zero)[0][0].double() for _ in range(3))
    assert received[3] + cluster.residual(0, 0)[3] == pytest.approx(1e5)
    assert cluster.residual(0, 0)[3].abs() < 100


def test_a_sum_that_overflows_is_a_bad_step(make: Callable[..., Cluster]) -> None:
    cluster = make(2, density=1.0, collective="allreduce")
    settle(cluster)
    huge = [[torch.full((s.numel,), 4e37) for s in cluster.specs]] * 2
    for settings_ in cluster.settings:
        settings_.memory.add(0, 1, torch.tensor([3.3e38]))  # the first residual cannot even take the gradient
    cluster.step(huge)
    with pytest.warns(UserWarning, match="overflowed"):
        cluster.each(lambda rank: cluster.engines[rank].settle())
    # others have been used, also in the same buffer
    assert not any(cluster.residual(rank, 6).any() for rank in range(2))


def test_all_zero_gradients(make: Callable[..., Cluster]) -> None:
    for compressor in ("topk", "gaussiank", "sidco", "redsync", "dgc", "oktopk", "adtopk", "randomk", "threshold"):
        cluster = make(2, compressor=compressor)
        zeros = [[torch.zeros(s.numel) for s in cluster.specs] for _ in range(2)]
        for _ in range(4):
            means = cluster.step(zeros)
        assert all(not mean.any() for mean in means[0])


def test_a_stale_tensor_is_left_as_it_is(make: Callable[..., Cluster]) -> None:
    for options in ({}, {"collective": "allreduce"}, {"fusion": "naive"}, {"fusion": "horovod"}, {"scope": "group"}):
        cluster = make(2, **options)
        settle(cluster)
        before = snapshot(cluster)
        grads = cluster.random_grads(5)
        stale = [[i not in (2, 6) for i in range(len(cluster.specs))]] * 2
        means = cluster.step(grads, stale)
        after = snapshot(cluster)
        for rank in range(2):
            for i in (2, 6):
                assert torch.equal(means[rank][i], grads[rank][i])
                assert torch.equal(after[rank][i], before[rank][i])
            assert not torch.equal(means[rank][0], grads[rank][0])


@pytest.mark.parametrize("fusion", ["aligned", "naive", "horovod"])
def test_a_tensor_fresh_on_some_ranks_is_averaged_as_ddp_does(make: Callable[..., Cluster], fusion: str) -> None:
    cluster = make(3, fusion=fusion)
    settle(cluster)
    before = snapshot(cluster)
    grads = cluster.random_grads(5)
    fresh = [[not (rank == 1 and i == 6) for i in range(len(cluster.specs))] for rank in range(3)]
    grads[1][6].zero_()
    with pytest.warns(UserWarning, match="computed on some ranks only"):
        means = cluster.step(grads, fresh)
    for rank in range(3):
        torch.testing.assert_close(means[rank][6], sum(g[6] for g in grads) / 3, rtol=1e-5, atol=1e-5)
        assert torch.equal(means[rank][6], means[0][6])
        torch.testing.assert_close(cluster.residual(rank, 6), before[rank][6], rtol=1e-4, atol=1e-4)
    assert_neighbours_conserved(cluster, before, grads, means, skip=6)


def test_a_bad_tensor_fresh_on_some_ranks_poisons_no_residual(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    settle(cluster)
    before, grads = snapshot(cluster), cluster.random_grads(5)
    grads[0][6][2] = float("nan")
    fresh = [[True] * len(cluster.specs), [i != 6 for i in range(len(cluster.specs))]]
    with pytest.warns(UserWarning, match="computed on some ranks only"):
        means = cluster.step(grads, fresh)
    assert all(torch.isnan(means[rank][6]).any() for rank in range(2))
    assert all(torch.equal(cluster.residual(rank, 6), before[rank][6]) for rank in range(2))


def assert_neighbours_conserved(cluster: Cluster, before: Any, grads: Any, means: Any, skip: int) -> None:
    n = len(cluster.transports)
    for i in range(len(cluster.specs)):
        if i == skip:
            continue
        held = sum(before[rank][i] + grads[rank][i].double() for rank in range(n))
        left = n * means[0][i].double() + sum(cluster.residual(rank, i) for rank in range(n))
        torch.testing.assert_close(left, held, rtol=1e-4, atol=1e-3)


def test_a_gradient_submitted_again_before_its_optimizer_stepped_carries_no_residual(
    make: Callable[..., Cluster],
) -> None:
    cluster = make(2)
    for engine in cluster.engines:
        engine.steps.tracked[:5] = True
    for step in range(3):
        cluster.step(cluster.random_grads(step))
        for engine in cluster.engines:
            engine.steps.unstepped[:] = False
    cluster.step(cluster.random_grads(3))  # thrown away: no optimizer steps
    before, grads = snapshot(cluster), cluster.random_grads(4)
    with pytest.warns(UserWarning, match="toggle_optimizer"):
        means = cluster.step(grads)
    for i in range(5):
        torch.testing.assert_close(means[0][i], (grads[0][i] + grads[1][i]) / 2, rtol=1e-5, atol=1e-5)
        assert torch.equal(cluster.residual(0, i), before[0][i])
    # tensors of no optimizer are never waited for
    assert not torch.equal(cluster.residual(0, 6), before[0][6])


class Failing(TopK):
    """Fails on demand."""

    def __init__(self) -> None:
        self.fail = False

    def select(self, x: torch.Tensor, segments: Segments, step: int) -> Selection:
        if self.fail:
            raise ValueError(f"no selection in step {step}")
        return super().select(x, segments, step)


@pytest.mark.parametrize("fusion", ["aligned", "naive", "horovod"])
def test_an_error_on_one_rank_is_raised_on_all_and_no_rank_hangs(make: Callable[..., Cluster], fusion: str) -> None:
    cluster = make(3, fusion=fusion)
    compressors = [Failing() for _ in cluster.engines]
    for engine, compressor in zip(cluster.engines, compressors, strict=True):
        engine.space.selector = Selector(compressor)
    settle(cluster)
    compressors[1].fail = True
    grads = cluster.random_grads(4)

    def run(rank: int) -> Exception | None:
        try:
            for index in cluster.order:
                cluster.engines[rank].push(index, grads[rank][index].clone())
            cluster.engines[rank].drain()
        except (ValueError, RuntimeError) as error:
            return error
        return None

    errors = cluster.each(run)
    assert isinstance(errors[1], ValueError)
    assert "no selection in step 3" in str(errors[1])
    assert all("another rank could not select" in str(errors[rank]) for rank in (0, 2))


def test_a_window_that_never_completes_is_named_and_forgotten(make: Callable[..., Cluster]) -> None:
    cluster = make(1)
    settle(cluster)
    engine, grads = cluster.engines[0], cluster.random_grads(3)[0]
    for index in cluster.order[:4]:
        engine.push(index, grads[index].clone())
    assert engine.missing() == [f"t{i}" for i in range(5, -1, -1)]
    with pytest.raises(RuntimeError, match="t5"):
        engine.drain()
    # the same tensors again: a new window, in which nothing of the residual was lost
    cluster.step(cluster.random_grads(4))
    assert engine.windows == 4


def test_an_order_that_changes_is_followed(make: Callable[..., Cluster]) -> None:
    cluster = make(2, fusion="adaptive")
    n = len(cluster.specs)
    orders = [list(range(n)), list(reversed(range(n))), list(reversed(range(n))), [*range(5, n), *range(5)]]
    done = [torch.zeros(s.numel, dtype=torch.float64) for s in cluster.specs]
    given = [torch.zeros(s.numel, dtype=torch.float64) for s in cluster.specs]
    for step in range(12):
        grads = cluster.random_grads(step)
        means = cluster.step(grads, order=orders[min(step // 3, 3)])
        assert all(torch.equal(a, b) for a, b in zip(*means, strict=True))
        for i in range(n):
            done[i] += 2 * means[0][i].double()
            given[i] += grads[0][i].double() + grads[1][i].double()
    for i in range(n):
        total = done[i] + cluster.residual(0, i) + cluster.residual(1, i)
        torch.testing.assert_close(total, given[i], rtol=0, atol=1e-3)
    layout = cluster.engines[0].space.layout
    assert [spec.index for spec in layout.specs] == orders[3]


def test_density_changes_move_no_state(make: Callable[..., Cluster]) -> None:
    from lightning_safusion.sparsify import ExponentialRamp

    cluster = make(2, density=ExponentialRamp(0.5, 0.01, 6), fusion="adaptive", collective="auto")
    sent = []
    for step in range(8):
        cluster.step(cluster.random_grads(step))
        sent.append(cluster.engines[0].record.as_dict()["achieved_density"])
    assert sent[1] > sent[3] > sent[5] > 0
    assert sent[7] == pytest.approx(0.01, rel=0.2)


def test_memory_none_sends_only_gradients_of_this_step(make: Callable[..., Cluster]) -> None:
    cluster = make(1, memory=NoMemory())
    for step in range(3):
        grads = cluster.random_grads(step)
        means = cluster.step(grads)
        for mean, grad in zip(means[0], grads[0], strict=True):
            kept = mean != 0
            assert torch.equal(mean[kept], grad[kept])


def test_only_gradients_of_the_first_window_are_dropped(make: Callable[..., Cluster]) -> None:
    """DDP puts other buckets in the place of theirs; observers may read those of later windows."""
    cluster = make(2)
    for step in range(3):
        cluster.step(cluster.random_grads(step))
        for engine in cluster.engines:
            assert engine.record is not None
            engine.drop_gradients()
            grads = engine.record._backward.grads
            assert len(grads) == len(cluster.specs)
            assert all(grad is None for grad in grads) == (step == 0)


def test_buffers_are_announced_once() -> None:
    said: list[str] = []
    transports = local_transports(1)
    options = settings(fusion="aligned", collective="allreduce")
    engine = build_engine(options, specs(), transports[0], torch.device("cpu"), JobTraits(measure=False), said.append)
    for _ in range(4):
        for spec in reversed(specs()):
            engine.push(spec.index, torch.ones(spec.numel))
        engine.drain()
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
    assert not carried_on(torch.device("cpu"))


def test_measured_plans_are_equal_on_all_ranks(make: Callable[..., Cluster]) -> None:
    cluster = Cluster(3, lambda: settings(fusion="adaptive", collective="auto"), measure=True)
    settle(cluster, 12)
    digests = {engine.planner.current.digest for engine in cluster.engines}
    assert len(digests) == 1
    cluster.close()

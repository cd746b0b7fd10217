"""Windows in which owners reduce, in fused kernels: the bits of the CPU, and nothing lost.

Covers: gradients and what was sent over several windows, for one to four workers, dense tensors, gradients
    of 16 bits, keys in units of the update, tensors with one owner and with several, buffers without a shard of this
    worker; ties, zeros and subnormal numbers; programs in any order; what the messages are, byte for byte; numbers that
    are not finite; sums that overflow; damaged messages; a rank that fails; notices; the sum of all
    gradients; which parts the kernels serve.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.exchange import Notice
from lightning_safusion.fusion.fused import OwnerShipment
from lightning_safusion.sparsify.selection.units import Moment, UpdateUnits
from tests.cluster import Cluster, assert_conserved, specs
from tests.fusion.test_fused import HOST, compare_in, shipments
from tests.fusion.test_fused import same_numbers as same_gradients
from tests.kernels.cuda.buffers import in_order
from tests.quick import slow

# The first has several owners, others one; one is dense by itself.
SHAPES = ((30, 20), (40,), (1,), (0,), (90,))
FULL = tuple(shape for shape in SHAPES if shape != (0,))


@pytest.fixture
def make(make_fused: Callable[..., Cluster]) -> Callable[..., Cluster]:
    return partial(make_fused, tensors=specs(SHAPES), deferred=True, collective="sharded", wire="q4")


def exchanges(cluster: Cluster, rank: int) -> list[ShardedExchange]:
    found = [shipment.buffer.exchange for shipment in shipments(cluster, rank)]
    assert all(isinstance(exchange, ShardedExchange) for exchange in found)
    return found  # type: ignore[return-value]


def same_numbers(clusters: list[Cluster], steps: int = 3) -> None:
    """Gradients and messages are equal, bit for bit, in every window."""
    same_gradients(clusters, steps)
    for rank in range(len(clusters[0].transports)):
        for ours, theirs in zip(*(exchanges(cluster, rank) for cluster in clusters), strict=True):
            assert torch.equal(ours.sending, theirs.sending)
            assert torch.equal(ours.sums, theirs.sums)
        for ours, theirs in zip(*(shipments(cluster, rank) for cluster in clusters), strict=True):
            assert ours.sent_counts().tolist() == theirs.sent_counts().tolist()
            assert all(torch.equal(a, b) for a, b in zip(ours.sent(), theirs.sent(), strict=True))
            assert ours.buffer.exchange.bytes_received == theirs.buffer.exchange.bytes_received


MIXED = [*specs(FULL, dense=(1,))[:3], *specs(FULL, dtype=torch.float16)[3:]]


@pytest.mark.parametrize(
    "options",
    [
        {"tensors": MIXED},
        *slow(
            [
                {"world_size": 3, "density": 0.2},
                {"world_size": 1},
                {"memory": "decoupled", "tensors": specs(FULL, dtype=torch.bfloat16, dense=(1,))},
                {"wire": "fp32"},
                {"wire": "fp16", "tensors": specs(FULL, dense=(1,))},
                {"tensors": specs(((60,),)), "world_size": 3},
                {"world_size": 4, "tensors": specs(((70, 30), (64,), (3000,))), "density": 0.02},
            ]
        ),
    ],
)
def test_the_numbers_are_those_of_the_cpu(make: Callable[..., Cluster], options: Any) -> None:
    clusters = [make(**options, deferred=deferred) for deferred in (True, False)]
    with in_order(4):  # of programs; the numbers do not depend on it
        same_numbers(clusters, 2)
    assert all(isinstance(shipment, OwnerShipment) for shipment in shipments(clusters[0]))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.7, 0.0, 1e-42])
def test_ties_zeros_and_subnormal_numbers(make: Callable[..., Cluster], scale: float) -> None:
    clusters = [make(tensors=specs(((30, 20), (90,))), deferred=deferred) for deferred in (True, False)]
    grads = [[(grad.clamp(-3, 3).round() * scale) for grad in mine] for mine in clusters[0].random_grads(1)]
    for _ in range(2):
        device, host = (cluster.step(grads) for cluster in clusters)
        for ours, theirs in zip(device, host, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(*(cluster.residuals() for cluster in clusters), strict=True))


@pytest.mark.parametrize(("dtype", "without"), [(torch.bfloat16, 1), *slow([(torch.float32, -1), (torch.float64, 0)])])
def test_elements_are_compared_in_units_of_the_update(
    make: Callable[..., Cluster], dtype: torch.dtype, without: int
) -> None:
    clusters = [make(deferred=deferred) for deferred in (True, False)]
    compare_in(clusters, dtype, without)
    same_numbers(clusters, 2)
    assert all(isinstance(shipment, OwnerShipment) for shipment in shipments(clusters[0]))


@pytest.mark.slow
def test_buffers_that_are_not_fused_are_beside_fused_ones(make: Callable[..., Cluster]) -> None:
    clusters = [make(fusion="wfbp", deferred=deferred) for deferred in (True, False)]
    same_numbers(clusters)
    found = [type(shipment) is OwnerShipment for shipment in shipments(clusters[0])]
    assert found == [True, False, False, True, True]  # two are dense


@pytest.mark.parametrize(
    "options",
    [
        {"compressor": "threshold"},
        {"memory": "none"},
        {"wire": "q2"},
        {"scope": "group"},
        {"tensors": specs(FULL, dtype=torch.float16, dense=(1,))},
    ],
)
def test_other_parts_are_left_to_torch(make: Callable[..., Cluster], options: Any) -> None:
    clusters = [make(**options, deferred=deferred) for deferred in (True, False)]
    for step in range(2):
        device, host = (cluster.step(cluster.random_grads(step)) for cluster in clusters)
        for ours, theirs in zip(device, host, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not any(isinstance(shipment, OwnerShipment) for shipment in shipments(clusters[0]))


def test_a_bad_gradient_is_seen_by_all_ranks_and_poisons_nothing(make: Callable[..., Cluster]) -> None:
    cluster = make()
    cluster.step(cluster.random_grads(0))
    before, grads = cluster.residuals(), cluster.random_grads(9)
    grads[1][0][[17, 450]] = torch.tensor([torch.nan, torch.inf])
    means = cluster.step(grads)
    for rank in range(2):
        assert not torch.isfinite(means[rank][0]).all()
        assert all(torch.isfinite(means[rank][i]).all() for i in range(1, len(SHAPES)))
    added = [torch.zeros_like(g) if g is grads[1][0] else g for mine in grads for g in mine]
    for old, new, grad in zip(before, cluster.residuals(), added, strict=True):
        torch.testing.assert_close(new, old + grad.double(), rtol=1e-5, atol=1e-5)
    assert shipments(cluster)[0].sent()[0].numel()
    after = cluster.step(cluster.random_grads(10))
    assert all(torch.isfinite(mean).all() for mean in after[0])


def test_a_sum_that_overflows_at_its_owner_is_a_bad_step_everywhere(make: Callable[..., Cluster]) -> None:
    cluster = make()
    before, grads = cluster.residuals(), cluster.random_grads(1)
    for mine in grads:
        mine[0][5] = 2e38
    cluster.step(grads)
    assert not any(torch.equal(old, new) for old, new in list(zip(before, cluster.residuals(), strict=True))[::5])
    for rank in range(2):
        held = cluster.residual(rank, 0)
        assert float(held[5]) == pytest.approx(2e38)  # on all ranks: nothing was taken out
    for engine in cluster.engines:
        engine.settle()


def test_a_damaged_message_spoils_the_window_of_all_ranks(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make()
    before, grads = cluster.residuals(), cluster.random_grads(1)
    await_first = ShardedExchange.await_first

    def damage(exchange: ShardedExchange) -> None:
        await_first(exchange)
        if exchange.transport.rank == 0:
            exchange.arriving[0, exchange.header] += 1  # entries before the first region

    monkeypatch.setattr(ShardedExchange, "await_first", damage)
    cluster.step(grads)
    for rank in range(2):
        for index in (0, 1, 4):
            old, new = before[rank * len(SHAPES) + index], cluster.residual(rank, index)
            torch.testing.assert_close(new, old + grads[rank][index].double(), rtol=1e-5, atol=1e-5)


def test_a_rank_that_fails_stops_all_one_window_later(make: Callable[..., Cluster]) -> None:
    cluster = make()
    cluster.step(cluster.random_grads(0))
    held = cluster.residuals()

    def unreadable(index: int) -> Moment | None:
        raise ValueError("no state")

    cluster.engines[1].space.selector.units = UpdateUnits(unreadable, HOST)
    first, second = cluster.errors(cluster.random_grads(2))
    assert second == ["no state"]
    assert "another rank could not select" in first[0]
    for new, old in zip(cluster.residuals()[len(SHAPES) :], held[len(SHAPES) :], strict=True):
        assert torch.equal(new, old)


@pytest.mark.slow
def test_notices_are_heard_one_window_later(make: Callable[..., Cluster]) -> None:
    cluster = make()
    cluster.engines[0].notices.own = int(Notice.TERMINATE)
    for step in range(2):
        cluster.step(cluster.random_grads(step))
    assert [engine.notices.heard for engine in cluster.engines] == [int(Notice.TERMINATE)] * 2


@pytest.mark.slow
def test_nothing_is_lost(make: Callable[..., Cluster]) -> None:
    cluster = make(world_size=3, tensors=specs(FULL, dense=(1,)))
    assert_conserved(cluster, 3)
    assert all(isinstance(shipment, OwnerShipment) for shipment in shipments(cluster))

"""Windows in fused kernels: the same bits as where the host decides and the CPU's kernels work, and no host work."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.exchange import Notice
from lightning_safusion.fusion.build import left_to_torch
from lightning_safusion.fusion.fused import FusedShipment, OwnerShipment
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.sparsify.selection.units import Moment, UpdateUnits
from tests.cluster import Cluster, specs
from tests.fusion.windows import Make, assert_seen_and_kept, finite, flat, random_window, train, unreadable
from tests.kernels.cuda.buffers import in_order
from tests.models import equal
from tests.quick import slow

HOST = torch.device("cpu")
SHAPES = ((30, 20), (40,), (1,), (0,), (20, 25), (3,))
# Beside an empty tensor PyTorch adds on the CPU, and rounds products and sums together.
LONG = [*specs(((60, 50),)), *specs(((60, 50), (50, 70)), torch.bfloat16)[1:]]
FULL = tuple(shape for shape in SHAPES if shape != (0,))
SHARDS = {"collective": "sharded", "wire": "q4"}
#: The first has several owners, others one; one is dense by itself.
OWNED = {**SHARDS, "tensors": specs(((30, 20), (40,), (1,), (0,), (90,)))}
FULL_OWNED = tuple(spec.shape for spec in OWNED["tensors"] if spec.numel)
MIXED_OWNED = {**SHARDS, "tensors": [*specs(FULL_OWNED, dense=(1,))[:3], *specs(FULL_OWNED, dtype=torch.float16)[3:]]}


@pytest.fixture
def make(make_fused: Make) -> Make:
    return partial(make_fused, tensors=specs(SHAPES), deferred=True, collective="allgather", wire="eliasfano-q4")


def shipments(cluster: Cluster, rank: int = 0) -> list[Shipment]:
    return list(cluster.engines[rank].record._shipments)


def compare_in(clusters: list[Cluster], dtype: torch.dtype = torch.float32, without: int = -1) -> None:
    """Gives all tensors but one a second moment, by which elements are compared."""
    generator = torch.Generator().manual_seed(3)
    own = [torch.rand(spec.numel, generator=generator).mul_(1e-3).to(dtype) for spec in clusters[0].specs]
    moments = [None if index == without else Moment(values, 1e-8) for index, values in enumerate(own)]
    for cluster in clusters:
        for engine in cluster.engines:
            engine.space.compare_in(UpdateUnits(lambda indices: [moments[index] for index in indices], HOST))


def same_numbers(clusters: list[Cluster], steps: int = 3) -> None:
    """Gradients and residuals are equal, bit for bit, in every window; of the last one what was sent, and messages."""
    for step in range(steps):
        assert equal(*(random_window(cluster, step) for cluster in clusters))
        assert equal(*(cluster.residuals() for cluster in clusters))
    for rank in range(len(clusters[0].transports)):
        for ours, theirs in zip(*(shipments(cluster, rank) for cluster in clusters), strict=True):
            assert ours.sent_counts().tolist() == theirs.sent_counts().tolist()
            mine, other = ours.buffer.exchange, theirs.buffer.exchange
            if isinstance(ours, OwnerShipment):
                assert equal([mine.sending, mine.sums], [other.sending, other.sums])
                assert mine.bytes_received == other.bytes_received


def served(cluster: Cluster) -> set[bool]:
    """Whether the buffers of the last window went through the kernels."""
    return {isinstance(shipment, FusedShipment) for shipment in shipments(cluster)}


MIXED = [*specs(SHAPES, dense=(1,))[:2], *specs(SHAPES, dtype=torch.bfloat16)[2:5], *specs(SHAPES, torch.float16)[5:]]


@pytest.mark.parametrize(
    "options",
    [
        {"tensors": MIXED},
        MIXED_OWNED,
        *slow(
            [
                {"quota": "shared", "density": 0.02, "world_size": 3},
                {"tensors": specs(FULL, dense=(1,)), "quota": "pooled", "memory": "decoupled"},
                {"wire": "auto", "density": 0.05},
                {"wire": "eliasfano-bf16", "tensors": specs(SHAPES, dense=(1, 4))},
                {"wire": "eliasfano-fp16", "quota": "pooled"},
                {"wire": "auto", "tensors": LONG, "fusion": "wfbp"},
                {"tensors": specs(SHAPES, dtype=torch.float16, dense=(4,))},
                OWNED | {"world_size": 3, "density": 0.2},
                OWNED | {"world_size": 1},
                SHARDS | {"memory": "decoupled", "tensors": specs(FULL_OWNED, torch.bfloat16, dense=(1,))},
                OWNED | {"wire": "fp32"},
                SHARDS | {"wire": "fp16", "tensors": specs(FULL_OWNED, dense=(1,))},
                {**SHARDS, "tensors": specs(((60,),)), "world_size": 3},
                {**SHARDS, "world_size": 4, "tensors": specs(((70, 30), (64,), (3000,))), "density": 0.02},
            ]
        ),
    ],
)
def test_the_numbers_are_those_of_the_cpu(make: Make, options: Any) -> None:
    clusters = [make(**options, deferred=deferred) for deferred in (True, False)]
    with in_order(4):  # of programs; the numbers do not depend on it
        same_numbers(clusters, 2 if "collective" in options else 3)
    assert served(clusters[0]) == {True}
    for ours, theirs in zip(*(shipments(cluster, -1) for cluster in clusters), strict=True):
        assert equal(ours.sent(), theirs.sent())


@pytest.mark.parametrize(
    ("compressor", "by_update", "options"),
    [
        ("gaussiank", True, {"tensors": specs(FULL, dense=(1,))}),
        ("randomk", False, {"tensors": specs(SHAPES, dtype=torch.bfloat16), "wire": "eliasfano-fp32"}),
        *slow(
            (compressor, bool(i % 2), {"quota": ("proportional", "pooled", "shared")[i % 3]})
            for i, compressor in enumerate(("threshold", "dgc", "redsync", "sidco", "oktopk", "adtopk", "gaussiank"))
        ),
    ],
)
def test_other_compressors_have_the_numbers_of_the_cpu(
    make: Make, compressor: str, by_update: bool, options: Any
) -> None:
    clusters = [make(compressor=compressor, **options, deferred=deferred) for deferred in (True, False)]
    if by_update:
        compare_in(clusters)
    same_numbers(clusters, 2)
    assert served(clusters[0]) == {True}


@pytest.mark.parametrize(
    ("dtype", "without", "options"),
    [
        (torch.bfloat16, 4, {"quota": "pooled"}),
        (torch.bfloat16, 1, OWNED),
        *slow(
            [
                (torch.float32, -1, OWNED),
                (torch.float64, 0, OWNED),
                (torch.float32, -1, {"memory": "decoupled", "tensors": specs(FULL)}),
                (torch.float64, -1, {"tensors": specs(SHAPES, dtype=torch.bfloat16)}),
            ]
        ),
    ],
)
def test_elements_are_compared_in_units_of_the_update(
    make: Make, dtype: torch.dtype, without: int, options: Any
) -> None:
    clusters = [make(**options, deferred=deferred) for deferred in (True, False)]
    compare_in(clusters, dtype, without)
    same_numbers(clusters, 2)
    assert served(clusters[0]) == {True}


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.7, 0.0, 1e-42])
def test_owners_meet_ties_zeros_and_subnormal_numbers(make: Make, scale: float) -> None:
    clusters = [make(**SHARDS, tensors=specs(((30, 20), (90,))), deferred=deferred) for deferred in (True, False)]
    grads = [[(grad.clamp(-3, 3).round() * scale) for grad in mine] for mine in clusters[0].random_grads(1)]
    for _ in range(2):
        assert equal(*(cluster.step(grads) for cluster in clusters))
        assert equal(*(cluster.residuals() for cluster in clusters))


@pytest.mark.slow
def test_dense_buffers_are_beside_those_of_owners(make: Make) -> None:
    clusters = [make(**OWNED, fusion="wfbp", deferred=deferred) for deferred in (True, False)]
    same_numbers(clusters)
    found = [type(shipment) is OwnerShipment for shipment in shipments(clusters[0])]
    assert found == [True, False, False, True, True]  # two are dense


def test_buffers_that_are_not_fused_are_beside_fused_ones(make: Make) -> None:
    few = specs(((30, 20), (40,), (20, 15)))
    clusters = [make(fusion="wfbp", tensors=few, deferred=deferred) for deferred in (True, False)]
    for cluster in clusters:
        train(cluster, 3)
    for engine in clusters[0].engines:
        own = [engine.space.buffer(group) for group in engine.space.buffers]
        assert len(own) > 2
        own[1]._constants["kernels"] = None
    same_numbers(clusters, 1)
    assert served(clusters[0]) == {True, False}
    assert_seen_and_kept(clusters[0], 2, {17: torch.nan})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"wire": "auto", "compressor": "gaussiank", "tensors": MIXED}, []),
        ({"memory": "none"}, ["memory='none'"]),
        ({"wire": "eliasfano-q2"}, ["wire='eliasfano-q2'"]),
        ({"wire": "bitmap-q4"}, ["wire='bitmap-q4'"]),
        ({"scope": "group"}, ["scope='group'"]),
        ({**SHARDS, "density": 0.3, "tensors": specs(((1200,),))}, []),
        ({**SHARDS, "compressor": "randomk"}, ["compressor='randomk' with shards"]),
        ({**SHARDS, "compressor": "threshold"}, ["compressor='threshold' with shards"]),
        ({**SHARDS, "memory": "none"}, ["memory='none'"]),
        ({**SHARDS, "wire": "q2"}, ["wire='q2'"]),
        ({**SHARDS, "scope": "group"}, ["scope='group'"]),
        ({"tensors": specs(FULL, dtype=torch.float64)}, ["gradients in float64"]),
    ],
)
def test_other_parts_are_left_to_torch_and_named(make: Make, options: Any, named: list[str]) -> None:
    cluster = make(**options)
    random_window(cluster, 0)
    assert served(cluster) == {not named}
    collective = cluster.engines[0].space.collective
    assert left_to_torch(cluster.settings[0], cluster.specs, collective) == named


@pytest.mark.parametrize(
    ("options", "unknown"),
    [
        # at 30 % no layout is much shorter than the other, at 70 % the bitmap is
        *slow([({"wire": "q4", "density": 0.3, "tensors": specs(((1000,),))}, None)]),
        ({"wire": "q4", "density": 0.7, "tensors": specs(((1200,), (1200,)))}, "messages in bitmap-q4"),
        (
            {"collective": "sharded", "tensors": specs(((30, 20), (40,)), torch.float16, dense=(1,))},
            "dense tensors in float16, or of several types, with shards",
        ),
    ],
)
def test_buffers_that_are_left_to_torch_are_named_once(make: Make, options: Any, unknown: str | None) -> None:
    cluster, said = make(fusion="wfbp", **options), list[str]()
    assert left_to_torch(cluster.settings[0], cluster.specs, cluster.engines[0].space.collective) == []
    cluster.engines[0].fused.announce = said.append
    train(cluster, 3)
    assert [line.partition(":")[0] for line in said] == [f"there are no fused kernels for {unknown}"] * bool(unknown)
    assert (served(cluster) == {True}) == (unknown is None)


@pytest.mark.parametrize(
    ("options", "bad"), [({}, (4, {17: torch.nan})), (OWNED, (0, {17: torch.nan, 450: torch.inf}))]
)
def test_a_bad_gradient_and_a_notice_are_seen_by_all_ranks_and_poison_nothing(
    make: Make, options: Any, bad: tuple[int, dict[int, float]]
) -> None:
    cluster = make(**options)
    cluster.engines[0].notices.own = int(Notice.TERMINATE)
    train(cluster, 2)
    assert [engine.notices.heard for engine in cluster.engines] == [int(Notice.TERMINATE)] * 2  # a window later
    assert_seen_and_kept(cluster, *bad)


@pytest.mark.parametrize("options", [{}, OWNED])
def test_a_rank_that_fails_stops_all_one_window_later(make: Make, options: Any) -> None:
    cluster = make(**options)
    random_window(cluster, 0)
    held = cluster.residuals()
    cluster.engines[1].space.selector.units = UpdateUnits(unreadable, HOST)
    first, second = cluster.errors(cluster.random_grads(2))
    assert "no second moment" in second[0]
    assert "another rank could not select" in first[0]
    assert equal(cluster.residuals()[len(cluster.specs) :], held[len(cluster.specs) :])


def test_a_forgotten_window_says_nothing_later(make: Make) -> None:
    cluster = make()
    grads = cluster.random_grads(2)
    grads[0][0][0] = torch.nan
    cluster.step(grads)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that gradients were not finite
        for engine in cluster.engines:
            engine.reset()
            engine.settle()
    assert finite(random_window(cluster, 3))
    assert not any(int(engine.fused.windows.status) for engine in cluster.engines)


def test_a_sum_that_overflows_at_its_owner_is_a_bad_step_everywhere(make: Make) -> None:
    cluster = make(**OWNED)
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


def test_a_damaged_message_to_an_owner_spoils_the_window_of_all_ranks(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make(**OWNED)
    before, grads = cluster.residuals(), cluster.random_grads(1)
    await_first = ShardedExchange.await_first

    def damage(exchange: ShardedExchange) -> None:
        await_first(exchange)
        if exchange.transport.rank == 0:
            exchange.arriving[0, exchange.header] += 1  # entries before the first region

    monkeypatch.setattr(ShardedExchange, "await_first", damage)
    cluster.step(grads)
    torch.testing.assert_close(flat(cluster.residuals()), flat(before) + flat(grads), rtol=1e-5, atol=1e-5)

"""Windows in fused kernels: the same bits as where the host decides and the CPU's kernels work, and no host work.

Covers: gradients and residuals over several windows, for quotas by tensor and pooled, keys in units of the update,
    dense tensors, gradients and values of 16 bits, fp32 values, all compressors, buffers that are not fused beside
    fused ones; numbers that are not finite; a rank that fails; notices; a forgotten window; what was sent; which parts
    the kernels serve.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from lightning_safusion.comm.exchange import Notice
from lightning_safusion.fusion.fused import FusedShipment
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.unfused import left_to_torch
from lightning_safusion.sparsify.selection.units import Moment, UpdateUnits
from tests.cluster import Cluster, specs
from tests.kernels.cuda.buffers import in_order
from tests.quick import slow

HOST = torch.device("cpu")
SHAPES = ((30, 20), (40,), (1,), (0,), (20, 25), (3,))
# Beside an empty tensor PyTorch adds on the CPU, and rounds products and sums together.
LONG = ((60, 50), (50, 70))
FULL = tuple(shape for shape in SHAPES if shape != (0,))


@pytest.fixture
def make(make_fused: Callable[..., Cluster]) -> Callable[..., Cluster]:
    return partial(make_fused, tensors=specs(SHAPES), deferred=True, collective="allgather", wire="eliasfano-q4")


def shipments(cluster: Cluster, rank: int = 0) -> list[Shipment]:
    report = cluster.engines[rank].record
    assert report is not None
    return list(report._shipments)


def compare_in(clusters: list[Cluster], dtype: torch.dtype = torch.float32, without: int = -1) -> list[torch.Tensor]:
    """Gives all tensors but one a second moment, by which elements are compared; returns these, to be replaced."""
    generator = torch.Generator().manual_seed(3)
    own = [torch.rand(spec.numel, generator=generator).mul_(1e-3).to(dtype) for spec in clusters[0].specs]
    for cluster in clusters:
        for engine in cluster.engines:
            units = UpdateUnits(lambda index: None if index == without else Moment(own[index], 1e-8), HOST)
            engine.space.compare_in(units)
    return own


def same_numbers(clusters: list[Cluster], steps: int = 3) -> None:
    """Gradients and residuals are equal, bit for bit, in every window."""
    for step in range(steps):
        device, host = (cluster.step(cluster.random_grads(step)) for cluster in clusters)
        for ours, theirs in zip(device, host, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(*(cluster.residuals() for cluster in clusters), strict=True))


MIXED = [*specs(SHAPES, dense=(1,))[:2], *specs(SHAPES, dtype=torch.bfloat16)[2:5], *specs(SHAPES, torch.float16)[5:]]


@pytest.mark.parametrize(
    "options",
    [
        {"tensors": MIXED},
        *slow(
            [
                {"quota": "shared", "density": 0.02, "world_size": 3},
                {"tensors": specs(FULL, dense=(1,)), "quota": "pooled", "memory": "decoupled"},
                {"wire": "auto", "density": 0.05},
                {"wire": "eliasfano-bf16", "tensors": specs(SHAPES, dense=(1, 4))},
                {"wire": "eliasfano-fp16", "quota": "pooled"},
                {
                    "wire": "auto",
                    "tensors": [*specs(LONG)[:1], *specs(LONG, dtype=torch.bfloat16)[1:]],
                    "fusion": "wfbp",
                },
                {"tensors": specs(SHAPES, dtype=torch.float16, dense=(4,))},
            ]
        ),
    ],
)
def test_the_numbers_are_those_of_the_cpu(make: Callable[..., Cluster], options: Any) -> None:
    clusters = [make(**options, deferred=deferred) for deferred in (True, False)]
    with in_order(4):  # of programs; the numbers do not depend on it
        same_numbers(clusters)
    assert all(isinstance(shipment, FusedShipment) for shipment in shipments(clusters[0]))
    for ours, theirs in zip(*(shipments(cluster, 1) for cluster in clusters), strict=True):
        assert ours.sent_counts().tolist() == theirs.sent_counts().tolist()
        for mine, other in zip(ours.sent(), theirs.sent(), strict=True):
            assert torch.equal(mine, other)


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
    make: Callable[..., Cluster], compressor: str, by_update: bool, options: Any
) -> None:
    clusters = [make(compressor=compressor, **options, deferred=deferred) for deferred in (True, False)]
    if by_update:
        compare_in(clusters)
    same_numbers(clusters, 2)
    for ours, theirs in zip(*(shipments(cluster, 1) for cluster in clusters), strict=True):
        assert isinstance(ours, FusedShipment)
        assert ours.sent_counts().tolist() == theirs.sent_counts().tolist()


@pytest.mark.parametrize(
    ("dtype", "without", "options"),
    [
        (torch.bfloat16, 4, {"quota": "pooled"}),
        *slow(
            [
                (torch.float32, -1, {"memory": "decoupled", "tensors": specs(FULL)}),
                (torch.float64, -1, {"tensors": specs(SHAPES, dtype=torch.bfloat16)}),
            ]
        ),
    ],
)
def test_elements_are_compared_in_units_of_the_update(
    make: Callable[..., Cluster], dtype: torch.dtype, without: int, options: Any
) -> None:
    clusters = [make(**options, deferred=deferred) for deferred in (True, False)]
    compare_in(clusters, dtype, without)
    same_numbers(clusters, 2)
    assert all(isinstance(shipment, FusedShipment) for shipment in shipments(clusters[0]))


def test_buffers_that_are_not_fused_are_beside_fused_ones(make: Callable[..., Cluster]) -> None:
    few = specs(((30, 20), (40,), (20, 15)))
    clusters = [make(fusion="wfbp", tensors=few, deferred=deferred) for deferred in (True, False)]
    for cluster in clusters:
        for step in range(3):
            cluster.step(cluster.random_grads(step))
    cluster = clusters[0]
    for engine in cluster.engines:
        own = [engine.space.buffer(group) for group in engine.space.buffers]
        assert len(own) > 2
        own[1]._constants["kernels"] = None
    same_numbers(clusters, 1)
    found = {isinstance(shipment, FusedShipment) for shipment in shipments(cluster)}
    assert found == {True, False}
    grads = cluster.random_grads(9)
    grads[1][2][17] = torch.nan
    before = cluster.residuals()
    cluster.step(grads)
    added = [
        torch.zeros_like(g) if i == 2 and rank else g for rank, mine in enumerate(grads) for i, g in enumerate(mine)
    ]
    for old, new, grad in zip(before, cluster.residuals(), added, strict=True):
        torch.testing.assert_close(new, old + grad.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"wire": "auto", "compressor": "gaussiank", "tensors": MIXED}, []),
        ({"memory": "none"}, ["memory='none'"]),
        ({"wire": "eliasfano-q2"}, ["wire='eliasfano-q2'"]),
        ({"wire": "bitmap-q4"}, ["wire='bitmap-q4'"]),
        ({"scope": "group"}, ["scope='group'"]),
        ({"collective": "sharded", "wire": "q4", "density": 0.3, "tensors": specs(((1200,),))}, []),
        ({"collective": "sharded", "wire": "q4", "compressor": "randomk"}, ["compressor='randomk' with shards"]),
        ({"tensors": specs(FULL, dtype=torch.float64)}, ["gradients in float64"]),
    ],
)
def test_other_parts_are_left_to_torch_and_named(make: Callable[..., Cluster], options: Any, named: list[str]) -> None:
    cluster = make(**options)
    cluster.step(cluster.random_grads(0))
    assert {isinstance(shipment, FusedShipment) for shipment in shipments(cluster)} == {not named}
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
def test_buffers_that_are_left_to_torch_are_named_once(
    make: Callable[..., Cluster], options: Any, unknown: str | None
) -> None:
    cluster, said = make(fusion="wfbp", **options), list[str]()
    assert left_to_torch(cluster.settings[0], cluster.specs, cluster.engines[0].space.collective) == []
    cluster.engines[0].fused.announce = said.append
    for step in range(3):
        cluster.step(cluster.random_grads(step))
    assert [line.partition(":")[0] for line in said] == [f"there are no fused kernels for {unknown}"] * bool(unknown)
    assert all(isinstance(shipment, FusedShipment) for shipment in shipments(cluster)) == (unknown is None)


def test_a_bad_gradient_and_a_notice_are_seen_by_all_ranks_and_poison_nothing(make: Callable[..., Cluster]) -> None:
    cluster = make()
    cluster.engines[0].notices.own = int(Notice.TERMINATE)
    cluster.step(cluster.random_grads(0))
    before, grads = cluster.residuals(), cluster.random_grads(9)
    grads[1][4][17] = torch.nan
    means = cluster.step(grads)
    assert [engine.notices.heard for engine in cluster.engines] == [int(Notice.TERMINATE)] * 2  # a window later
    for rank in range(2):
        assert not torch.isfinite(means[rank][4]).all()
        assert all(torch.isfinite(means[rank][i]).all() for i in range(len(SHAPES)) if i != 4)
    added = [torch.zeros_like(g) if g is grads[1][4] else g for mine in grads for g in mine]
    for old, new, grad in zip(before, cluster.residuals(), added, strict=True):
        torch.testing.assert_close(new, old + grad.double(), rtol=1e-5, atol=1e-5)
    after = cluster.step(cluster.random_grads(10))
    assert all(torch.isfinite(mean).all() for mean in after[0])


def test_a_rank_that_fails_stops_all_one_window_later(make: Callable[..., Cluster]) -> None:
    cluster = make()
    cluster.step(cluster.random_grads(0))
    held = cluster.residuals()

    def unreadable(index: int) -> Moment | None:
        raise ValueError("no state")

    cluster.engines[1].space.selector.units = UpdateUnits(unreadable, HOST)
    grads = cluster.random_grads(2)

    first, second = cluster.errors(grads)
    assert second == ["no state"]
    assert "another rank could not select" in first[0]
    for new, old in zip(cluster.residuals()[len(SHAPES) :], held[len(SHAPES) :], strict=True):
        assert torch.equal(new, old)


def test_a_forgotten_window_says_nothing_later(make: Callable[..., Cluster]) -> None:
    cluster = make()
    grads = cluster.random_grads(2)
    grads[0][0][0] = torch.nan
    cluster.step(grads)
    for engine in cluster.engines:
        engine.reset()
        engine.settle()
    assert torch.isfinite(cluster.step(cluster.random_grads(3))[0][0]).all()
    for engine in cluster.engines:
        drain = engine.fused
        assert drain is not None
        assert int(drain.windows.status) == 0

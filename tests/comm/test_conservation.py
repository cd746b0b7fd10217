"""Collectives of several phases under the whole engine: undelivered entries are in the residual, to the last bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_safusion.comm.catalogue import COLLECTIVES, Collective
from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from tests.cluster import Cluster, assert_conserved, conserved, settings, specs
from tests.comm.exchanges import Build, hierarchical, hierarchical_sharded, oktopk

BUILDS: dict[str, Build | None] = {
    "oktopk": oktopk(refresh=3, repartition=2),
    "oktopk-bf16": oktopk(refresh=3, wire="bf16", balance=1.0),
    "hierarchical": hierarchical(),
    "hierarchical-bf16": hierarchical(wire="bf16"),
    "hierarchical-sharded": hierarchical_sharded(),
    "hierarchical-sharded-q4": hierarchical_sharded(wire="q4"),
    # as they are in the catalogue
    "gtopk": None,
    "sharded": None,
    "hybrid": None,
}


def drift(monkeypatch: pytest.MonkeyPatch, name: str, world_size: int, **options: Any) -> float:
    """Largest share of all gradients of a tensor that was neither delivered nor in the residual, in eight windows."""
    row = COLLECTIVES.get(name)
    if (build := BUILDS[name]) is not None:
        row = Collective(SparseAllGather, lambda buffer, over: build(buffer.spec, over.main))
    monkeypatch.setitem(COLLECTIVES, "tested", row)
    cluster = Cluster(world_size, lambda: settings(collective="tested", density=0.05, **options), specs(dense=(1, 4)))

    def fresh(step: int) -> list[list[bool]]:
        flags = [[True] * len(cluster.specs) for _ in range(world_size)]
        if step == 4:  # one rank has no gradient of a tensor, another none of any
            flags[0][3] = False
            flags[-1] = [False] * len(cluster.specs)
        return flags

    done, given = conserved(cluster, 8, fresh)
    assert any(residual.any() for residual in cluster.residuals())
    cluster.close()
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(done, given, strict=True) if len(b))


@pytest.mark.filterwarnings("ignore:.* tensors .* were computed on some ranks only")
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *((name, 3) for name in BUILDS),
        ("gtopk", 2),
        *(pytest.param(name, 5, marks=pytest.mark.slow) for name in BUILDS),
    ],
)
def test_nothing_is_lost_in_training_but_by_gtopk(monkeypatch: pytest.MonkeyPatch, name: str, world_size: int) -> None:
    lost = drift(monkeypatch, name, world_size)
    if name.startswith("gtopk") and world_size > 2:  # one addition cuts nothing that it has not counted
        assert lost > 1e-2
    else:
        assert lost < 2e-6


@pytest.mark.filterwarnings("ignore:.* tensors .* were computed on some ranks only")
@pytest.mark.parametrize("name", ["oktopk", "hierarchical", "hierarchical-sharded", "sharded"])
def test_nothing_is_lost_with_selection_behind_fusion(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert drift(monkeypatch, name, 3, scope="group") < 2e-6


@pytest.mark.parametrize(("scope", "wire", "density"), [("tensor", "q4", 0.5), ("group", "q4", 0.05)])
@pytest.mark.parametrize("collective", ["allgather", "sharded", "hierarchical", "hierarchical-sharded"])
def test_a_tensor_without_gradients_keeps_its_residual(collective: str, scope: str, wire: str, density: float) -> None:
    # the formats of few bits have no zero, and more is selected than other tensors have
    options = {"collective": collective, "scope": scope, "wire": wire, "density": density}
    cluster = Cluster(3, lambda: settings(fusion="single", **options), nodes=range(3))
    for step in range(2):
        cluster.step(cluster.random_grads(step))
    held = [[cluster.residual(rank, index).clone() for index in (3, 6)] for rank in range(3)]
    assert all(bool(residual.any()) for own in held for residual in own)
    cluster.step(cluster.random_grads(2), [[index not in (3, 6) for index in range(len(cluster.specs))]] * 3)
    for rank, own in enumerate(held):
        for index, residual in zip((3, 6), own, strict=True):
            assert torch.equal(cluster.residual(rank, index), residual)
    cluster.close()


def test_an_empty_tensor_may_be_the_last_of_a_buffer_from_which_one_is_missing() -> None:
    order = [0, 1, 2, 3, 4, 6, 7, 8, 9, 5]
    cluster = Cluster(2, lambda: settings(collective="sharded", fusion="single"), order=order)
    assert cluster.specs[order[-1]].numel == 0
    for step in range(4):
        fresh = [[index != 6 or step != 3 for index in range(len(order))] for _ in range(2)]
        means = cluster.step(cluster.random_grads(step), fresh)
    others = [index for index in range(len(order)) if index != 6]
    assert all(torch.equal(means[0][index], means[1][index]) for index in others)
    cluster.close()


@pytest.mark.filterwarnings("ignore:.* tensors .* were computed on some ranks only")
@pytest.mark.parametrize("collective", ["sharded", "hierarchical-sharded"])
def test_an_owner_that_sends_a_tensor_dense_keeps_no_sums_of_it(collective: str) -> None:
    cluster = Cluster(4, lambda: settings(collective=collective, wire="fp32"), nodes=range(4))

    def unstepped(step: int) -> None:
        if step == 2:  # on one rank alone its optimizer has not stepped
            cluster.engines[0].steps.unstepped[6] = True

    torch.testing.assert_close(*conserved(cluster, 3, unstepped), rtol=1e-5, atol=1e-4)
    cluster.close()


def test_nothing_is_lost_where_the_default_takes_shards() -> None:
    cluster = Cluster(16, lambda: settings(quota="auto", wire="q4", density=0.05))
    assert_conserved(cluster)
    exchanges = [buffer.exchange for buffer in cluster.engines[0].space.buffers.values()]
    assert any(isinstance(exchange, ShardedExchange) for exchange in exchanges)
    cluster.close()

"""What becomes of the default system's parts beside those that a user gives."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_safusion import SAFusionStrategy
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.systems import DEFAULT, SYSTEMS
from tests.cluster import specs


def test_the_default_is_a_row_of_the_table() -> None:
    settings = SAFusionStrategy().settings
    row = SYSTEMS[DEFAULT]
    assert SAFusionStrategy().system == DEFAULT
    parts = settings.scope, settings.quota, settings.wire, settings.memory.name
    assert parts == (row.scope, row.quota, row.wire, row.memory)


@pytest.mark.parametrize(
    ("given", "quota", "wire"),
    [
        ({"scope": "group"}, "proportional", "q4"),
        ({"fusion": "behind"}, "proportional", "q4"),
        ({"offload": True}, "proportional", "q4"),
        ({"offload": False}, "auto", "q4"),
        ({"fusion": "naive"}, "auto", "auto"),
        ({"collective": "oktopk"}, "auto", "auto"),
        ({"collective": "gtopk"}, "auto", "auto"),
        ({"collective": "hierarchical"}, "auto", "q4"),
        ({"collective": "hierarchical-sharded"}, "auto", "q4"),
        ({"collective": "allgather"}, "auto", "q4"),
        ({"collective": "hybrid"}, "auto", "q4"),
        ({"collective": "sharded"}, "auto", "q4"),
        ({"memory": "none"}, "auto", "auto"),
        ({"memory": "ef21"}, "auto", "q4"),
        ({"memory": "none", "wire": "q2"}, "auto", "q2"),
        ({"wire": "bf16"}, "auto", "bf16"),
        ({"quota": "proportional"}, "proportional", "q4"),
    ],
)
def test_the_defaults_parts_give_way_where_they_do_not_fit(given: dict[str, Any], quota: str, wire: str) -> None:
    settings = SAFusionStrategy(**given).settings
    assert (settings.quota, settings.wire) == (quota, wire)


@pytest.mark.parametrize(
    "given",
    [{"scope": "group", "quota": "pooled"}, {"offload": True, "quota": "pooled"}, {"fusion": "naive", "wire": "q4"}],
)
def test_a_part_that_was_given_never_gives_way(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs scope='tensor'|gives every tensor a floor|rounds so much"):
        SAFusionStrategy(**given)


@pytest.mark.parametrize(
    "given",
    [{"quota": "pooled"}, {"offload": True}, {"fusion": "naive"}, {"wire": "coo-bf16"}, {"fusion": "horovod"}],
)
@pytest.mark.parametrize("name", ["sharded", "hierarchical-sharded"])
def test_what_does_not_go_with_shards_is_refused(name: str, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"collective='{name}'|collective='allgather'"):
        SAFusionStrategy(collective=name, **given)


@pytest.mark.parametrize(
    ("workers", "given", "shards"),
    [
        (2, {}, False),
        (15, {}, False),
        (16, {}, True),
        (16, {"compressor": "gaussiank", "density": 0.01, "wire": "bf16", "memory": "residual"}, True),
        (16, {"collective": "sharded"}, True),
        (64, {"collective": "allgather"}, False),
        (64, {"collective": "hierarchical"}, False),
        (64, {"collective": "hierarchical-sharded"}, False),
        (64, {"quota": "pooled"}, False),
        (64, {"memory": "dgc"}, False),
        (64, {"offload": True}, False),
        (64, {"wire": "coo-bf16"}, False),
        (64, {"fusion": "horovod"}, False),
        (64, {"fusion": "naive"}, False),
        (64, {"system": "safusion"}, False),
        (64, {"system": "fgbuff"}, False),
    ],
)
def test_the_default_takes_shards_among_many_workers(workers: int, given: dict[str, Any], shards: bool) -> None:
    collective = SAFusionStrategy(**given).settings.collective_over(workers)
    assert (collective.exchange is ShardedExchange) is shards


@pytest.mark.parametrize(
    ("given", "shards"), [({}, True), ({"quota": "pooled"}, False), ({"collective": "allgather"}, False)]
)
def test_the_default_takes_shards_among_eight_on_slow_links(given: dict[str, Any], shards: bool) -> None:
    settings = SAFusionStrategy(**given).settings
    for gather, slow in ((LinearCost(1e-4, 1e-7), True), (LinearCost(1e-2, 1e-9), False)):
        collective = settings.collective_over(8, gather, 1e5)
        assert (collective.exchange is ShardedExchange) is (shards and slow)


def test_the_default_is_sparse_among_thousands_of_workers() -> None:
    tensors = specs([(1000, 1000)])
    assert SAFusionStrategy(density=0.05).settings.dense_reason(tensors, 4096) is None
    reason = SAFusionStrategy(density=0.6, wire="fp32").settings.dense_reason(tensors, 4096)
    assert "by sparse shards" in reason
    gathered = SAFusionStrategy(density=0.05, quota="pooled").settings.dense_reason(tensors, 4096)
    assert "by sparse all-gather" in gathered


def test_parts_of_other_systems_do_not_give_way() -> None:
    with pytest.raises(ValueError, match="gives every tensor a floor"):
        SAFusionStrategy(system="behind", quota="pooled")
    assert SAFusionStrategy(system="safusion", memory="none").settings.wire == "auto"

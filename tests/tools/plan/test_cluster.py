"""The cost library against the formulas of the literature, written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_safusion.comm.cost import LINKS, Link
from lightning_safusion.tools.plan.cluster import Cluster, CollectiveCost, resolve_link

LINK = Link(alpha=1e-3, beta=1e-9, launch=1e-2)
INSIDE = Link(alpha=1e-5, beta=1e-11, launch=1e-4)
D, S = 4e6, 8e4  # bytes of a dense buffer, and of one worker's sparse message


def flat(workers: int) -> Cluster:
    return Cluster(workers, 1, LINK, INSIDE)


NODES = Cluster(8, 8, LINK, INSIDE)


@pytest.mark.parametrize(("n", "rounds"), [(2, 1), (3, 2), (5, 3), (8, 3), (64, 6)])
def test_collectives_between_single_workers(n: int, rounds: int) -> None:
    cluster = flat(n)
    volume = 2 * (n - 1) / n * D
    assert cluster.allreduce(D).nbytes == pytest.approx(volume)
    assert cluster.allreduce(D).seconds == pytest.approx(1e-2 + 2 * rounds * 1e-3 + volume * 1e-9)
    assert cluster.reduce_scatter(D).seconds == pytest.approx(1e-2 + rounds * 1e-3 + volume / 2 * 1e-9)
    assert cluster.allgather(S).nbytes == pytest.approx((n - 1) * S)
    assert cluster.allgather(S).seconds == pytest.approx(1e-2 + rounds * 1e-3 + (n - 1) * S * 1e-9)
    assert cluster.gtopk(S).nbytes == pytest.approx(2 * rounds * S)
    assert cluster.gtopk(S).seconds == pytest.approx(1e-2 + 2 * rounds * 1e-3 + 2 * rounds * S * 1e-9)
    never = cluster.oktopk(S, refresh_every=10**9)
    assert never.nbytes == pytest.approx(3 * (n - 1) / n * S)
    assert never.seconds == pytest.approx(1e-2 + (2 * n + 2 * rounds) * 1e-3 + never.nbytes * 1e-9)


def test_bytes_that_enter_a_node_at_one_per_cent() -> None:
    # published, per element of the model, at 8 nodes of 8 GPUs and 8 bytes per entry
    elements = 1e6
    message = 0.01 * elements * 8
    assert NODES.allreduce(4 * elements).node_bytes / elements == pytest.approx(7.88, abs=0.01)
    assert NODES.allreduce(2 * elements).node_bytes / elements == pytest.approx(3.94, abs=0.01)
    assert NODES.allgather(message).node_bytes / elements == pytest.approx(4.48)
    assert NODES.hierarchical(message, 2 * elements).node_bytes / elements == pytest.approx(0.56)
    assert NODES.oktopk(message, 10**9).node_bytes / elements == pytest.approx(1.19, abs=0.01)


def test_hierarchical_time_is_that_of_its_three_phases() -> None:
    inside = 2 * 1e-4 + 2 * 7 * 1e-5 + 2 * 7 / 8 * D * 1e-11
    outside = 1e-2 + 3 * 1e-3 + 7 * S * 1e-9
    assert NODES.hierarchical(S, D).seconds == pytest.approx(inside + outside)
    assert flat(8).hierarchical(S, D).seconds == pytest.approx(outside)


@pytest.mark.parametrize(("nodes", "level"), [(4, 1.0), (6, 5 / 6 * 4 / 5), (16, 0.25)])
def test_shards_of_nodes_bring_no_more_from_many(nodes: int, level: float) -> None:
    cluster = Cluster(nodes, 8, LINK, INSIDE)
    gathered, sharded = cluster.hierarchical(S, D), cluster.hierarchical_sharded(S / 2, 7 / 2 * S, D)
    assert sharded.node_bytes == pytest.approx((nodes - 1) / nodes * 4 * S)
    assert sharded.node_bytes == pytest.approx(level * gathered.node_bytes)
    rounds = nodes + (nodes - 1).bit_length()
    inside = 2 * 1e-4 + 2 * 7 * 1e-5 + 2 * 7 / 8 * D * 1e-11
    assert sharded.seconds == pytest.approx(inside + 1e-2 + rounds * 1e-3 + sharded.node_bytes * 1e-9)
    assert sharded.nbytes == pytest.approx(2 * 7 / 8 * D + sharded.node_bytes / 8)


def collectives(cluster: Cluster) -> list[CollectiveCost]:
    one = [cluster.allreduce(D), cluster.reduce_scatter(D), cluster.allgather(S), cluster.gtopk(S), cluster.oktopk(S)]
    return [*one, cluster.sharded(S, S), cluster.hierarchical(S, D), cluster.hierarchical_sharded(S, S, D)]


def test_one_node_uses_its_own_links_and_no_network_card() -> None:
    node = Cluster(1, 8, LINK, INSIDE)
    assert node.allgather(S).seconds == pytest.approx(1e-4 + 3 * 1e-5 + 7 * S * 1e-11)
    assert all(cost.node_bytes == 0 and 0 < cost.seconds < 1e-3 for cost in collectives(node))


def test_one_worker_exchanges_nothing() -> None:
    assert collectives(flat(1)) == [CollectiveCost()] * 8


def test_groups_with_different_shards_share_the_card() -> None:
    group = Cluster(4, 1, LINK, INSIDE, shards=8)
    alone = Cluster(4, 1, replace(LINK, beta=8 * LINK.beta), INSIDE)
    expected = [replace(cost, node_bytes=8 * cost.node_bytes) for cost in collectives(alone)]
    assert collectives(group) == expected


def test_links_by_name_and_by_rate() -> None:
    assert resolve_link("25gbit") is LINKS["25gbit"]
    assert resolve_link("200Gbit") is LINKS["200gbit-rdma"]
    forty = resolve_link("40gbit")
    assert forty.beta == pytest.approx(8 / (40e9 * 0.85))
    assert forty.alpha == LINKS["25gbit"].alpha
    for spelled in ("25Gbps", "25Gbit/s", "25 Gbit/s", "25GBIT", "25 Gbits/s", "25Gb/s"):
        assert resolve_link(spelled) is LINKS["25gbit"]
    assert resolve_link("500mbit").beta == pytest.approx(resolve_link("0.5gbit").beta)


@pytest.mark.parametrize("name", ["fast", "gbit", "-1gbit", "0gbit", "nangbit", "25", "25GB/s", "25GBps"])
def test_other_bandwidths_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="25gbit"):
        resolve_link(name)


@pytest.mark.parametrize(
    "arguments",
    [
        {"nodes": 0},
        {"nodes": 2, "gpus_per_node": 0},
        {"nodes": 2, "shards": 0},
        {"nodes": 2, "jitter": -0.1},
        {"nodes": 2, "seed": -1},
    ],
)
def test_impossible_clusters_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="nodes|shards|jitter|seed"):
        Cluster(**arguments)

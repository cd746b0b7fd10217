"""The two levels against their definition, and the bytes that cross a node's network card."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_safusion import SAFusionStrategy
from lightning_safusion.comm.exchange import Part, SpanSpec, aligned, padded
from lightning_safusion.sparsify.base import Segments, Selection, span_segments
from lightning_safusion.sparsify.basic import TopK
from lightning_safusion.sparsify.selection.units import Moment, SpanUnits
from tests.cluster import Cluster, assert_conserved, settings
from tests.comm.exchanges import CLUSTERS, Workers, conserved, gradients, hierarchical, nodes_in, same, span
from tests.process_group import run_ranks
from tests.resume import At, InGroup, run
from tests.sparsify.oracle import cut

UNEVEN = [0, 1, 0, 1, 1]


def expected(xs: list[Tensor], cluster: list[int], segments: Segments) -> tuple[Tensor, list[Tensor]]:
    """Sum over all nodes of the largest sums of each segment in each shard; and the positions of every node."""
    numel, width = segments.numel, min(map(len, nodes_in(cluster)))
    bounds = [numel * shard // width for shard in range(width + 1)]
    total, positions = torch.zeros(numel), []
    for node in nodes_in(cluster):
        node_sum = torch.stack([xs[rank] for rank in node]).sum(0)
        chosen = torch.zeros(numel, dtype=torch.bool)
        for (low, high), quota in zip(pairwise(segments.edges.tolist()), segments.quotas.tolist(), strict=True):
            for start, stop in pairwise(np.clip(bounds, low, high).tolist()):
                room = min(stop - start, -(-quota * (stop - start) // (high - low)))
                order = node_sum[start:stop].abs().argsort(descending=True, stable=True)[:room]
                chosen[start + order] = True
        total += torch.where(chosen, node_sum, 0.0)
        positions.append(chosen)
    return total, positions


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_equals_the_definition(cluster: list[int]) -> None:
    n = len(cluster)
    for numel, capacity in [(2000, 50), (2000, 1), (3, 2), (1, 1)]:
        workers = Workers(n, span(numel, capacity), hierarchical(cluster))
        for step in range(2):
            xs = gradients(n, numel, seed=step)
            results = workers.step(xs)
            total, positions = expected(xs, cluster, span_segments(numel, capacity))
            assert same(results)
            torch.testing.assert_close(results[0].mean * n, total, atol=1e-4, rtol=1e-5)
            assert conserved(results)
            for chosen, node in zip(positions, nodes_in(cluster), strict=True):
                for rank in node:
                    torch.testing.assert_close(results[rank].sent, torch.where(chosen, xs[rank], 0.0))


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_bytes_are_those_of_the_formulas(cluster: list[int]) -> None:
    n, numel, capacity = len(cluster), 3600, 96
    nodes = nodes_in(cluster)
    width = min(map(len, nodes))
    workers = Workers(n, span(numel, capacity), hierarchical(cluster, wire="coo-bf16"))
    workers.step(gradients(n, numel))
    shard, message = padded(numel // width, torch.bfloat16), aligned(4 + 6 * capacity // width)
    for node in nodes:
        into_node = sum(workers.exchanges[rank].transports.between.bytes_received for rank in node)
        assert into_node == (len(nodes) - 1) * width * message  # (nodes - 1) * S, whatever the workers of the node
        for place, rank in enumerate(node):
            exchange = workers.exchanges[rank]
            owns = place < width
            scattered = (len(node) - 1) * shard * 2 if owns else 0
            between = (len(nodes) - 1) * message if owns else 0
            gathered = (width - owns) * len(nodes) * message
            assert exchange.bytes_received == exchange.lane.bytes_received + scattered + between + gathered
            assert exchange.transports.inside.bytes_received == scattered + gathered


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_every_segment_has_its_quota_of_the_sums_of_a_node(cluster: list[int]) -> None:
    segments = cut([700, 3, 1297], [30, 1, 0])
    spec = SpanSpec(2000, segments.capacity, (0, 700, 703, 2000), ((703, 2000, torch.float32),))
    workers = Workers(len(cluster), spec, hierarchical(cluster, segments=segments))
    xs = gradients(len(cluster), 2000)
    results, (total, _) = workers.step(xs), expected(xs, cluster, segments)
    torch.testing.assert_close(results[0].mean[:703] * len(cluster), total[:703], atol=1e-4, rtol=1e-5)
    assert same(results)
    assert conserved(results)


def test_elements_are_compared_in_the_units_of_the_update() -> None:
    cluster = [0, 0, 1, 1, 1]
    workers = Workers(5, span(2000, 50), hierarchical(cluster))
    xs = gradients(5, 2000)
    moment = Moment(torch.rand(2000, generator=torch.Generator().manual_seed(0)) ** 8, 1e-6)
    flags = torch.ones(1, dtype=torch.uint8)
    parts = [Part(None, flags, units=SpanUnits([moment], (0, 2000), torch.zeros(2000))) for _ in xs]
    results = workers.step(xs, parts)
    keys = [x / (moment.values.sqrt() + moment.epsilon) for x in xs]
    _, by_update = expected(keys, cluster, span_segments(2000, 50))
    total = torch.zeros(2000)
    for node, chosen in zip(nodes_in(cluster), by_update, strict=True):
        total += torch.where(chosen, torch.stack([xs[rank] for rank in node]).sum(0), 0.0)
    torch.testing.assert_close(results[0].mean * 5, total, atol=1e-4, rtol=1e-5)
    assert same(results)
    assert conserved(results)


class _Unused(TopK):
    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:
        raise AssertionError("a selection that nobody sends")


@pytest.mark.parametrize(
    ("collective", "options", "nodes"),
    [
        ("hierarchical", {}, UNEVEN),
        ("hierarchical", {"quota": "pooled"}, UNEVEN),
        ("hierarchical", {"scope": "group"}, UNEVEN),
        ("hierarchical-sharded", {"wire": "q4"}, UNEVEN),
        ("hierarchical-sharded", {"wire": "fp32", "scope": "group"}, UNEVEN),
        ("hierarchical-sharded", {"wire": "q4", "scope": "group"}, [0, 0, 0]),
        ("hierarchical-sharded", {"wire": "fp32"}, [0, 1, 2]),
    ],
)
def test_under_the_engine_nobody_selects_from_a_part(collective: str, options: Any, nodes: list[int]) -> None:
    cluster = Cluster(len(nodes), lambda: settings(collective=collective, **options), nodes=nodes)
    for engine in cluster.engines:
        engine.space.selector.sparsifier = _Unused()
    assert_conserved(cluster, steps=4)
    assert cluster.engines[0].record is not None
    figures = cluster.engines[0].record.as_dict()
    assert 0.01 < figures["achieved_density"] < 0.25
    if collective == "hierarchical" and "scope" not in options:
        assert figures["tensors_missing"] == 0
    cluster.close()


class Nodes(InGroup):
    """Three machines, the last two processes on one of them."""

    def node_rank(self) -> int:
        return [0, 1, 1][self.global_rank()]


def layout_of_job(rank: int) -> Any:
    strategy: Any = SAFusionStrategy(
        collective="hierarchical", cluster_environment=Nodes(), process_group_backend="gloo", density=0.1
    )
    found: list[Any] = []

    def note(trainer: Trainer) -> None:
        found.extend(buffer.exchange.transports.nodes for buffer in strategy.engine.space.buffers.values())

    run(strategy, 6, At(3, note))
    return found[0]


@pytest.mark.slow
def test_nodes_are_those_of_the_job() -> None:
    assert run_ranks(3, layout_of_job) == [((0,), (1, 2))] * 3


@pytest.mark.parametrize("collective", ["hierarchical", "hierarchical-sharded"])
def test_what_does_not_go_together_is_refused(collective: str) -> None:
    with pytest.raises(ValueError, match="needs compressor='topk' .* got compressor='gaussiank'"):
        SAFusionStrategy(collective=collective, compressor="gaussiank")
    with pytest.raises(ValueError, match="fusion='naive' fills buffers .* a collective other than"):
        SAFusionStrategy(collective=collective, fusion="naive")

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
from lightning_safusion.comm import SoloTransport
from lightning_safusion.comm.collectives.hierarchical import HierarchicalExchange
from lightning_safusion.comm.collectives.nodes import NodeTransports
from lightning_safusion.comm.exchange import Part, SpanSpec, aligned, padded
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.basic import TopK
from lightning_safusion.sparsify.selection.units import Moment, SpanUnits
from tests.cluster import Cluster, settings
from tests.comm.exchanges import (
    CPU,
    Received,
    Workers,
    conserved,
    gradients,
    hierarchical,
    nodes_in,
    part_of,
    same,
    span,
    through,
)
from tests.process_group import run_ranks
from tests.resume import At, InGroup, parameters, run

#: Node of every rank.
CLUSTERS: list[list[int]] = [
    [0, 0],
    [0, 1],
    [0, 0, 1],
    [1, 0, 1, 0, 0],
    [0, 1, 1, 0, 2, 2, 2, 3],
]


def expected(xs: list[Tensor], cluster: list[int], capacity: int) -> tuple[Tensor, list[Tensor]]:
    """Sum over all nodes of the largest sums in each shard of a node; and the positions of every node."""
    width = min(map(len, nodes_in(cluster)))
    numel = len(xs[0])
    total, positions = torch.zeros(numel), []
    for node in nodes_in(cluster):
        node_sum = torch.stack([xs[rank] for rank in node]).sum(0)
        chosen = torch.zeros(numel, dtype=torch.bool)
        for shard in range(width):
            low, high = numel * shard // width, numel * (shard + 1) // width
            room = min(high - low, -(-capacity * (high - low) // numel))
            order = node_sum[low:high].abs().argsort(descending=True, stable=True)[:room]
            chosen[low + order] = True
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
            total, positions = expected(xs, cluster, capacity)
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


@pytest.mark.parametrize("wire", ["auto", "fp16", "q4"])
def test_rounding_stays_with_the_senders(wire: str) -> None:
    cluster = [0, 1, 0, 1, 1]
    workers = Workers(5, span(1000, 40), hierarchical(cluster, wire=wire))
    for step in range(3):
        assert conserved(workers.step([1e3 * x for x in gradients(5, 1000, seed=step)]))


def test_what_does_not_fit_inside_stays_with_the_sender() -> None:
    workers = Workers(2, span(4, 4), hierarchical([0, 0], wire="fp16"))
    xs = [torch.tensor([1e6, 0.0, 0.0, 0.0]), torch.tensor([0.0, 2.0, 0.0, 0.0])]
    results = workers.step(xs)
    assert results[0].sent.tolist() == [65504.0, 0.0, 0.0, 0.0]
    assert results[1].sent.tolist() == [0.0, 2.0, 0.0, 0.0]
    assert (results[0].mean * 2).tolist() == [65504.0, 2.0, 0.0, 0.0]


def test_a_tensor_of_which_a_rank_sends_nothing_is_not_charged_to_it() -> None:
    spec = span(600, 60, dense=(0, 0))
    spec = type(spec)(600, 60, (0, 300, 600), ())
    workers = Workers(2, spec, hierarchical([0, 0], wire="bf16"))
    xs = gradients(2, 600)
    parts = [part_of(xs[0], spec), part_of(xs[1], spec)]
    for absent in range(2):
        parts[1] = Part(parts[1].selection, parts[1].flags, (absent,))
        results = workers.step(xs, parts)
        quiet, loud = (slice(0, 300), slice(300, 600)) if absent == 0 else (slice(300, 600), slice(0, 300))
        assert not results[1].sent[quiet].any()
        assert results[1].sent[loud].any()
        assert results[0].sent[quiet].any()


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_every_segment_has_its_quota_of_the_sums_of_a_node(cluster: list[int]) -> None:
    segments = Segments(np.array([0, 700, 703, 2000]), np.array([30, 1, 0]), (0, 1, 2), ((700,), (3,), (1297,)))
    spec = SpanSpec(2000, segments.capacity, (0, 700, 703, 2000), ((703, 2000, torch.float32),))
    workers = Workers(len(cluster), spec, hierarchical(cluster, segments=segments))
    xs = gradients(len(cluster), 2000)
    total = torch.zeros(703)
    nodes = nodes_in(cluster)
    width = min(map(len, nodes))
    for node in nodes:
        node_sum = torch.stack([xs[rank] for rank in node]).sum(0)
        for low, high, quota in [(0, 700, 30), (700, 703, 1)]:
            edges = [min(max(2000 * shard // width, low), high) for shard in range(width + 1)]
            for start, stop in pairwise(edges):
                room = min(stop - start, -(-quota * (stop - start) // (high - low)))
                chosen = start + node_sum[start:stop].abs().argsort(descending=True, stable=True)[:room]
                total[chosen] += node_sum[chosen]
    results = workers.step(xs)
    torch.testing.assert_close(results[0].mean[:703] * len(cluster), total, atol=1e-4, rtol=1e-5)
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
    _, by_update = expected(keys, cluster, 50)
    total = torch.zeros(2000)
    for node, chosen in zip(nodes_in(cluster), by_update, strict=True):
        total += torch.where(chosen, torch.stack([xs[rank] for rank in node]).sum(0), 0.0)
    torch.testing.assert_close(results[0].mean * 5, total, atol=1e-4, rtol=1e-5)
    assert same(results)
    assert conserved(results)


@pytest.mark.parametrize(
    ("scope", "quota"), [("tensor", "proportional"), ("tensor", "pooled"), ("group", "proportional")]
)
def test_under_the_engine_nobody_selects_from_a_part(scope: Any, quota: Any) -> None:
    nodes = [0, 1, 0, 1, 1]
    cluster = Cluster(5, lambda: settings(collective="hierarchical", scope=scope, quota=quota), nodes=nodes)
    for engine in cluster.engines:
        engine.space.selector.sparsifier = _Unused()
    given = [torch.zeros(spec.numel, dtype=torch.float64) for spec in cluster.specs]
    delivered = [torch.zeros_like(total) for total in given]
    for step in range(4):
        grads = cluster.random_grads(step)
        means = cluster.step(grads)
        for index in range(len(given)):
            given[index] += sum(mine[index].double() for mine in grads)
            assert all(torch.equal(means[0][index], other[index]) for other in means[1:])
            delivered[index] += 5 * means[0][index].double()
            if scope == "tensor" and len(given[index]):
                assert means[0][index].any()
    for index, total in enumerate(given):
        held = sum(cluster.residual(rank, index) for rank in range(5))
        torch.testing.assert_close(delivered[index] + held, total, rtol=1e-5, atol=1e-4)
    report = cluster.engines[0].record
    assert report is not None
    figures = report.as_dict()
    assert figures["achieved_density"] > 0.01
    assert scope == "group" or figures["tensors_missing"] == 0
    cluster.close()


class _Unused(TopK):
    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:
        raise AssertionError("a selection that nobody sends")


class Nodes(InGroup):
    """Three machines, the last two processes on one of them."""

    def node_rank(self) -> int:
        return [0, 1, 1][self.global_rank()]


def train(rank: int, collective: str) -> tuple[Any, list[Tensor], int]:
    strategy = SAFusionStrategy(
        collective=collective, cluster_environment=Nodes(), process_group_backend="gloo", density=0.1
    )
    layout: list[Any] = []
    job = run(strategy, 6, At(3, lambda trainer: layout.append(nodes_of_strategy(trainer))))
    return layout[0], parameters(job), strategy.figures()["windows"]


def nodes_of_strategy(trainer: Trainer) -> Any:
    strategy: Any = trainer.strategy
    (exchange, *_) = (buffer.exchange for buffer in strategy.engine.space.buffers.values())
    return exchange.transports.nodes


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["hierarchical", "hierarchical-sharded"])
def test_nodes_are_those_of_the_job(collective: str) -> None:
    results = run_ranks(3, train, collective)
    assert [nodes for nodes, _, _ in results] == [((0,), (1, 2))] * 3
    assert [windows for _, _, windows in results] == [6] * 3
    for _, weights, _ in results[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(weights, results[0][1], strict=True))


@pytest.mark.parametrize("collective", ["hierarchical", "hierarchical-sharded"])
def test_what_does_not_go_together_is_refused(collective: str) -> None:
    with pytest.raises(ValueError, match="needs compressor='topk' .* got compressor='gaussiank'"):
        SAFusionStrategy(collective=collective, compressor="gaussiank")
    with pytest.raises(ValueError, match="fusion='naive' fills buffers .* a collective other than"):
        SAFusionStrategy(collective=collective, fusion="naive")


def test_a_single_worker() -> None:
    transports = NodeTransports.make(SoloTransport(), "here")
    exchange = HierarchicalExchange(span(10, 2), transports, CPU, "auto", torch.float32, None)
    x = torch.arange(10.0)
    result: Received = through(exchange, x)
    assert result.mean.nonzero().view(-1).tolist() == [8, 9]
    assert torch.equal(result.mean, result.sent)


def test_values_inside_are_those_of_the_wire() -> None:
    sent = {}
    for wire in ("auto", "bf16"):
        workers = Workers(2, span(1000, 10), hierarchical([0, 0], wire=wire))
        assert conserved(workers.step(gradients(2, 1000)))
        sent[wire] = workers.exchanges[0].transports.inside.bytes_received
    assert 1000 <= sent["auto"] - sent["bf16"] < 1100  # 500 elements, and what is smaller of ten entries

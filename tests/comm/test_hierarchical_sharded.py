"""Shards of nodes: what :class:`ShardedExchange` would do with the sums of nodes, and no more bytes from many nodes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion.comm.buffer import Communicators, SparseBuffer
from lightning_safusion.comm.collectives.hierarchical import shard_of
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.exchange import Exchange, Part, SpanSpec
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.comm.transport.torch_backend import SoloTransport
from lightning_safusion.comm.wire.formats import message_bytes
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.basic import TopK
from lightning_safusion.sparsify.selection.survey import History, Selector
from lightning_safusion.sparsify.selection.units import Moment, SpanUnits
from tests.comm.exchanges import (
    CLUSTERS,
    CPU,
    Build,
    Workers,
    conserved,
    gradients,
    hierarchical,
    hierarchical_sharded,
    nodes_in,
    part_of,
    same,
    span,
    through,
)
from tests.sparsify import oracle

SIZES = (700, 1, 0, 300, 999)


def segments_of(density: float) -> Segments:
    """Five tensors, of which one is empty, and one is dense."""
    return oracle.cut(SIZES, [max(1, int(size * density)) if size not in (0, 300) else 0 for size in SIZES])


def spec_of(segments: Segments) -> SpanSpec:
    edges = tuple(segments.edges.tolist())
    return SpanSpec(edges[-1], segments.capacity, edges, ((edges[3], edges[4], torch.float32),))


def units_of(spec: SpanSpec) -> SpanUnits:
    """Second moments of all tensors but one."""
    generator = torch.Generator().manual_seed(7)
    moments = [Moment(torch.rand(high - low, generator=generator) ** 8, 1e-6) for low, high in pairwise(spec.edges)]
    return SpanUnits([None, *moments[1:]], spec.edges, torch.zeros(spec.numel))


def flat(segments: Segments, wire: str) -> Build:
    """What a rail is to do with the sums of a shard."""

    def build(spec: SpanSpec, transport: Transport) -> Exchange:
        over = Communicators(transport, transport.subgroup(), None)
        return ShardedExchange(SparseBuffer(spec, CPU, wire, torch.float32, segments), over)

    return build


def selected(x: Tensor, cut: Segments | None, units: SpanUnits | None) -> Selection:
    assert cut is not None
    return Selector(TopK()).select(x, History(cut), 0, units=units)


@pytest.mark.parametrize(("wire", "by_update"), [("auto", True), ("q4", False)])
@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_nodes_do_what_single_workers_would_do_with_their_sums(cluster: list[int], by_update: bool, wire: str) -> None:
    n, nodes, segments = len(cluster), nodes_in(cluster), segments_of(0.05)
    spec, width = spec_of(segments), min(map(len, nodes))
    workers = Workers(n, spec, hierarchical_sharded(cluster, wire, segments))
    edges = [spec.numel * shard // width for shard in range(width + 1)]
    cuts = [shard_of(segments, low, high) for low, high in pairwise(edges)]
    rails = [sorted(node[place] for node in nodes) for place in range(width)]
    alone = [
        Workers(len(nodes), SpanSpec(cut.numel, cut.capacity, (0, cut.numel), ()), flat(cut, wire)) for cut in cuts
    ]
    flags = torch.ones(spec.num_tensors, dtype=torch.uint8)
    for step in range(2):
        xs = gradients(n, spec.numel, seed=step)
        units = [units_of(spec) if by_update else None for _ in xs]
        results = workers.step(xs, [Part(None, flags, units=own) for own in units])
        assert same(results)
        assert conserved(results)
        for low, high, rail, team in zip(edges, edges[1:], rails, alone, strict=False):
            members = [next(node for node in nodes if rank in node) for rank in rail]
            # added one after the other, as the exchange does: few bits are the same then
            sums = [sum((xs[rank] for rank in node), torch.zeros(spec.numel))[low:high] for node in members]
            weights = [units_of(spec).within([(low, high)]) if by_update else None for _ in sums]
            parts = [
                Part(selected(x, exchange.segments, own), flags[:1], units=own)
                for x, exchange, own in zip(sums, team.exchanges, weights, strict=True)
            ]
            expected = team.step(sums, parts)
            sparse = torch.ones(high - low, dtype=torch.bool)
            sparse[max(0, 701 - low) : max(0, 1001 - low)] = False  # the dense tensor
            mean = results[0].mean[low:high][sparse] * n
            torch.testing.assert_close(mean, expected[0].mean[sparse] * len(nodes), atol=1e-4, rtol=1e-5)
            for node, theirs in zip(members, expected, strict=True):
                taken = torch.stack([results[rank].sent for rank in node]).sum(0)[low:high][sparse]
                torch.testing.assert_close(taken, theirs.sent[sparse], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_all_members_of_a_node_know_what_it_has_sent(cluster: list[int]) -> None:
    n, nodes = len(cluster), nodes_in(cluster)
    workers = Workers(n, span(4000, 200), hierarchical_sharded(cluster))
    xs = gradients(n, 4000)
    results = workers.step(xs)
    for node in nodes:
        chosen = [workers.exchanges[rank].chosen() for rank in node]
        assert all(torch.equal(each, chosen[0]) for each in chosen)
        assert bool((chosen[0].diff() > 0).all())
        # half a quota to other owners, at most, and its share of what owners deliver
        assert 0.4 * 200 / n < len(chosen[0]) <= 1.1 * 200 * (0.5 + 3.5 / len(nodes))
        for place, rank in enumerate(node):
            mine = torch.zeros(4000)
            mine[chosen[0]] = xs[rank][chosen[0]]
            width = min(map(len, nodes))
            owned = slice(4000 * place // width, 4000 * (place + 1) // width) if place < width else slice(0, 0)
            mine[owned] = results[rank].sent[owned]  # and what its owner has not delivered
            assert torch.equal(results[rank].sent, mine)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_many_nodes_receive_no_more_than_few(nodes: int) -> None:
    cluster = [node for node in range(nodes) for _ in range(2)]
    numel, capacity = 40_000, 2000
    workers = Workers(len(cluster), span(numel, capacity), hierarchical_sharded(cluster, wire="bf16"))
    workers.step(gradients(len(cluster), numel))
    message = message_bytes("eliasfano-bf16", numel, capacity)
    for node in nodes_in(cluster):
        received = sum(workers.exchanges[rank].transports.between.bytes_received for rank in node)
        assert received == pytest.approx(4 * (nodes - 1) / nodes * message, rel=0.15)
        for rank in node:
            exchange = workers.exchanges[rank]
            inside, between = exchange.transports.inside, exchange.transports.between
            counted = exchange.lane.bytes_received + inside.bytes_received + between.bytes_received
            assert exchange.bytes_received == counted


@pytest.mark.parametrize("kind", [hierarchical, hierarchical_sharded])
@pytest.mark.parametrize("wire", ["auto", "fp16", "q4"])
def test_rounding_and_what_does_not_fit_stay_in_the_node(kind: Callable[..., Build], wire: str) -> None:
    for numel, scale in ((1000, 1e3), (40, 1e5)):
        workers = Workers(5, span(numel, 40), kind([0, 1, 0, 1, 1], wire=wire))
        for step in range(3):
            results = workers.step([scale * x for x in gradients(5, numel, seed=step)])
            assert same(results)
            assert conserved(results)
            assert results[0].finite


@pytest.mark.parametrize("kind", [hierarchical, hierarchical_sharded])
def test_a_tensor_of_which_a_rank_sends_nothing_is_not_charged_to_it(kind: Callable[..., Build]) -> None:
    spec = SpanSpec(600, 60, (0, 300, 600), ())
    workers = Workers(4, spec, kind([0, 0, 1, 1], wire="bf16"))
    xs = gradients(4, 600)
    parts = [part_of(x, spec) for x in xs]
    tensors = slice(0, 300), slice(300, 600)
    for absent in range(2):
        for rank in range(4):
            each = [Part(None, part.flags, (absent,) if place == rank else ()) for place, part in enumerate(parts)]
            results = workers.step(xs, each)
            assert not results[rank].sent[tensors[absent]].any()
            assert results[rank].sent[tensors[1 - absent]].any()
            assert same(results)
        results = workers.step(xs, [Part(None, part.flags, (absent,)) for part in parts])
        assert not results[0].mean[tensors[absent]].any()
        assert conserved(results)


@pytest.mark.parametrize(("kind", "delivered"), [(hierarchical, 2), (hierarchical_sharded, 7)])
def test_a_single_worker(kind: Callable[..., Build], delivered: int) -> None:
    result = through(kind()(span(10, 2), SoloTransport()), torch.arange(10.0))
    assert result.mean.nonzero().view(-1).tolist() == [*range(10)][-delivered:]  # three and a half quotas of owners
    assert torch.equal(result.mean, result.sent)


def test_segments_that_compete_are_refused() -> None:
    pooled = Segments(np.array([0, 10]), np.array([2]), (0,), ((10,),), pool=3)
    with pytest.raises(ValueError, match="no quota='pooled'"):
        hierarchical_sharded(segments=pooled)(span(10, 2), SoloTransport())

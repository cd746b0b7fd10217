"""Exchanges of one span on virtual workers, without a generator: what goes in is given, what comes out is returned."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.virtual.transport import LocalTransport, local_transports
from lightning_safusion.comm.catalogue import COLLECTIVES, Communicators, SparseBuffer
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.exchange import Exchange, Notice, Part, SpanSpec, TensorFlag, Verdict
from lightning_safusion.comm.transport.interface import Transport, Work
from lightning_safusion.kernels.fields import MESSAGE_BYTES
from lightning_safusion.sparsify.base import Segments, Selection, span_segments
from lightning_safusion.sparsify.basic import TopK

CPU = torch.device("cpu")
Build = Callable[[SpanSpec, Transport], Exchange]
#: Node of every rank.
CLUSTERS = [[0], [0, 0, 0], [0, 1], [0, 0, 1], [1, 0, 1, 0, 0], [0, 1, 2], [0, 1, 1, 0, 2, 2, 2, 3]]


class InLines(LocalTransport):
    """A virtual worker that refuses messages that do not begin where devices and their libraries read best.

    Whole numbers that ranks agree on are let through.
    """

    def _launch(self, call: Any, value: Any, output: Tensor, sent: float, received: float) -> Any:
        pieces, sizes = value if isinstance(value, tuple) else ([value], [output.numel()])
        numbers = [output.storage_offset(), *sizes]
        for piece in pieces:
            numbers += [piece.storage_offset(), piece.numel()]
        inside = any(number * output.itemsize % MESSAGE_BYTES for number in numbers)
        assert not inside or output.dtype == torch.int64, f"{call} begins or ends inside of a line"
        return super()._launch(call, value, output, sent, received)

    def split(self, groups: Sequence[Sequence[int]]) -> LocalTransport:
        made = super().split(groups)
        return InLines(made.rank, made._exchange)


def in_lines(world_size: int) -> list[InLines]:
    return [InLines(each.rank, each._exchange) for each in local_transports(world_size, timeout=20.0)]


def in_threads(transports: Sequence[Any], fn: Callable[[Any], Any]) -> list[Any]:
    """Calls it with each of them, at once."""
    with ThreadPoolExecutor(len(transports)) as pool:
        return list(pool.map(fn, transports))


def released(tensor: weakref.ref[Tensor]) -> bool:
    """Whether nothing keeps it; a library's thread may take a moment longer than a work's end to let it go."""
    deadline = time.monotonic() + 10
    while tensor() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.001)
    return tensor() is None


def span(numel: int, capacity: int, dense: tuple[int, int] | None = None) -> SpanSpec:
    """A span of one tensor; or of three, the middle one of which is dense."""
    if dense is None:
        return SpanSpec(numel, capacity, (0, numel), ())
    return SpanSpec(numel, capacity, (0, *dense, numel), ((*dense, torch.float32),))


def nodes_of(world_size: int) -> list[int]:
    """Node of every rank: unequal nodes where the ranks do not divide, and ranks of a node not next to each other."""
    return [rank % max(1, world_size // 2) for rank in range(world_size)]


def nodes_in(cluster: Sequence[int]) -> list[list[int]]:
    """Ranks of every node, from the node of every rank."""
    return [[rank for rank, node in enumerate(cluster) if node == name] for name in dict.fromkeys(cluster)]


def built(
    name: str, nodes: Sequence[int] | None = None, wire: str = "auto", segments: Segments | None = None, **options: Any
) -> Build:
    """A collective of the catalogue, with other numbers; None: nodes as :func:`nodes_of` has them."""
    row = COLLECTIVES[name]

    def build(spec: SpanSpec, transport: Transport) -> Exchange:
        names = nodes_of(transport.world_size) if nodes is None else nodes
        over = row.connect(transport, names[transport.rank])
        exchange = row.build(SparseBuffer(spec, CPU, wire, torch.float32, segments), over)
        for option, value in options.items():
            setattr(exchange, option, value)
        return exchange

    return build


allgather, hybrid, oktopk, gtopk = (partial(built, name) for name in ("allgather", "hybrid", "oktopk", "gtopk"))
hierarchical, hierarchical_sharded = (partial(built, name) for name in ("hierarchical", "hierarchical-sharded"))


def sharded(wire: str = "auto", **shares: float) -> Build:
    """With other shares ``scattered`` and ``gathered``."""
    kind = type("Sharded", (ShardedExchange,), shares)

    def build(spec: SpanSpec, transport: Transport) -> Exchange:
        segments = None
        if spec.capacity:
            sizes = np.diff(spec.edges)
            sizes[spec.dense_tensors] = 0
            quotas, shapes = -(-sizes * spec.capacity // sizes.sum()), tuple((size,) for size in sizes.tolist())
            segments = Segments(np.array(spec.edges), quotas, tuple(range(len(sizes))), shapes)
        over = Communicators(transport, transport.subgroup(), None)
        return kind(SparseBuffer(spec, CPU, wire, torch.float32, segments), over)

    return build


@dataclass
class Received:
    """What one rank got out of an exchange.

    Attributes:
        mean: float32 [N].
        sent: float32 [N], what it takes out of its residual.
        verdict: What all ranks said.
        finite: Whether the mean is.
    """

    mean: Tensor
    sent: Tensor
    verdict: Verdict
    finite: bool


def part_of(x: Tensor, spec: SpanSpec, flag: int = TensorFlag.FRESH, notices: int = 0) -> Part:
    """The exact top-k of the tensors that are not dense."""
    sparse = x.clone()
    for start, stop, _ in spec.dense_runs:
        sparse[start:stop] = 0
    selection = TopK().select(sparse, span_segments(spec.numel, spec.capacity), 0) if spec.capacity else None
    if selection is not None and spec.dense_runs:
        kept = (selection.values != 0).nonzero().view(-1)
        selection = Selection(selection.indices[kept], selection.values[kept], len(kept))
    return Part(selection, torch.full((spec.num_tensors,), int(flag), dtype=torch.uint8), (), notices)


def failed_part(spec: SpanSpec) -> Part:
    """What a rank sends that could not select."""
    return Part(None, torch.zeros(spec.num_tensors, dtype=torch.uint8), range(spec.num_tensors), int(Notice.FAILED))


def through(exchange: Exchange, x: Tensor, part: Part | None = None) -> Received:
    """One exchange, from residual plus gradient to the mean."""
    exchange.encode(x, part if part is not None else part_of(x, exchange.spec))
    return end(exchange, exchange.start(), x)


def end(exchange: Exchange, work: Work, x: Tensor) -> Received:
    """The end of an exchange that has been started."""
    work.wait()
    work.wait()  # a second time does no harm
    scratch = torch.zeros(exchange.spec.numel)
    mean = exchange.decode(scratch)
    finite = exchange.is_finite(mean)
    verdict = exchange.verdict()
    indices, values = exchange.sent()
    assert len(indices.unique()) == len(indices)
    sent = torch.zeros(exchange.spec.numel)
    sent[indices] = values
    for start, stop, _ in exchange.spec.dense_runs:
        sent[start:stop] += exchange.sent_dense(start, stop, x)
    result = Received(mean.clone(), sent, verdict, finite)
    exchange.release(scratch)
    assert not scratch.any()
    return result


class Workers:
    """``world_size`` virtual workers with an exchange each."""

    def __init__(self, world_size: int, spec: SpanSpec, build: Build) -> None:
        self.spec = spec
        self.transports = in_lines(world_size)
        self.exchanges: list[Any] = self.each(lambda rank: build(spec, self.transports[rank]))

    def each(self, fn: Callable[[int], Any]) -> list[Any]:
        return in_threads(range(len(self.transports)), fn)

    def step(self, xs: Sequence[Tensor], parts: Sequence[Part] | None = None) -> list[Received]:
        """One exchange on all workers."""
        chosen = parts if parts is not None else [part_of(x, self.spec) for x in xs]
        return self.each(lambda rank: through(self.exchanges[rank], xs[rank], chosen[rank]))


def gradients(world_size: int, numel: int, seed: int = 0) -> list[Tensor]:
    """Heavy-tailed, and alike on all ranks in part, as real ones are."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(numel, generator=generator) ** 3
    return [common + torch.randn(numel, generator=generator) ** 3 for _ in range(world_size)]


def same(results: Sequence[Received]) -> bool:
    """Whether all ranks got the same bits."""
    return all(torch.equal(results[0].mean, other.mean) for other in results)


def lost(results: Sequence[Received]) -> float:
    """Largest difference between what ranks take out of their residuals and what was delivered."""
    delivered = results[0].mean.double() * len(results)
    taken = torch.stack([result.sent for result in results]).double().sum(0)
    return float((delivered - taken).abs().max()) if len(delivered) else 0.0


def conserved(results: Sequence[Received]) -> bool:
    """Whether nothing is lost but the last bits of sums."""
    largest = max((float(result.sent.abs().max()) for result in results if len(result.sent)), default=0.0)
    return lost(results) <= 1e-6 * len(results) * largest

"""Two levels: dense inside a node; between nodes sparse, to all of them or to owners of shards.

Dense inside and sparse between: e.g. Lin et al., Deep Gradient Compression, ICLR 2018. Owners between nodes: many nodes
cost no more than few.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.buffer import Communicators, SparseBuffer
from lightning_safusion.comm.collectives.multiphase import (
    Entries,
    MultiPhaseExchange,
    decoded,
    encoded,
    joined,
    message_sizes,
    summed,
)
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.collectives.shards import Formats
from lightning_safusion.comm.exchange import Ability, Part, SpanSpec, TensorFlag, padded, saturated
from lightning_safusion.comm.transport.interface import Work
from lightning_safusion.comm.wire.formats import value_format
from lightning_safusion.sparsify.base import Segments, Selection, span_segments
from lightning_safusion.sparsify.selection.select import largest
from lightning_safusion.sparsify.selection.survey import History, SpanSurvey
from lightning_safusion.sparsify.selection.units import SpanUnits


def shard_of(segments: Segments, low: int, high: int) -> Segments:
    """The pieces of segments that lie in the elements ``[low, high)`` of a span."""
    cut = np.clip(segments.edges, low, high)
    sizes = np.diff(cut)
    whole = np.maximum(segments.sizes, 1)
    quotas = np.minimum(sizes, -(-segments.quotas * sizes // whole))
    room = int((sizes[segments.quotas > 0] - quotas[segments.quotas > 0]).sum())
    pool = min(room, -(-segments.pool * (high - low) // max(1, segments.numel)))
    return Segments(cut - low, quotas, segments.keys, tuple((int(size),) for size in sizes), pool)


class ShardResult(NamedTuple):
    """What became of one shard of a node; positions are counted from its start.

    Args:
        sums: Of all ranks, as delivered; the same on all of them.
        sent: What this rank takes out of its residual.
        chosen: int64 [K], ascending: what its node has sent.
    """

    sums: Entries
    sent: Entries
    chosen: Tensor


class NodeExchange(MultiPhaseExchange):
    """The phases inside a node: a reduce-scatter before, and an all-gather after, what happens between nodes.

    1. *Inside*: a reduce-scatter of residual plus gradient. Each of the ``w`` workers that talk to other nodes gets the
       node's sum of one shard. The pieces have the values of the wire (fp32 for ``"auto"`` and for a few bits) and are
       added in float32.
    2. *Between*: :meth:`_between`, over the rail of the shard.
    3. *Inside*: every worker gets what :meth:`_between` has returned to each of the ``w``, and reads it:
       :meth:`_read`.

    The selection is from sums that only this collective sees: one from this rank's own part is not used. Elements are
    compared in the units of :attr:`Part.units`. Every rank keeps its own residual, and takes its own part of every sum
    that was sent out of it; the residuals of a node add up to what one residual of the node would be. What was not sent
    of a sum that was chosen, as the error of rounding it, stays with the worker that has its shard.

    The phases between nodes begin when those inside have ended. They are waited for one buffer after the other, in
    plan order on all ranks, so that a rail needs one communicator, whatever the number of phases on it.

    Args:
        buffer: What is exchanged; its wire is that between nodes. Without segments its span is one.
        over: Communicators, those of both levels among them.

    Raises:
        ValueError: If it gets none of two levels.
    """

    ability = Ability(selects_itself=True, few_bits=True)
    #: Of the sums that this worker selects from.
    _history: History

    def __init__(self, buffer: SparseBuffer, over: Communicators) -> None:
        transports, spec, device = over.nodes, buffer.spec, buffer.device
        if transports is None:
            raise ValueError(f"{type(self).__name__} needs communicators of nodes: open them with Collective.connect")
        super().__init__(spec, transports.world, device)
        self.transports = transports
        width, inside = len(transports.rails), transports.inside
        edges = [spec.numel * shard // width for shard in range(width + 1)]
        segments = buffer.segments or span_segments(spec.numel, spec.capacity)
        #: Where each shard begins and ends, and how it is cut.
        self._runs = list(pairwise(edges))
        self._segments = [shard_of(segments, low, high) for low, high in self._runs]
        #: The shard that this worker has; None if it does not talk to other nodes, or has nothing to say.
        self._own = inside.rank if inside.rank < width and self._segments[inside.rank].capacity else None
        (mine,) = (ranks for ranks in transports.nodes if transports.world.rank in ranks)
        #: Place of this node in the rail of each shard.
        self._places = [rail.index(mine[shard]) for shard, rail in enumerate(transports.rails)]
        # of each worker of the node: elements of its shard, with and without padding
        inner = value_format(buffer.wire).dtype
        self._numels = [high - low for low, high in self._runs] + [0] * (inside.world_size - width)
        self._sizes = [padded(numel, inner) for numel in self._numels]
        self._x = torch.zeros(sum(self._sizes) if spec.capacity else 0, dtype=inner, device=device)
        pairs = zip(self._x.split(self._sizes), self._numels, strict=True) if spec.capacity else ()
        self._shards = [piece[:numel] for piece, numel in pairs][:width]
        self._absent: Sequence[int] = ()
        self._units: SpanUnits | None = None
        self._scattering: tuple[Tensor, Work] | None = None
        self._chosen = self._nothing.indices
        self._message_sizes = self._plan(buffer)

    @abstractmethod
    def _plan(self, buffer: SparseBuffer) -> list[int]:
        """Makes what the other two need of each shard; bytes that its worker gives to the others of its node."""

    @abstractmethod
    def _between(self, total: Tensor, units: SpanUnits | None) -> Tensor:
        """Exchanges the shard of this worker (float32 [S], sums); uint8, what the others of its node need of it."""

    @abstractmethod
    def _read(self, shard: int, message: Tensor, total: Tensor | None) -> ShardResult:
        """Reads what :meth:`_between` has returned to the worker of a shard; ``total``: where that is this one."""

    def sent(self) -> tuple[Tensor, Tensor]:
        return self._sent

    def chosen(self) -> Tensor:
        return self._chosen

    def _pack(self, x: Tensor, part: Part) -> None:
        if not len(self._x):
            return
        self._absent, self._units = part.absent, part.units
        # an infinity must be seen by all ranks; what is finite and does not fit stays in the residual
        x = torch.where(x.isinf(), x, saturated(x, self._x.dtype))
        for start, stop, _ in self.spec.dense_runs:
            x[start:stop] = 0
        for tensor in part.absent:
            x[self.spec.edges[tensor] : self.spec.edges[tensor + 1]] = 0
        torch._foreach_copy_(self._shards, [x[low:high] for low, high in self._runs])

    def _launch_first(self) -> None:
        inside = self.transports.inside
        incoming = [self._sizes[inside.rank]] * inside.world_size
        if len(self._x):
            self._scattering = self._all_to_all(inside, self._x, self._sizes, incoming)

    def _finish(self) -> Entries:
        if self._scattering is None:
            return self._result
        (pieces, work), self._scattering = self._scattering, None
        work.wait()
        units, self._units = self._units, None  # nothing holds an optimizer's state after the window
        inside, own = self.transports.inside, self._own
        total = torch.zeros(self._numels[inside.rank], dtype=torch.float32, device=self.device)
        for piece in pieces.view(inside.world_size, -1):
            total += piece[: len(total)]
        message = torch.zeros(0, dtype=torch.uint8, device=self.device)
        if own is not None:
            message = self._between(total, None if units is None else units.within([self._runs[own]]))
        sizes = [*self._message_sizes, *[0] * (inside.world_size - len(self._runs))]
        received = self._all_gather(inside, message, sizes).split(sizes)
        return self._added(
            [self._read(shard, received[shard], total if shard == own else None) for shard in range(len(self._runs))]
        )

    def _added(self, results: Sequence[ShardResult]) -> Entries:
        starts = [low for low, _ in self._runs]
        own = joined([result.sent.shifted(low) for result, low in zip(results, starts, strict=True)])
        for tensor in self._absent:  # not even a rounding error of theirs is this rank's
            low, high = self.spec.edges[tensor : tensor + 2]
            own = own[(own.indices < low) | (own.indices >= high)]
        self._sent = own.indices, own.values
        self._chosen = torch.cat([result.chosen + low for result, low in zip(results, starts, strict=True)])
        return joined([result.sums.shifted(low) for result, low in zip(results, starts, strict=True)])

    def _largest(self, total: Tensor, units: SpanUnits | None) -> Selection:
        compared = total if units is None else units.weigh(total)
        chosen = largest(compared, self._history.segments, SpanSurvey(compared, self._history))
        return chosen if units is None else chosen.with_values_of(total)


class HierarchicalExchange(NodeExchange):
    """Sends the largest sums of every node to all others.

    Between nodes the largest sums of a shard, exactly, go to the workers with that shard in all other nodes: an
    all-gather. Each segment of the span has its quota; where a shard's edge cuts it, each piece has its share of that,
    rounded up.

    So a node sends ``capacity`` entries (one more for every cut), not ``capacity`` for each of its workers:
    ``(nodes - 1) * S`` bytes cross a node's network card, where a flat all-gather takes
    ``(workers - workers of the node) * S``.
    """

    def _plan(self, buffer: SparseBuffer) -> list[int]:
        specs = [SpanSpec(cut.numel, cut.capacity, tuple(cut.edges.tolist()), ()) for cut in self._segments]
        shards = zip(specs, self._segments, strict=True)
        self._codecs = [replace(buffer, spec=spec, segments=cut).codec for spec, cut in shards]
        if self._own is not None:
            self._history = History(self._segments[self._own])
        return [len(self.transports.nodes) * size for size in message_sizes(self._codecs)]

    def _between(self, total: Tensor, units: SpanUnits | None) -> Tensor:
        between, codec = self.transports.between, self._codecs[self.transports.inside.rank]
        chosen = Entries.of(self._largest(total, units), self.device)
        message, _ = encoded([chosen], [codec], self.device)
        received = torch.zeros(between.world_size * len(message), dtype=torch.uint8, device=self.device)
        self.bytes_sent += len(message)
        self.bytes_received += len(received) - len(message)
        between.all_gather(received, message).wait()
        return received

    def _read(self, shard: int, message: Tensor, total: Tensor | None) -> ShardResult:
        lists = decoded(message, [self._codecs[shard]] * len(self.transports.nodes))
        own, x = lists[self._places[shard]], self._shards[shard]
        values = x[own.indices].float()
        if total is not None:
            values += own.values - total[own.indices]
        return ShardResult(summed(lists, len(x), self.device), Entries(own.indices, values), own.indices)


class HierarchicalShardedExchange(NodeExchange):
    """Between nodes, the sums of a node travel as :class:`ShardedExchange` sends the gradients of a worker.

    On the rail of a shard each node owns a part of every tensor there. A node sends half of its quota to the owners.
    They add that to their own node's sums and deliver the largest, three and a half quotas. So
    ``4 * (nodes - 1) / nodes * S`` bytes cross a node's network card, where
    :class:`HierarchicalExchange` takes ``(nodes - 1) * S``: level
    with four nodes (there it delivers more), less from five on.

    What leaves the sums of a node is what leaves a worker there, with the same rule for what an owner does not deliver.
    Inside the node the worker with the shard passes on what it has scattered and what all owners have delivered. From
    the former, and from what it has delivered itself, every worker of its node reads where sums have been sent, and
    takes its own part of these out of its residual. All that is left over, positive or negative, is in the residual of
    the worker with the shard: rounding errors, and the sums of other nodes that it has not delivered.

    Positions are those of Elias and Fano, whatever the wire.

    Raises:
        ValueError: If segments compete for a pool.
    """

    #: Exchanges the shard of this worker.
    _rail: ShardedExchange

    ability = Ability(selects_itself=True, few_bits=True, cuts_tensors=True)
    scattered = ShardedExchange.scattered

    def _plan(self, buffer: SparseBuffer) -> list[int]:
        nodes, own = len(self.transports.nodes), self._own
        shards = [
            replace(buffer, spec=SpanSpec(shard.numel, shard.capacity, (0, shard.numel), ()), segments=shard)
            for shard in self._segments
        ]
        #: What the nodes send each other of every shard; None: nothing.
        self._formats: list[Formats | None] = [
            ShardedExchange.formats(shard, nodes) if shard.spec.capacity else None for shard in shards
        ]
        self._scattered_sizes = [
            0 if formats is None else sum(formats.out_sizes(place))
            for formats, place in zip(self._formats, self._places, strict=True)
        ]
        if own is not None:
            # its phases follow each other, so that they need no communicators of their own
            between = self.transports.between
            self._rail = ShardedExchange(shards[own], Communicators(between, between, None))
            self._history = History(self._rail.first.segments())
            self._fresh = torch.full((1,), int(TensorFlag.FRESH), dtype=torch.uint8, device=self.device)
        return [
            scattered + (0 if formats is None else nodes * formats.delivered_size)
            for formats, scattered in zip(self._formats, self._scattered_sizes, strict=True)
        ]

    def _between(self, total: Tensor, units: SpanUnits | None) -> Tensor:
        rail = self._rail
        rail.encode(total, Part(self._largest(total, units), self._fresh, units=units))
        rail.start().wait()
        self.bytes_sent += rail.bytes_sent
        self.bytes_received += rail.bytes_received
        return torch.cat([rail.sending[: sum(rail.out_sizes)], rail.gathered_sums.view(-1)])

    def _read(self, shard: int, message: Tensor, total: Tensor | None) -> ShardResult:
        formats, x, place = self._formats[shard], self._shards[shard], self._places[shard]
        if formats is None:
            nothing = Entries.none(self.device)
            return ShardResult(nothing, nothing, nothing.indices)
        scattered, gathered = message.split([self._scattered_sizes[shard], len(message) - self._scattered_sizes[shard]])
        delivered = formats.gathered(gathered.view(len(formats.delivered), -1))
        # nowhere twice: nothing is scattered to oneself. Zeros are left out, since padding looks the same
        every = [*formats.scattered(scattered, place), delivered[place]]
        chosen = torch.cat([entries.indices[entries.values != 0] for entries in every]).sort().values
        values = x[chosen].float()
        sent = Entries(chosen, values)
        if total is not None:
            sent = self._left(chosen, values - total[chosen], len(x))
        return ShardResult(summed(delivered, len(x), self.device), sent, chosen)

    def _left(self, chosen: Tensor, others: Tensor, numel: int) -> Entries:
        """What leaves the residual of the worker with the shard: all that leaves the node's sums, without what
        ``others`` (float32 [K], negative) take out of theirs where sums were chosen."""
        left = torch.zeros(numel, dtype=torch.float32, device=self.device)
        left.index_add_(0, *self._rail.sent())
        left.index_add_(0, chosen, others)
        places = left.nonzero().view(-1)
        return Entries(places, left[places])

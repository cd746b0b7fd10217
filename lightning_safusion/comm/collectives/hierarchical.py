"""Two levels: dense inside a node; between nodes sparse, to all of them or to owners of shards.

Dense inside and sparse between: e.g. Lin et al., Deep Gradient Compression, ICLR 2018. Owners between nodes: many nodes
cost no more than few.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_safusion.comm.buffer import Communicators, SparseBuffer
from lightning_safusion.comm.collectives.multiphase import Entries, decoded, encoded, message_sizes, summed
from lightning_safusion.comm.collectives.nodes import NodeExchange, ShardResult
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.collectives.shards import Formats
from lightning_safusion.comm.exchange import Ability, Part, SpanSpec, TensorFlag
from lightning_safusion.sparsify.selection.survey import History
from lightning_safusion.sparsify.selection.units import SpanUnits


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

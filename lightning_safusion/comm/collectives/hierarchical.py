"""Two levels: dense inside a node, sparse between nodes (e.g. Lin et al., Deep Gradient Compression, ICLR 2018)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.collectives.multiphase import (
    Entries,
    MultiPhaseExchange,
    decoded,
    encoded,
    joined,
    message_sizes,
    summed,
)
from lightning_safusion.comm.exchange import Part, SpanSpec, padded, saturated
from lightning_safusion.comm.transport.interface import Transport, Work
from lightning_safusion.comm.wire.formats import resolve_codec, value_format
from lightning_safusion.sparsify.base import Segments, span_segments
from lightning_safusion.sparsify.basic import TopK
from lightning_safusion.sparsify.selection.survey import History, SpanSurvey

_TOP = TopK()


@dataclass(frozen=True)
class NodeTransports:
    """Communicators of two levels; made once, shared by all exchanges.

    A *rail* is the first members of all nodes, or the second, and so on, as far as the smallest node goes. So many
    workers of every node use its network card at once.

    Args:
        world: All ranks.
        inside: The ranks of this rank's node.
        between: The rail of this rank; only itself if its place is beyond the smallest node.
        nodes: Ranks of all nodes.
        rails: Ranks of all rails.
    """

    world: Transport
    inside: Transport
    between: Transport
    nodes: tuple[tuple[int, ...], ...]
    rails: tuple[tuple[int, ...], ...]

    @classmethod
    def make(cls, world: Transport, node: Hashable) -> NodeTransports:
        """Makes the communicators from the name of each rank's node (its host's name, or number). Collective.

        The transports are closed with ``world``, that of all ranks.
        """
        members: dict[Hashable, list[int]] = {}
        for rank, name in enumerate(world.gather_objects(node)):
            members.setdefault(name, []).append(rank)
        nodes = tuple(map(tuple, members.values()))
        rails = tuple(tuple(sorted(rail)) for rail in zip(*nodes, strict=False))
        alone = [(rank,) for ranks in nodes for rank in ranks[len(rails) :]]
        return cls(world, world.split(nodes), world.split([*rails, *alone]), nodes, rails)


def _shard(segments: Segments, low: int, high: int) -> Segments:
    """The pieces of segments that lie in the elements ``[low, high)`` of a span."""
    cut = np.clip(segments.edges, low, high)
    sizes = np.diff(cut)
    whole = np.maximum(segments.sizes, 1)
    quotas = np.minimum(sizes, -(-segments.quotas * sizes // whole))
    room = int((sizes[segments.quotas > 0] - quotas[segments.quotas > 0]).sum())
    pool = min(room, -(-segments.pool * (high - low) // max(1, segments.numel)))
    return Segments(cut - low, quotas, segments.keys, tuple((int(size),) for size in sizes), pool)


class HierarchicalExchange(MultiPhaseExchange):
    """Adds up whole spans inside a node, sends the largest sums of every node to all others.

    1. *Inside*: a reduce-scatter of residual plus gradient. Each of the ``w`` workers that talk to other nodes gets the
       node's sum of one shard. The pieces have the values of the wire (fp32 for ``"auto"``) and are added in
       float32.
    2. *Between*: the largest sums of a shard, exactly, go to the owners of that shard in all other nodes: an
       all-gather. Each segment of the span has its quota; where a shard's edge cuts it, each piece has its share of
       that, rounded up.
    3. *Inside*: every worker gets the messages that the owners have gathered.

    So a node sends ``capacity`` entries (one more for every cut), not ``capacity`` for each of its workers:
    ``(nodes - 1) * S`` bytes cross a node's network card, where a flat all-gather takes
    ``(workers - workers of the node) * S``.

    The selection is from sums that only this collective sees: one from this rank's own part is not used. Every rank
    keeps its own residual, and takes its own part of every sum that was sent out of it; the residuals of a node add up
    to what one residual of the node would be. The rounding error of a sum stays with the owner of its shard.

    Args:
        spec, device: See :class:`Exchange`.
        transports: Communicators of both levels.
        wire: Wire format between nodes, by name.
        dtype: Dtype of the gradients; see :func:`resolve_codec`.
        segments: The cut of the span and the quotas; None is one segment.
    """

    selects_itself = True

    def __init__(
        self,
        spec: SpanSpec,
        transports: NodeTransports,
        device: torch.device,
        wire: str,
        dtype: torch.dtype,
        segments: Segments | None,
    ) -> None:
        super().__init__(spec, transports.world, device)
        self.transports = transports
        width = len(transports.rails)
        self._edges = [spec.numel * shard // width for shard in range(width + 1)]
        segments = segments or span_segments(spec.numel, spec.capacity)
        self._segments = [_shard(segments, low, high) for low, high in pairwise(self._edges)]
        self._histories = [History(shard) for shard in self._segments]
        self._codecs = [
            resolve_codec(wire, shard.numel, shard.capacity, dtype) if shard.capacity else None
            for shard in self._segments
        ]
        # of each worker of the node: elements of its shard, with and without padding, and bytes of its message
        beyond, inner = [0] * (transports.inside.world_size - width), value_format(wire).dtype
        self._numels = [shard.numel for shard in self._segments] + beyond
        self._sizes = [padded(numel, inner) for numel in self._numels]
        self._message_sizes = message_sizes(self._codecs) + beyond
        self._x = torch.zeros(sum(self._sizes) if spec.capacity else 0, dtype=inner, device=device)
        pairs = zip(self._x.split(self._sizes), self._numels, strict=True) if spec.capacity else ()
        self._shards = [piece[:numel] for piece, numel in pairs][:width]
        self._absent: Sequence[int] = ()
        self._scattering: tuple[Tensor, Work] | None = None
        (mine,) = (ranks for ranks in transports.nodes if transports.world.rank in ranks)
        self._own_messages = [rail.index(mine[shard]) for shard, rail in enumerate(transports.rails)]

    def sent(self) -> tuple[Tensor, Tensor]:
        return self._sent

    def _pack(self, x: Tensor, part: Part) -> None:
        if not len(self._x):
            return
        self._absent = part.absent
        # an infinity must be seen by all ranks; what is finite and does not fit stays in the residual
        x = torch.where(x.isinf(), x, saturated(x, self._x.dtype))
        for start, stop, _ in self.spec.dense_runs:
            x[start:stop] = 0
        for tensor in part.absent:
            x[self.spec.edges[tensor] : self.spec.edges[tensor + 1]] = 0
        torch._foreach_copy_(self._shards, [x[low:high] for low, high in pairwise(self._edges)])

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
        inside = self.transports.inside
        total = torch.zeros(self._numels[inside.rank], device=self.device)
        for piece in pieces.view(inside.world_size, -1):
            total += piece[: len(total)]
        sizes = [len(self.transports.nodes) * size for size in self._message_sizes]
        received = self._all_gather(inside, self._between(total), sizes)
        return self._added(received.split(sizes), total)

    def _between(self, total: Tensor) -> Tensor:
        """Sends the largest sums of this worker's shard to other nodes; returns the messages of all nodes."""
        between, shard = self.transports.between, self.transports.inside.rank
        nbytes = self._message_sizes[shard]
        received = torch.zeros(between.world_size * nbytes, dtype=torch.uint8, device=self.device)
        if nbytes:
            survey = SpanSurvey(total, self._histories[shard])
            chosen = Entries.of(_TOP.select(total, self._segments[shard], 0, survey), self.device)
            message, _ = encoded([chosen], [self._codecs[shard]], self.device)
            self.bytes_sent += nbytes
            self.bytes_received += (between.world_size - 1) * nbytes
            between.all_gather(received, message).wait()
        return received

    def _added(self, received: Sequence[Tensor], total: Tensor) -> Entries:
        """Adds up the messages of all nodes, shard by shard, and records this rank's part of its node's."""
        sums, sent = [], []
        for shard, (low, high) in enumerate(pairwise(self._edges)):
            lists = decoded(received[shard], [self._codecs[shard]] * len(self.transports.nodes))
            sums.append(summed(lists, high - low, self.device).shifted(low))
            own = lists[self._own_messages[shard]]
            values = self._shards[shard][own.indices].float()
            if shard == self.transports.inside.rank:
                values += own.values - total[own.indices]
            sent.append(Entries(own.indices, values).shifted(low))
        own = joined(sent)
        for tensor in self._absent:  # not even a rounding error of theirs is this rank's
            low, high = self.spec.edges[tensor : tensor + 2]
            own = own[(own.indices < low) | (own.indices >= high)]
        self._sent = own.indices, own.values
        return joined(sums)

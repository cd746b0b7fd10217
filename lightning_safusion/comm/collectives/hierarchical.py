"""Two levels: dense inside a node, sparse between nodes (e.g. Lin et al., Deep Gradient Compression, ICLR 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_safusion.comm.collectives.multiphase import Entries, decoded, encoded, message_sizes, summed
from lightning_safusion.comm.collectives.nodes import NodeExchange, NodeTransports, ShardResult
from lightning_safusion.comm.exchange import SpanSpec
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.sparsify.base import Segments
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

    Args:
        spec, transports, device, wire, segments: See :class:`~lightning_safusion.comm.collectives.nodes.NodeExchange`.
        dtype: Dtype of the gradients; see :func:`resolve_codec`.
    """

    #: Of the sums of this worker's shard.
    _history: History

    def __init__(
        self,
        spec: SpanSpec,
        transports: NodeTransports,
        device: torch.device,
        wire: str,
        dtype: torch.dtype,
        segments: Segments | None,
    ) -> None:
        super().__init__(spec, transports, device, wire, segments)
        self._codecs = [_codec(shard, wire, dtype) for shard in self._segments]
        self._message_sizes = [len(transports.nodes) * size for size in message_sizes(self._codecs)]
        if self._own is not None:
            self._history = History(self._segments[self._own])

    def _between(self, total: Tensor, units: SpanUnits | None) -> Tensor:
        between, codec = self.transports.between, self._codecs[self.transports.inside.rank]
        chosen = Entries.of(self._largest(total, self._history, units), self.device)
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


def _codec(shard: Segments, wire: str, dtype: torch.dtype) -> Codec | None:
    """The format of the sums of a shard; None if none are sent."""
    if not shard.capacity:
        return None
    # a pool may be spent anywhere
    entries = None if shard.pool else shard.quotas.tolist()
    return resolve_codec(wire, shard.numel, shard.capacity, dtype, shard.edges.tolist(), entries)

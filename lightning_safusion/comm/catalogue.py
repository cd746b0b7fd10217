"""The collectives by name, and what each can do. A new one is a file in ``collectives/`` and a row here."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from lightning_safusion.comm.buffer import Communicators, NodeTransports, SparseBuffer
from lightning_safusion.comm.collectives.allgather import HybridExchange, SparseAllGather
from lightning_safusion.comm.collectives.allreduce import DenseAllReduce
from lightning_safusion.comm.collectives.gtopk import GTopKExchange
from lightning_safusion.comm.collectives.hierarchical import HierarchicalExchange, HierarchicalShardedExchange
from lightning_safusion.comm.collectives.ok_allreduce import OkTopkExchange
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.cost import CollectiveChoice, LinearCost
from lightning_safusion.comm.exchange import Exchange, StreamOrderedExchange
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.registry import Registry


@dataclass(frozen=True)
class Collective:
    """What ``collective=name`` means.

    Args:
        exchange: Carries sparse buffers.
        build: Makes it.
        choice: What a plan may take for a buffer: this collective (``"allgather"``: to planners all sparse exchanges
            are alike), the dense all-reduce, or the cheaper one (``"auto"``).
        dense_lane: Dense tensors of a sparse buffer have an all-reduce on a communicator of their own.
        levels: It needs communicators inside and between nodes.
    """

    exchange: type[Exchange]
    build: Callable[[SparseBuffer, Communicators], Exchange]
    choice: CollectiveChoice = "allgather"
    dense_lane: bool = False
    levels: bool = False

    @property
    def few_bits(self) -> bool:
        """See :class:`Ability`."""
        return self.exchange.ability.few_bits and self.choice != "allreduce"

    @property
    def stream_ordered(self) -> bool:
        """A device can decode and judge it without the host."""
        return issubclass(self.exchange, StreamOrderedExchange)

    @property
    def several(self) -> bool:
        """It has work on more than one communicator at once."""
        return self.dense_lane or self.levels or self.exchange.ability.phases

    def connect(self, main: Transport, node: Hashable = None, own: bool = False) -> Communicators:
        """Opens the communicators it needs, from that of all ranks. Collective.

        Args:
            main: That of all ranks.
            node: Name of the node that this rank runs on.
            own: Buffers get a communicator of their own over all ranks.
        """
        nodes = NodeTransports.make(main, node) if self.levels else None
        buffers = main.subgroup() if own else main
        return Communicators(
            buffers, main.subgroup() if self.dense_lane or self.exchange.ability.phases else buffers, nodes
        )


def _allgather(buffer: SparseBuffer, over: Communicators) -> Exchange:
    return SparseAllGather(buffer.spec, over.main, buffer.device, buffer.codec)


def _hybrid(buffer: SparseBuffer, over: Communicators) -> Exchange:
    codec = buffer.codec
    if not buffer.spec.dense_runs:
        return SparseAllGather(buffer.spec, over.main, buffer.device, codec)
    if codec is None:
        return DenseAllReduce(buffer.spec, over.beside, buffer.device)
    return HybridExchange(buffer.spec, over.main, over.beside, buffer.device, codec)


#: By the names that ``collective`` takes.
COLLECTIVES: dict[str, Collective] = {
    "auto": Collective(SparseAllGather, _allgather, choice="auto"),
    "allgather": Collective(SparseAllGather, _allgather),
    "hybrid": Collective(HybridExchange, _hybrid, dense_lane=True),
    "hierarchical": Collective(HierarchicalExchange, HierarchicalExchange, levels=True),
    "hierarchical-sharded": Collective(HierarchicalShardedExchange, HierarchicalShardedExchange, levels=True),
    "allreduce": Collective(SparseAllGather, _allgather, choice="allreduce"),
    "sharded": Collective(ShardedExchange, ShardedExchange),
    "oktopk": Collective(OkTopkExchange, OkTopkExchange),
    "gtopk": Collective(GTopKExchange, GTopKExchange),
}
_REGISTRY: Registry[Collective] = Registry("collective", Collective, COLLECTIVES, "collectives")

#: From so many workers on ``"auto"`` takes shards: a sparse all-gather would bring each more than three times as
#: many bytes, but has no second selection.
SHARDED_FROM = 16
AUTO_SHARDED = replace(COLLECTIVES["sharded"], choice="auto")
#: All-gather on a link where bytes alone take time.
BYTES_ALONE = LinearCost(0.0, 1.0)
# Among fewer workers an all-gather must take so many times as long: shards have one phase and one selection more.
_WORTH = 1.4


def shards_pay(world_size: int, gather: LinearCost | None, message: float) -> bool:
    """Whether ``"auto"`` takes shards; never with five workers or fewer.

    Args:
        world_size: Workers.
        gather: Seconds of a sparse all-gather by the bytes of one worker's message; None if they are not known: then
            the number of workers decides.
        message: Bytes of one worker's messages in a step.
    """
    if gather is None or world_size == 1 or world_size >= SHARDED_FROM:
        return world_size >= SHARDED_FROM
    return gather(message) > _WORTH * ShardedExchange.cost(gather, world_size)(message)


def find_collective(name: str) -> Collective:
    """The row of a name; errors are those of :meth:`Registry.resolve`."""
    return _REGISTRY.resolve(name)

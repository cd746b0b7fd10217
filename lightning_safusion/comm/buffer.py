"""What a collective is made for: a buffer, and the communicators of the job."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch

from lightning_safusion.comm.exchange import SpanSpec
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.sparsify.base import Segments


@dataclass(frozen=True)
class SparseBuffer:
    """A buffer in which some tensors may not be dense; a collective is built for it.

    Args:
        spec: Its shape.
        device: Where it lives.
        wire: Wire format by name.
        dtype: Of all its gradients; float32 where they differ.
        segments: How it is cut for selection; None if no element is selected.
    """

    spec: SpanSpec
    device: torch.device
    wire: str
    dtype: torch.dtype
    segments: Segments | None

    @property
    def codec(self) -> Codec | None:
        """The format of its messages; None if no element is selected."""
        spec, cut = self.spec, self.segments
        if not spec.capacity:
            return None
        own = cut is not None and not cut.pool and np.array_equal(cut.edges, spec.edges)  # a quota for each tensor
        entries = cut.quotas.tolist() if own and cut is not None else None
        return resolve_codec(self.wire, spec.numel, spec.capacity, self.dtype, spec.edges, entries)


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


@dataclass(frozen=True)
class Communicators:
    """What the buffers of one job are exchanged over.

    Args:
        main: All ranks.
        beside: All ranks: another one where dense tensors have a lane, or later phases an order, of their own.
        nodes: Inside and between nodes; only where the collective has two levels.
    """

    main: Transport
    beside: Transport
    nodes: NodeTransports | None

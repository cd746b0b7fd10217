"""Whole spans are added up inside a node; what nodes send each other of the sums, subclasses say."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.buffer import Communicators, SparseBuffer
from lightning_safusion.comm.collectives.multiphase import Entries, MultiPhaseExchange, joined
from lightning_safusion.comm.exchange import Ability, Part, padded, saturated
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

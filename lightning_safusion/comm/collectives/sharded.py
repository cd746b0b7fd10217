"""Sparse reduce-scatter and all-gather: a worker owns a shard, and receives no more from many workers than from few."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.buffer import Communicators, SparseBuffer
from lightning_safusion.comm.collectives.host_shards import HostRoutes, HostShard
from lightning_safusion.comm.collectives.multiphase import Entries, MultiPhaseExchange, joined
from lightning_safusion.comm.collectives.shards import Formats, Pieces, Receiver, Routes, Shard
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.comm.exchange import Ability, Part, StreamOrderedExchange, Verdict, aligned
from lightning_safusion.comm.transport.interface import FinishedWork, Work
from lightning_safusion.comm.wire.codec import Inbox
from lightning_safusion.comm.wire.formats import value_format
from lightning_safusion.kernels import cpu as native
from lightning_safusion.kernels.fields import FIELD_BYTES
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.selection.units import SpanUnits


class ShardedExchange(StreamOrderedExchange, MultiPhaseExchange):
    """Every worker adds up the selections in its shard and delivers the largest sums.

    1. *Scatter*: each worker sends its selection in a shard to the owner of the shard: an all-to-all.
    2. *Select*: the owner adds these, in rank order, to the whole of its own residual and gradient there, and selects
       from the sums.
    3. *Gather*: every worker gets the selections of all owners.

    Of a quota of k entries k / 2 are scattered and 7 k / 2 gathered (measured in ``docs/convergence.md``).
    So about 4 k are received, whatever the number of workers; an all-gather brings ``(P - 1) k``.

    What an owner does not deliver stays in its own residual, what others have sent it included: there is no second
    residual, and nothing is lost. Shards are pieces of tensors, the same in every plan. Both messages may have few
    bits: the error of the first stays with its sender, that of the second with the owner.

    Ok-Topk (:mod:`~lightning_safusion.comm.collectives.ok_allreduce`) reduces to owners too. What they do not deliver
    stays with its senders, shards and thresholds are agreed on by data, and sums are sent in float32.

    Args:
        buffer: What is exchanged. Whatever its wire, positions are those of Elias and Fano.
        over: Communicators, which need all-to-all; the third phase is on the one beside, and begins when the second has
            ended.
    """

    ability = Ability(few_bits=True, cuts_tensors=True, phases=True)
    scattered = 0.5
    #: Entries that owners deliver, for each of the quota.
    gathered = 3.5

    def __init__(self, buffer: SparseBuffer, over: Communicators) -> None:
        spec, device = buffer.spec, buffer.device
        super().__init__(spec, over.main, device)
        self._beside = over.beside
        workers, rank = over.main.world_size, over.main.rank
        formats = self.formats(buffer, workers)
        #: Pieces with what a worker sends of each, and what their owners deliver.
        self.first, self.second = formats.first, formats.second
        self.segments = None if buffer.segments is None else self.first.segments()
        #: Formats of the entries for each owner, and of those that each owner delivers.
        self.out, self.delivered = formats.out, formats.delivered
        # flags and notices go with every message; what it selects in its own shard is there
        self.header, self._formats = formats.header, formats
        row, nbytes = aligned(self.header + formats.nbytes(rank)), formats.nbytes(rank)
        self.out_sizes, self.in_sizes = formats.out_sizes(rank), [row] * workers
        self.in_sizes[rank] = 0
        #: uint8, the messages for all other owners, and behind them a header that stays here.
        self.sending = self._memory(sum(self.out_sizes) + aligned(self.header))
        self._first, self._own = self.sending.split([sum(self.out_sizes), aligned(self.header)])
        #: uint8 [workers - 1, nbytes], those of all others.
        self.arriving = self._memory(sum(self.in_sizes)).view(workers - 1, row)
        self._size = formats.delivered_size
        #: uint8, the sums that it delivers, and uint8 [workers, nbytes], those that all owners do.
        self.sums, self.gathered_sums = self._memory(self._size), self._memory(self._size * workers).view(workers, -1)
        length, outs = spec.num_tensors + 1, self._first.split(self.out_sizes)
        self._own_header, *self._sent_headers = [out[:length] for out in (self._own, *outs) if len(out)]
        self._received_headers = [self.arriving[:, :length], self._own_header[None]]
        self.headers = torch.cat(self._received_headers)
        on_host, messages = device.type == "cpu", self.arriving[:, self.header : self.header + nbytes]
        self._shard = (HostShard if on_host else Shard)(self.second.owned(rank), messages, self.out[rank])
        receivers = [
            Receiver(owner, codec, out[self.header : self.header + codec.nbytes])
            for owner, (codec, out) in enumerate(zip(self.out, outs, strict=True))
            if codec is not None and len(out)
        ]
        self._routes = (HostRoutes if on_host else Routes)(self.first, spec.numel, receivers)
        own = self.delivered[rank]
        self._deliver = None if own is None else own.outbox(self.sums[: own.nbytes])
        self._units: SpanUnits | None = None
        self._sent_parts: list[Entries] = []  # of other shards, as decoded
        self._scattering: Work | None = None
        self._gathering: Work | None = None
        self._arrived = False  # the first phase has ended, as far as another thread has said

    @classmethod
    def formats(cls, buffer: SparseBuffer, workers: int) -> Formats:
        """What so many workers send each other."""
        spec, dtype = buffer.spec, buffer.dtype
        whole = Pieces.of(buffer.segments or Segments(np.zeros(1, np.int64), np.zeros(0, np.int64), (), ()), workers)
        first, second = whole.times(cls.scattered), whole.times(cls.gathered)
        values = value_format(buffer.wire, dtype).name
        out, delivered = (
            [pieces.owned(owner).codec(values, spec.numel, dtype) for owner in range(workers)]
            for pieces in (first, second)
        )
        return Formats(first, second, out, delivered, aligned(spec.num_tensors + 1, FIELD_BYTES))

    @classmethod
    def received(cls, world_size: int, message: float) -> float:
        """Bytes that a worker receives where its whole quota would fill a message of so many."""
        return (world_size - 1) / world_size * (cls.scattered + cls.gathered) * message

    @classmethod
    def cost(cls, gather: LinearCost, world_size: int) -> LinearCost:
        """Seconds by the bytes of one rank's message, from those of an all-gather."""
        per_byte = gather.per_byte / max(1, world_size - 1)
        return LinearCost(2 * gather.fixed, cls.received(world_size, per_byte))

    def _memory(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    @cached_property
    def _inboxes(self) -> tuple[list[Inbox], native.Together[native.Message]] | None:
        """The messages of all owners, and how compiled kernels that are there read them; None if they cannot."""
        if self.device.type != "cpu":
            return None
        pairs = zip(self.delivered, self.gathered_sums, strict=True)
        found = [codec.inbox(row[None, : codec.nbytes]) for codec, row in pairs if codec is not None]
        known = [inbox for inbox in found if inbox is not None]
        if len(known) < len(found):
            return None
        return known, native.Together([message for inbox in known for message in inbox().messages])

    def verdict(self, headers: Tensor | None = None) -> Verdict:
        return super().verdict(torch.cat(self._received_headers) if headers is None else headers)

    def sent(self) -> tuple[Tensor, Tensor]:
        return self._sent

    def sent_with(self, leaving: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`sent`, where kernels have written the messages; ``leaving``: float32 [S], of its own shard."""
        owned = self._formats.scattered(self._first, self.transport.rank)
        every = joined([*owned, self._shard.in_span(leaving.nonzero().view(-1), leaving)])
        return every.indices, every.values

    def encode(self, x: Tensor, part: Part) -> None:
        if self.spec.dense_runs:
            self.lane.encode(x, part)
        header = self._own_header
        header[:-1].copy_(part.flags)
        header[-1:].fill_(part.notices)
        if self._sent_headers:
            torch._foreach_copy_(self._sent_headers, [header] * len(self._sent_headers))
        self._pack(x, part)

    def _start_lane(self) -> Work:
        if self.spec.dense_runs:
            return super()._start_lane()
        self.bytes_sent = self.bytes_received = 0
        return FinishedWork()

    def _pack(self, x: Tensor, part: Part) -> None:
        self._units = part.units
        edges = self.spec.edges
        self._shard.take(x, [(edges[tensor], edges[tensor + 1]) for tensor in part.absent])
        selection = self._nothing if part.selection is None else part.selection
        self._sent_parts = self._routes.send(selection)

    def _launch_first(self) -> None:
        self._arrived = False
        self.bytes_sent += len(self._first) + self._size
        self.bytes_received += self.arriving.numel() + self._size * (self.transport.world_size - 1)
        sizes = self.in_sizes, self.out_sizes
        work = self._scattering = self.transport.all_to_all(self.arriving.view(-1), self._first, *sizes)
        if self.device.type == "cpu":  # elsewhere the host does not ask
            work.on_done(self._note_arrival)

    def _note_arrival(self, _: float) -> None:
        self._arrived = True

    def advance(self, wait: bool) -> bool:
        if self._scattering is None:
            return True
        if not wait and not self._arrived:
            return False  # nor does a device wait in the stream that selects
        self.await_first()
        self.headers = torch.cat(self._received_headers)
        if self._size:  # else the whole span is dense
            self._select_sums()
        self.gather()
        return True

    @property
    def arrived_first(self) -> bool:
        """Whether what others have selected in its shard has been waited for."""
        return self._scattering is None

    def await_first(self) -> None:
        """Waits for what others have selected in its shard."""
        work, self._scattering = self._scattering, None
        if work is not None:
            work.wait()

    def gather(self) -> None:
        """Launches the last phase, in which every worker gets the sums of all owners."""
        if self._size:
            self._gathering = self._beside.all_gather(self.gathered_sums.view(-1), self.sums)

    def _select_sums(self) -> None:
        units, self._units = self._units, None  # nothing holds an optimizer's state after the window
        shard, sums = self._shard, self._shard.summed()
        delivered = self._delivered(shard.largest(sums, units))
        parts = joined([*self._sent_parts, shard.leaving(sums, delivered)])
        self._sent = parts.indices, parts.values

    def _delivered(self, found: Entries) -> Entries:
        if self._deliver is None:
            return found
        return Entries(found.indices, self._deliver(Selection(found.indices, found.values, len(found)), True))

    def _finish(self) -> Entries:
        self.advance(wait=True)
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        return self._result  # none: they are read from the messages where they are

    def decode(self, scratch: Tensor) -> Tensor:
        self._written = []
        scale = 1.0 / self.transport.world_size
        for codec, row in zip(self.delivered, self.gathered_sums, strict=True):
            if codec is not None:
                indices, values = codec.decode(row[: codec.nbytes])
                scratch.scatter_add_(0, indices, values * scale)
                self._note_written(indices)
        self.lane.copy_to(scratch)
        return scratch

    def decode_into(self, gradients: Sequence[Tensor]) -> bool | None:
        if not native.serves(*gradients) or self._inboxes is None or self.lane.dtype != torch.float32:
            return None
        inboxes, messages = self._inboxes
        if not native.sound(messages):
            for inbox in inboxes:
                inbox()  # says what is wrong
        (sparse, places), (dense, lanes, means) = self._sparse_parts, self._dense_parts
        scale = 1.0 / self.transport.world_size
        finite = native.mean_into([gradients[t] for t in sparse], places, messages, scale)
        return finite & native.mean_into([gradients[t] for t in dense], lanes, means, 1.0)

    @cached_property
    def _sparse_parts(self) -> tuple[list[int], native.Parts]:
        return self.spec.sparse_parts()

    @cached_property
    def _dense_parts(self) -> tuple[list[int], native.Parts, native.Together[native.Message]]:
        """Dense tensors, where they lie in the lane, and the means there (float32)."""
        dense, lanes = self.spec.dense_tensors, np.asarray(self.lane.spec.edges)
        places = native.Parts.of(lanes[:-1][dense], np.diff(lanes)[dense])
        return dense, places, native.Together([native.Message.dense(self.lane.decode(self._nothing.values))])

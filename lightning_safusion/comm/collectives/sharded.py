"""Sparse reduce-scatter and all-gather: a worker owns a shard, and receives no more from many workers than from few."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.collectives.multiphase import Entries, MultiPhaseExchange, joined, message_sizes
from lightning_safusion.comm.collectives.shards import Pieces, Shard
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.comm.exchange import FIELD_BYTES, Part, SpanSpec, Verdict, aligned
from lightning_safusion.comm.transport.interface import FinishedWork, Transport, Work
from lightning_safusion.comm.wire.codec import Codec, Inbox
from lightning_safusion.comm.wire.formats import value_format
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.selection.units import SpanUnits
from lightning_safusion.sparsify.selection.view import device_constant


class ShardedExchange(MultiPhaseExchange):
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
        spec, transport, device: See :class:`Exchange`; the transport needs all-to-all.
        beside: Another communicator of all ranks, for the third phase, which begins when the second has ended.
        wire: Wire format by name; positions are those of Elias and Fano.
        dtype: Dtype of the gradients; see :func:`resolve_codec`.
        segments: The cut of the span and the quotas; None if no element is selected.
    """

    few_bits = True
    cuts_tensors = True
    scattered = 0.5
    #: Entries that owners deliver, for each of the quota.
    gathered = 3.5

    def __init__(
        self,
        spec: SpanSpec,
        transport: Transport,
        beside: Transport,
        device: torch.device,
        wire: str,
        dtype: torch.dtype,
        segments: Segments | None,
    ) -> None:
        super().__init__(spec, transport, device)
        self._beside = beside
        workers, values = transport.world_size, value_format(wire, dtype).name
        empty = Segments(np.zeros(1, np.int64), np.zeros(0, np.int64), (), ())
        pieces = Pieces.of(segments or empty, workers)
        scattered, gathered = pieces.times(self.scattered), pieces.times(self.gathered)
        self.segments = None if segments is None else scattered.segments()
        self._edges = device_constant(np.append(pieces.runs[:, 0], spec.numel), device)
        self._members = [np.flatnonzero(pieces.owners == owner).tolist() for owner in range(workers)]
        codecs = [scattered.owned(owner).codec(values, spec.numel, dtype) for owner in range(workers)]
        self._out, self._incoming = codecs, codecs[transport.rank]
        # flags and notices go with every message; what it selects in its own shard is there
        self._header = aligned(spec.num_tensors + 1, FIELD_BYTES)
        self._out_sizes, self._in_sizes = (
            [aligned(self._header + _nbytes(codec)) for codec in each] for each in (codecs, [self._incoming] * workers)
        )
        self._out_sizes[transport.rank] = self._in_sizes[transport.rank] = 0
        self._first = self._memory(sum(self._out_sizes))
        self._received = self._memory(sum(self._in_sizes))
        self._rows = self._received.view(workers - 1, aligned(self._header + _nbytes(self._incoming)))
        self._headers = np.zeros((workers, spec.num_tensors + 1), np.uint8)
        self._delivered = [gathered.owned(owner).codec(values, spec.numel, dtype) for owner in range(workers)]
        self._size = max(message_sizes(self._delivered))
        self._second = self._memory(self._size)
        self._gathered = self._memory(self._size * workers)
        self._shard = Shard(gathered.owned(transport.rank), device)
        self._inbox = self._inboxes() if device.type == "cpu" else None
        self._units: SpanUnits | None = None
        self._local = Entries.none(device)
        self._sent_parts: list[Entries] = []  # of other shards, as decoded
        self._scattering: Work | None = None
        self._gathering: Work | None = None
        self._arrived = False  # the first phase has ended, as far as another thread has said

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

    def _inboxes(self) -> list[Inbox] | None:
        """What compiled kernels read: the messages of all owners; None if they cannot."""
        rows = self._gathered.view(self.transport.world_size, -1)
        pairs = zip(self._delivered, rows, strict=True)
        found = [codec.inbox(row[None, : codec.nbytes]) for codec, row in pairs if codec is not None]
        known = [inbox for inbox in found if inbox is not None]
        return known if len(known) == len(found) else None

    def sent(self) -> tuple[Tensor, Tensor]:
        return self._sent

    def verdict(self) -> Verdict:
        rows = self._rows[:, : self.spec.num_tensors + 1].cpu().numpy()
        rank = self.transport.rank
        self._headers[:rank], self._headers[rank + 1 :] = rows[:rank], rows[rank:]
        return Verdict.of(self._headers)

    def encode(self, x: Tensor, part: Part) -> None:
        if self.spec.dense_runs:
            self.lane.encode(torch.cat(self.dense_runs(x)), part)
        own = torch.cat([part.flags.cpu(), torch.tensor([part.notices], dtype=torch.uint8)])
        self._headers[self.transport.rank] = own.numpy()
        for out in self._first.split(self._out_sizes):
            if len(out):
                out[: len(own)] = own
        self._pack(x, part)

    def _start_lane(self) -> Work:
        if self.spec.dense_runs:
            return super()._start_lane()
        self.bytes_sent = self.bytes_received = 0
        return FinishedWork()

    def _pack(self, x: Tensor, part: Part) -> None:
        self._local, self._units = Entries.of(part.selection, self.device), part.units
        edges = self.spec.edges
        self._shard.take(x, [(edges[tensor], edges[tensor + 1]) for tensor in part.absent])

    def _launch_first(self) -> None:
        self._arrived = False
        places = torch.searchsorted(self._local.indices, self._edges).tolist()
        self._sent_parts = []
        pieces = zip(self._members, self._out, self._first.split(self._out_sizes), strict=True)
        for members, codec, out in pieces:
            if codec is not None and len(out):
                part = joined([self._local[places[piece] : places[piece + 1]] for piece in members])
                part = part.largest(codec.capacity)  # a selection that keeps to the cut has no more
                place = out[self._header : self._header + codec.nbytes]
                values = codec.encode(Selection(part.indices, part.values, len(part)), place)
                self._sent_parts.append(Entries(part.indices, values))
        self.bytes_sent += len(self._first) + self._size
        self.bytes_received += len(self._received) + self._size * (self.transport.world_size - 1)
        sizes = self._in_sizes, self._out_sizes
        work = self._scattering = self.transport.all_to_all(self._received, self._first, *sizes)
        work.on_done(self._note_arrival)

    def _note_arrival(self, _: float) -> None:
        self._arrived = True

    def advance(self, wait: bool) -> bool:
        work = self._scattering
        if work is None:
            return True
        if not wait and (not self._arrived or self.device.type != "cpu"):
            return False  # on a device the host would wait, inside a hook
        work.wait()
        self._scattering, shard = None, self._shard
        if not self._size:
            return True  # the whole span is dense
        sums = shard.summed(self._rows[:, self._header : self._header + _nbytes(self._incoming)], self._incoming)
        units, self._units = self._units, None  # nothing holds an optimizer's state after the window
        delivered = shard.largest(units)
        self._second.zero_()
        if (codec := self._delivered[self.transport.rank]) is not None:
            out = self._second[: codec.nbytes]
            values = codec.encode(Selection(delivered.indices, delivered.values, len(delivered)), out)
            delivered = Entries(delivered.indices, values)
        self._gathering = self._beside.all_gather(self._gathered, self._second)
        parts = joined([*self._sent_parts, shard.leaving(sums, delivered)])
        self._sent = parts.indices, parts.values
        return True

    def _finish(self) -> Entries:
        self.advance(wait=True)
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        return Entries.none(self.device)  # read from the messages where they are

    def decode(self, scratch: Tensor) -> Tensor:
        rows = zip(self._delivered, self._gathered.view(self.transport.world_size, -1), strict=True)
        lists = [Entries(*codec.decode(row[: codec.nbytes])) for codec, row in rows if codec is not None]
        self._result = joined(lists) if lists else Entries.none(self.device)
        return super().decode(scratch)

    def decode_into(self, gradients: Sequence[Tensor]) -> bool | None:
        if self._inbox is None or self.spec.dense_runs or not native.serves(*gradients):
            return None
        messages = [message for inbox in self._inbox for message in inbox()]
        filled = [gradient for gradient in gradients if len(gradient)]
        parts = native.Parts.between(self.spec.edges)
        return native.mean_into(filled, parts, lambda start, stop: messages, 1.0 / self.transport.world_size)


def _nbytes(codec: Codec | None) -> int:
    """Bytes of a message without its header and padding."""
    return 0 if codec is None else codec.nbytes

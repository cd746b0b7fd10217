"""Sparse reduce-scatter and all-gather: a worker owns a shard, and receives no more from many workers than from few."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.collectives.multiphase import Entries, MultiPhaseExchange, joined, message_sizes
from lightning_safusion.comm.exchange import Part, SpanSpec
from lightning_safusion.comm.transport.interface import Transport, Work
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.comm.wire.formats import resolve_codec, value_format
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.basic import TopK
from lightning_safusion.sparsify.selection.survey import History, SpanSurvey
from lightning_safusion.sparsify.selection.units import SpanUnits
from lightning_safusion.sparsify.selection.view import device_constant

_TOP = TopK()
# Tensors whose quota has so many entries for each worker are cut into pieces, one for each; others have one owner.
_LEAST = 4


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parts of segments, in order, and who owns them.

    Args:
        runs: int64 [M, 2], where each begins and ends in the span.
        quotas: int64 [M], entries that each worker selects from it.
        owners: int64 [M].
        keys: Names of the pieces.
    """

    runs: np.ndarray
    quotas: np.ndarray
    owners: np.ndarray
    keys: tuple[Hashable, ...]

    @classmethod
    def of(cls, segments: Segments, workers: int) -> Pieces:
        """A function of each segment alone, so that no plan changes what is learned.

        Raises:
            ValueError: If segments compete for a pool: the entries of a shard would have no fixed number.
        """
        if segments.pool:
            raise ValueError("collective='sharded' needs a fixed number of entries for each shard: no quota='pooled'")
        runs, quotas, owners, keys = [], [], [], []
        for (start, stop), quota, key in zip(
            pairwise(segments.edges.tolist()), segments.quotas.tolist(), segments.keys, strict=True
        ):
            number = workers if quota >= _LEAST * workers else 1
            first = key if isinstance(key, int) else start
            for i in range(number):
                size = stop - start
                runs.append((start + size * i // number, start + size * (i + 1) // number))
                quotas.append(quota * (i + 1) // number - quota * i // number)
                owners.append((first + i) % workers)
                keys.append((key, i) if number > 1 else key)
        numbers = np.array(quotas, np.int64), np.array(owners, np.int64)
        return cls(np.array(runs, np.int64).reshape(-1, 2), *numbers, tuple(keys))

    def owned(self, owner: int) -> Pieces:
        """Those of a worker with entries."""
        mine = (self.owners == owner) & (self.quotas > 0)
        keys = tuple(key for key, own in zip(self.keys, mine, strict=True) if own)
        return Pieces(self.runs[mine], self.quotas[mine], self.owners[mine], keys)

    @property
    def sizes(self) -> np.ndarray:
        """int64 [M], elements of each."""
        return self.runs[:, 1] - self.runs[:, 0]

    def times(self, factor: float) -> Pieces:
        """The same with larger quotas."""
        return replace(self, quotas=np.minimum(self.sizes, np.ceil(self.quotas * factor).astype(np.int64)))

    def segments(self) -> Segments:
        """A cut of the pieces, one behind the other."""
        edges = np.concatenate([np.zeros(1, np.int64), self.sizes.cumsum()])
        return Segments(edges, self.quotas, self.keys, tuple((size,) for size in self.sizes.tolist()))

    def codec(self, values: str, numel: int, dtype: torch.dtype) -> Codec | None:
        """The format of their entries at positions in a span of ``numel`` elements; None if there are none."""
        if not self.quotas.sum():
            return None
        # gaps between pieces have no entries
        edges, entries = [0], []
        for (start, stop), quota in zip(self.runs.tolist(), self.quotas.tolist(), strict=True):
            if start > edges[-1]:
                edges.append(start)
                entries.append(0)
            edges.append(stop)
            entries.append(quota)
        if edges[-1] < numel:
            edges.append(numel)
            entries.append(0)
        return resolve_codec(f"eliasfano-{values}", numel, int(self.quotas.sum()), dtype, edges, entries)


class ShardedExchange(MultiPhaseExchange):
    """Every worker adds up the selections in its shard and delivers the largest sums.

    1. *Scatter*: each worker sends its selection in a shard to the owner of the shard: an all-to-all.
    2. *Select*: the owner adds these, in rank order, to the whole of its own residual and gradient there, and selects
       ``again`` times as many entries as each worker has sent.
    3. *Gather*: every worker gets the selections of all owners.

    About ``(1 + again) k`` entries are received, whatever the number of workers; an all-gather brings ``(P - 1) k``.

    What an owner does not deliver stays in its own residual, what others have sent it included: there is no second
    residual, and nothing is lost. Shards are pieces of tensors, the same in every plan. Both messages may have few
    bits: the error of the first stays with its sender, that of the second with the owner.

    Ok-Topk (:mod:`~lightning_safusion.comm.collectives.ok_allreduce`) reduces to owners too. What they do not deliver
    stays with its senders, shards and thresholds are agreed on by data, and sums are sent in float32.

    Args:
        spec, transport, device: See :class:`Exchange`; the transport needs all-to-all.
        wire: Wire format by name; positions are those of Elias and Fano.
        dtype: Dtype of the gradients; see :func:`resolve_codec`.
        segments: The cut of the span and the quotas; None if no element is selected.
    """

    few_bits = True
    cuts_tensors = True
    #: Entries that owners deliver, in entries that a worker sends.
    again = 3.0

    def __init__(
        self,
        spec: SpanSpec,
        transport: Transport,
        device: torch.device,
        wire: str,
        dtype: torch.dtype,
        segments: Segments | None,
    ) -> None:
        super().__init__(spec, transport, device)
        workers, values = transport.world_size, value_format(wire, dtype).name
        empty = Segments(np.zeros(1, np.int64), np.zeros(0, np.int64), (), ())
        pieces = Pieces.of(segments or empty, workers)
        self.segments = None if segments is None else pieces.segments()
        self._edges = device_constant(np.append(pieces.runs[:, 0], spec.numel), device)
        self._members = [np.flatnonzero(pieces.owners == owner).tolist() for owner in range(workers)]
        shards = [pieces.owned(owner) for owner in range(workers)]
        self._out = [shard.codec(values, spec.numel, dtype) for shard in shards]
        self._delivered = [shard.times(self.again).codec(values, spec.numel, dtype) for shard in shards]
        self._out[transport.rank] = None  # what it selects in its own shard is there
        own = shards[transport.rank]
        self._incoming = own.codec(values, spec.numel, dtype)
        self._runs: list[tuple[int, int]] = [(start, stop) for start, stop in own.runs.tolist()]
        self._history = History(own.times(self.again).segments())
        # int64 [M], where its pieces begin in the span, and how far they are from their place in the shard
        edges = self._history.segments.edges
        self._starts = device_constant(own.runs[:, 0].copy(), device)
        self._begins = device_constant(edges[:-1].copy(), device)
        self._shifts = device_constant(own.runs[:, 0] - edges[:-1], device)
        self._held = torch.zeros(int(edges[-1]), device=device)  # residual and gradient in its shard
        self._units: SpanUnits | None = None
        self._local = Entries.none(device)
        self._scattering: tuple[Tensor, Work] | None = None
        self._sent_parts: list[Entries] = []  # of other shards, as decoded

    def sent(self) -> tuple[Tensor, Tensor]:
        return self._sent

    def _pack(self, x: Tensor, part: Part) -> None:
        self._local, self._units = Entries.of(part.selection, self.device), part.units
        edges = self.spec.edges
        absent = [(edges[tensor], edges[tensor + 1]) for tensor in part.absent]
        at = 0
        for start, stop in self._runs:
            piece = self._held[at : at + stop - start]
            at += stop - start
            if any(a <= start and stop <= b for a, b in absent):
                piece.zero_()
            else:
                piece.copy_(x[start:stop])

    def _launch_first(self) -> None:
        if not self.spec.capacity:
            return
        places = torch.searchsorted(self._local.indices, self._edges).tolist()
        sizes, incoming = message_sizes(self._out), message_sizes([self._incoming] * self.transport.world_size)
        incoming[self.transport.rank] = 0
        message = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        self._sent_parts = []
        for members, codec, out in zip(self._members, self._out, message.split(sizes), strict=True):
            if codec is not None:
                part = joined([self._local[places[piece] : places[piece + 1]] for piece in members])
                part = part.largest(codec.capacity)  # a selection that keeps to the cut has no more
                values = codec.encode(Selection(part.indices, part.values, len(part)), out)
                self._sent_parts.append(Entries(part.indices, values))
        self._scattering = self._all_to_all(self.transport, message, sizes, incoming)

    def _finish(self) -> Entries:
        if self._scattering is None:
            return self._result  # the whole span is dense
        (received, work), self._scattering = self._scattering, None
        work.wait()
        sums = self._sums(received)
        delivered = self._largest(self._held.add_(sums))
        codecs, rank = self._delivered, self.transport.rank
        size = max(message_sizes(codecs))
        message = torch.zeros(size, dtype=torch.uint8, device=self.device)
        if (codec := codecs[rank]) is not None:
            out = message[: codec.nbytes]
            values = codec.encode(Selection(delivered.indices, delivered.values, len(delivered)), out)
            delivered = Entries(delivered.indices, values)
        every = torch.zeros(size * self.transport.world_size, dtype=torch.uint8, device=self.device)
        self.bytes_sent += size
        self.bytes_received += size * (self.transport.world_size - 1)
        self.transport.all_gather(every, message).wait()
        self._record(sums, delivered)
        lists = [
            Entries(*codec.decode(own[: codec.nbytes]))
            for own, codec in zip(every.view(-1, size), codecs, strict=True)
            if codec is not None
        ]
        return joined(lists)

    def _sums(self, received: Tensor) -> Tensor:
        """float32, what others have sent, added in rank order, by place in the shard."""
        sums = torch.zeros_like(self._held)
        if self._incoming is not None:
            for message in received.view(-1, self._incoming.nbytes):
                indices, values = self._incoming.decode(message)
                # padding has value 0, and may lie beside the shard
                piece = torch.searchsorted(self._starts, indices, right=True).sub_(1).clamp_(min=0)
                places = (indices - self._shifts[piece]).clamp_(0, len(sums) - 1)
                sums.index_add_(0, places, values)
        return sums

    def _largest(self, held: Tensor) -> Entries:
        """The largest elements of the shard, at positions in the span."""
        if not len(held):
            return Entries.none(self.device)
        compared = held if self._units is None else self._units.within(self._runs).weigh(held)
        selection = _TOP.select(compared, self._history.segments, 0, SpanSurvey(compared, self._history))
        chosen = Entries.of(selection, self.device)
        piece = torch.searchsorted(self._begins, chosen.indices, right=True).sub_(1)
        return Entries(chosen.indices + self._shifts[piece], held[chosen.indices])

    def _record(self, sums: Tensor, delivered: Entries) -> None:
        """Notes what leaves the residual: of other shards what was sent, of the own what is delivered but others'."""
        change = -sums
        piece = torch.searchsorted(self._starts, delivered.indices, right=True).sub_(1).clamp_(min=0)
        if len(change):
            change.index_add_(0, delivered.indices - self._shifts[piece], delivered.values)
        places = change.nonzero().view(-1)
        piece = torch.searchsorted(self._begins, places, right=True).sub_(1)
        own = Entries(places + self._shifts[piece], change[places])
        parts = joined([*self._sent_parts, own])
        self._sent = parts.indices, parts.values

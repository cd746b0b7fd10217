"""Shards: the parts of tensors that each worker owns, and what their owner does with them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.collectives.multiphase import Entries, message_sizes
from lightning_safusion.comm.exchange import aligned
from lightning_safusion.comm.wire.codec import Codec, spread
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.selection.select import largest
from lightning_safusion.sparsify.selection.survey import History, SpanSurvey
from lightning_safusion.sparsify.selection.torch_view import compact
from lightning_safusion.sparsify.selection.units import SpanUnits
from lightning_safusion.sparsify.selection.view import device_constant

# Tensors whose quota has so many entries for each worker are cut into pieces, one for each; others have one owner.
_LEAST = 4
# 2^32 over the golden ratio: multiples of it spread evenly, whatever distance tensors of one kind have in a model
# (Knuth, The Art of Computer Programming, volume 3, section 6.4).
_GOLDEN, _TURN = 2654435769, 32


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parts of segments, in order, and who owns them.

    Args:
        runs: int64 [M, 2], where each begins and ends in the span.
        quotas: int64 [M], entries of each.
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
            raise ValueError("shards with owners need a fixed number of entries for each: no quota='pooled'")
        runs, quotas, owners, keys = [], [], [], []
        for (start, stop), quota, key in zip(
            pairwise(segments.edges.tolist()), segments.quotas.tolist(), segments.keys, strict=True
        ):
            number = workers if quota >= _LEAST * workers else 1
            first = (key if isinstance(key, int) else start) * _GOLDEN % 2**_TURN * workers >> _TURN
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
        mine = ((self.owners == owner) & (self.quotas > 0)).nonzero()[0]
        keys = tuple(self.keys[place] for place in mine.tolist())
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


@dataclass(frozen=True, eq=False)
class Formats:
    """What workers send each other of a span whose pieces have owners: a function of the cut and their number.

    Args:
        first: Pieces with what a worker sends of each.
        second: The same with what their owners deliver.
        out: Formats of the entries for each owner; None: it gets none.
        delivered: Formats of those that each owner delivers.
        header: Bytes before the entries for an owner, for flags and notices.
    """

    first: Pieces
    second: Pieces
    out: list[Codec | None]
    delivered: list[Codec | None]
    header: int

    def nbytes(self, owner: int) -> int:
        """Bytes of the entries for an owner."""
        codec = self.out[owner]
        return 0 if codec is None else codec.nbytes

    def out_sizes(self, rank: int) -> list[int]:
        """Bytes that a worker sends to each owner; none to itself."""
        sizes = [aligned(self.header + self.nbytes(owner)) for owner in range(len(self.out))]
        sizes[rank] = 0
        return sizes

    @cached_property
    def delivered_size(self) -> int:
        """Bytes that every owner delivers: room for the most."""
        return max(message_sizes(self.delivered))

    def scattered(self, messages: Tensor, rank: int) -> list[Entries]:
        """Reads what a worker has sent to other owners, one message behind the other (uint8); with padding."""
        parts = zip(messages.split(self.out_sizes(rank)), self.out, strict=True)
        return [
            Entries(*codec.decode(out[self.header : self.header + codec.nbytes]))
            for out, codec in parts
            if codec is not None and len(out)
        ]

    def gathered(self, rows: Tensor) -> list[Entries]:
        """Reads what each owner has delivered (uint8 [workers, delivered_size]); with padding."""
        return [
            Entries.none(rows.device) if codec is None else Entries(*codec.decode(row[: codec.nbytes]))
            for codec, row in zip(self.delivered, rows, strict=True)
        ]


class Receiver(NamedTuple):
    """An owner that is sent something, the format of its message, and the message itself (uint8 [nbytes])."""

    owner: int
    codec: Codec
    memory: Tensor


class Routes:
    """Sends the entries of a span to the owners of their pieces.

    Args:
        pieces: Of all owners.
        numel: Elements of the span.
        receivers: Owners that are sent something, ascending.
    """

    def __init__(self, pieces: Pieces, numel: int, receivers: Sequence[Receiver]) -> None:
        self._receivers = receivers
        device = receivers[0].memory.device if receivers else torch.device("cpu")
        # int64 [M + 1]: where pieces begin, and their owners; what is behind them has none
        self._edges = device_constant(np.append(pieces.runs[:, 0], numel), device)
        self._owners = device_constant(np.append(pieces.owners, -1), device)

    def send(self, selection: Selection) -> list[Entries]:
        """Writes all messages; returns what is in them, as it will be decoded, owner by owner."""
        sent = []
        for owner, codec, memory in self._receivers:
            mine = self._within(owner, codec, selection)
            sent.append(Entries(spread(mine.indices, mine.count), codec.encode(mine, memory)))
        return sent

    def _within(self, owner: int, codec: Codec, selection: Selection) -> Selection:
        # in a fixed shape
        most = len(selection.indices)
        if not most:
            return Selection(selection.indices, selection.values, 0)
        piece = torch.searchsorted(self._edges, selection.indices, right=True).sub_(1)
        mine = (self._owners[piece] == owner) & (torch.arange(most, device=piece.device) < selection.count)
        chosen = compact(mine, min(codec.capacity, most))
        count = mine.sum().clamp_(max=len(chosen))
        return Selection(selection.indices[chosen], selection.values[chosen], count)


class Shard:
    """What one worker owns of a span, put together.

    Args:
        pieces: Where it lies, with the entries that it delivers.
        messages: uint8 [world_size - 1, nbytes], where those of others arrive, on its device.
        codec: Their format; None if others send nothing.
    """

    def __init__(self, pieces: Pieces, messages: Tensor, codec: Codec | None) -> None:
        self.runs: list[tuple[int, int]] = [(start, stop) for start, stop in pieces.runs.tolist()]
        self.device, self._messages, self._codec = messages.device, messages, codec
        self._history = History(pieces.segments())
        edges = self._history.segments.edges
        self._pieces = list(pairwise(edges.tolist()))
        # int64 [M]: where pieces begin in the span and in the shard, and how far apart that is
        self._starts = device_constant(pieces.runs[:, 0].copy(), self.device)
        self._begins = device_constant(edges[:-1].copy(), self.device)
        self._shifts = device_constant(pieces.runs[:, 0] - edges[:-1], self.device)

    @cached_property
    def _held(self) -> Tensor:
        """float32 [S], residual and gradient; where kernels do all of it, it is not needed."""
        return torch.zeros(self._history.segments.numel, dtype=torch.float32, device=self.device)

    def take(self, x: Tensor, absent: Sequence[tuple[int, int]]) -> None:
        """Copies its elements of a span (float32 [N]); zeros in place of what is absent."""
        if self.runs:
            torch.cat([x[start:stop] for start, stop in self.runs], out=self._held)
        self._leave_out(absent)

    def _leave_out(self, absent: Sequence[tuple[int, int]]) -> None:
        # a piece may have a part of what is absent only: selection after fusion cuts through tensors
        for (start, stop), (low, _) in zip(self.runs if absent else (), self._pieces, strict=False):
            for first, last in absent:
                if first < stop and start < last:
                    self._held[low + max(first, start) - start : low + min(last, stop) - start] = 0

    def summed(self) -> Tensor:
        """What others have sent, float32 [S], added up in rank order."""
        sums = torch.zeros_like(self._held)
        if self._codec is None or not len(self._messages):
            return sums
        for message in self._messages:
            indices, values = self._codec.decode(message)
            # padding may lie beside the shard: it adds its zeros elsewhere, no two at one place
            anywhere = torch.arange(len(indices), device=self.device)
            sums.index_add_(0, torch.where(values == 0, anywhere, self._places(indices)), values)
        return sums

    def largest(self, sums: Tensor, units: SpanUnits | None) -> Entries:
        """Adds the sums, and returns its largest elements, at positions in the span."""
        if not len(self._held):
            return Entries.none(self.device)
        self._held += sums
        compared = self._held if units is None else units.within(self.runs).weigh(self._held)
        return self._top(compared, SpanSurvey(compared, self._history))

    def _top(self, compared: Tensor, survey: SpanSurvey) -> Entries:
        selection = largest(compared, self._history.segments, survey)
        return self.in_span(Entries.of(selection, self.device).indices, self._held)

    def leaving(self, sums: Tensor, delivered: Entries) -> Entries:
        """What leaves the residual: what is delivered, without the sums, which are of others."""
        change = -sums
        if len(change):
            change.index_add_(0, self._places(delivered.indices), delivered.values)
        # the host does not wait to hear where a device has found something
        places = change.nonzero().view(-1) if change.is_cpu else torch.arange(len(change), device=self.device)
        return self.in_span(places, change)

    def _places(self, indices: Tensor) -> Tensor:
        return indices - self._shifts[torch.searchsorted(self._starts, indices, right=True).sub_(1).clamp_(min=0)]

    def in_span(self, places: Tensor, values: Tensor) -> Entries:
        """The values at places in the shard, at positions in the span."""
        piece = torch.searchsorted(self._begins, places, right=True).sub_(1)
        return Entries(places + self._shifts[piece], values[places])

"""Shards on the host: compiled kernels, and NumPy for short lists, where PyTorch takes several times as long."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.collectives.multiphase import Entries
from lightning_safusion.comm.collectives.shards import Pieces, Receiver, Routes, Shard
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Selection
from lightning_safusion.sparsify.selection.select import largest
from lightning_safusion.sparsify.selection.survey import Foresight, SpanSurvey
from lightning_safusion.sparsify.selection.units import SpanUnits

_BEHIND = np.iinfo(np.int64).max


class HostRoutes(Routes):
    """All messages in one pass."""

    def __init__(self, pieces: Pieces, numel: int, receivers: Sequence[Receiver]) -> None:
        super().__init__(pieces, numel, receivers)
        edges = np.append(pieces.runs[:, 0], numel)
        self._edges_as = {edges.dtype: edges}
        if numel < native.MOST_ELEMENTS:
            self._edges_as[np.dtype(np.int32)] = edges.astype(np.int32)
        order, owners = pieces.owners.argsort(kind="stable"), [receiver.owner for receiver in receivers]
        self._order = order[np.isin(pieces.owners[order], owners)]
        self._bounds = pieces.owners[self._order].searchsorted([*owners, _BEHIND])
        self._room = np.array([receiver.codec.capacity for receiver in receivers], np.int64)
        outgoing = [receiver.codec.outgoing(receiver.memory) for receiver in receivers]
        known = [each for each in outgoing if each is not None]
        self._outgoing = native.Together(known) if len(known) == len(outgoing) else None

    def send(self, selection: Selection) -> list[Entries]:
        count = int(selection.count)
        positions, values = selection.positions[:count].numpy(), selection.values[:count].numpy()
        places, counts = self._by_owner(positions)
        if (counts > self._room).any():
            places, counts = self._largest(places, counts, values)
        positions = positions[places]
        sent = self._written(positions, values[places], counts)
        return [Entries(torch.from_numpy(positions).long(), torch.from_numpy(sent))]

    def _written(self, positions: np.ndarray, values: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Writes every byte of all messages, each with so many entries; float32 [K], the values as decoded."""
        if self._outgoing is not None and native.usable():
            sent = native.empty(len(positions), np.float32)
            if native.write_messages(positions, values, counts, self._outgoing, sent):
                return sent
        parts = zip(*(torch.from_numpy(each).split(counts.tolist()) for each in (positions, values)), strict=True)
        coded = [
            codec.encode(Selection(where.long(), what, len(where)), out).numpy()
            for (_, codec, out), (where, what) in zip(self._receivers, parts, strict=True)
        ]
        return np.concatenate([np.empty(0, np.float32), *coded])

    def _by_owner(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places (int64) of the entries for each owner, ascending, one owner after the other; their numbers."""
        cuts = positions.searchsorted(self._edges_as[positions.dtype])
        starts, counts = cuts[self._order], np.diff(cuts)[self._order]
        ends = np.append(0, counts.cumsum())
        places = np.repeat(starts - ends[:-1], counts) + np.arange(ends[-1])
        return places, np.diff(ends[self._bounds])

    def _largest(self, places: np.ndarray, counts: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each owner the largest entries that it has room for; a selection that keeps to the cut has no more."""
        kept = []
        for own, room in zip(np.split(places, counts.cumsum()[:-1]), self._room.tolist(), strict=True):
            entries = Entries(torch.from_numpy(own), torch.from_numpy(values[own]))
            kept.append(entries.largest(room).indices.numpy())
        return np.concatenate(kept), np.minimum(counts, self._room)


class HostShard(Shard):
    """A shard on the host."""

    def __init__(self, pieces: Pieces, messages: Tensor, codec: Codec | None) -> None:
        super().__init__(pieces, messages, codec)
        segments = self._history.segments
        self._foresight = Foresight(self._history, segments.edges.tolist())
        self._edges_as = {np.dtype(kind): segments.edges.astype(kind) for kind in (np.int32, np.int64)}
        self._apart = pieces.runs[:, 0] - segments.edges[:-1]
        # where its pieces are in the span, and in what is held
        self._in_span = native.Parts.of(pieces.runs[:, 0].copy(), pieces.sizes)
        self._in_shard = native.Parts.between(segments.edges.tolist())
        self._inbox = None if codec is None else codec.inbox(messages)
        #: Most elements that change.
        self._room = segments.capacity + (0 if codec is None else codec.capacity * len(messages))

    @cached_property
    def _sums(self) -> Tensor:
        return torch.zeros_like(self._held)

    @cached_property
    def _pieces_of_sums(self) -> list[Tensor]:
        return list(self._sums.split(self._history.segments.sizes.tolist()))

    def take(self, x: Tensor, absent: Sequence[tuple[int, int]]) -> None:
        if self.runs:
            span = x.numpy()
            np.concatenate([span[start:stop] for start, stop in self.runs], out=self._held.numpy())
        self._leave_out(absent)

    def summed(self) -> Tensor:
        if self._inbox is None or not len(self._messages) or not native.serves(self._held):
            return super().summed()
        native.mean_into(self._pieces_of_sums, self._in_span, self._inbox(), 1.0)
        return self._sums

    def largest(self, sums: Tensor, units: SpanUnits | None) -> Entries:
        # in one pass, where the thresholds can be predicted
        wanted = self._foresight.wanted() if units is None and sums is self._sums else None
        if wanted is None:
            return super().largest(sums, units)
        added = native.add_finite(self._held, self._in_shard, self._pieces_of_sums, 1.0, wanted)
        for piece in added.left_out:
            self._held[slice(*self._pieces[piece])] += self._pieces_of_sums[piece]
        with self._foresight.known(self._held, added.found) as survey:
            return self._top(self._held, survey)

    def leaving(self, sums: Tensor, delivered: Entries) -> Entries:
        left = None
        if native.serves(sums):
            entries = delivered.indices.numpy(), delivered.values.numpy()
            left = native.leaving(sums.numpy(), self._in_span, *entries, self._room)
        if left is None:
            return super().leaving(sums, delivered)
        return Entries(*map(torch.from_numpy, left))

    def _top(self, compared: Tensor, survey: SpanSurvey) -> Entries:
        selection = largest(compared, self._history.segments, survey)
        places = selection.positions.numpy()
        cuts = places.searchsorted(self._edges_as[places.dtype])
        indices = places + self._apart.repeat(cuts[1:] - cuts[:-1])
        values = selection.values if compared is self._held else self._held[selection.indices]
        return Entries(torch.from_numpy(indices), values)

"""Exchanges of several phases, of which the later ones need the results of the earlier, and the lists they exchange."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_safusion.comm.collectives.allreduce import DenseLane
from lightning_safusion.comm.exchange import Exchange, Part, SpanSpec, Verdict, aligned
from lightning_safusion.comm.transport.interface import LaterWork, Transport, Work
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.sparsify.base import Selection, span_segments
from lightning_safusion.sparsify.selection.select import largest


@dataclass(frozen=True, eq=False)
class Entries:
    """Elements of a span. Their number is known to the host, so that on an accelerator most operations wait for it.

    Args:
        indices: int64 [K], unique and ascending.
        values: float32 [K].
    """

    indices: Tensor
    values: Tensor

    @classmethod
    def none(cls, device: torch.device) -> Entries:
        """No entries."""
        return cls(torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, dtype=torch.float32, device=device))

    @classmethod
    def of(cls, selection: Selection | None, device: torch.device) -> Entries:
        """What was selected, without padding."""
        if selection is None:
            return cls.none(device)
        count = int(selection.count)
        return cls(selection.indices[:count], selection.values[:count])

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, which: slice | Tensor) -> Entries:
        """Some of them: a slice, a mask (bool [K]) or ascending places (int64)."""
        return Entries(self.indices[which], self.values[which])

    def shifted(self, distance: int) -> Entries:
        """The same at positions that are ``distance`` higher."""
        return Entries(self.indices + distance, self.values)

    def cut(self, edges: Sequence[int]) -> list[Entries]:
        """The entries of each region ``[edges[j], edges[j + 1])``, positions counted from its start."""
        bounds = torch.tensor(edges, dtype=torch.int64, device=self.indices.device)
        places = torch.searchsorted(self.indices, bounds).tolist()
        return [self[low:high].shifted(-edge) for edge, low, high in zip(edges, places, places[1:], strict=False)]

    def largest(self, count: int) -> Entries:
        """The ``count`` entries of the largest magnitude, the first ones among equals; NaN counts as the largest."""
        if len(self) <= count:
            return self
        selection = largest(self.values, span_segments(len(self), count))
        return self[selection.indices[: int(selection.count)]]


def joined(parts: Sequence[Entries]) -> Entries:
    """Lists one behind the other; every position of a list must be above those of the lists before it."""
    return Entries(torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts]))


def summed(parts: Sequence[Entries], numel: int, device: torch.device) -> Entries:
    """The sum of lists of a region of ``numel`` elements, added one after the other; zeros are left out."""
    region = torch.zeros(numel, dtype=torch.float32, device=device)
    for part in parts:
        region.index_add_(0, part.indices, part.values)
    support = region.nonzero().view(-1)
    return Entries(support, region[support])


def encoded(parts: Sequence[Entries], codecs: Sequence[Codec | None], device: torch.device) -> tuple[Tensor, Entries]:
    """Messages one behind the other; where the codec is None there is nothing to send and no message.

    Returns:
        uint8 [sum of :func:`message_sizes`]; and all entries, at their positions, with the values that will be decoded.
    """
    message = torch.zeros(sum(message_sizes(codecs)), dtype=torch.uint8, device=device)
    sent = []
    for part, codec, out in zip(parts, codecs, message.split(message_sizes(codecs)), strict=True):
        values = part.values
        if codec is not None:
            values = codec.encode(Selection(part.indices, part.values, len(part)), out[: codec.nbytes])
        sent.append(Entries(part.indices, values))
    return message, joined(sent)


def decoded(message: Tensor, codecs: Sequence[Codec | None]) -> list[Entries]:
    """Reads what :func:`encoded` has written; zeros are left out, since padding looks the same."""
    lists = []
    for codec, part in zip(codecs, message.split(message_sizes(codecs)), strict=True):
        entries = Entries.none(message.device) if codec is None else Entries(*codec.decode(part[: codec.nbytes]))
        lists.append(entries[entries.values != 0])
    return lists


def message_sizes(codecs: Sequence[Codec | None]) -> list[int]:
    """Bytes of the messages, each of which begins where a device reads best; none where there is no codec."""
    return [0 if codec is None else aligned(codec.nbytes) for codec in codecs]


class MultiPhaseExchange(Exchange):
    """A sparse reduction in several phases, beside one dense all-reduce of flags, notices and dense pieces.

    :meth:`start` launches the phases that need no other. All others run when its work is waited for, which must be done
    in plan order on all ranks, as at the end of a window. Subclasses implement :meth:`_pack`, :meth:`_launch_first` and
    :meth:`_finish`; the sum over ranks that the last one returns must be the same on all ranks, bit for bit.
    """

    def __init__(self, spec: SpanSpec, transport: Transport, device: torch.device) -> None:
        super().__init__(spec, transport, device)
        self.lane = DenseLane(spec, transport, device)
        self._result = Entries.none(device)
        self._offered = Entries.none(device)  # this rank's part, as others have read it

    @abstractmethod
    def _pack(self, x: Tensor, part: Part) -> None:
        """Of :meth:`Exchange.encode`, the sparse part."""

    @abstractmethod
    def _launch_first(self) -> None:
        """Launches the phases that need no result of another."""

    @abstractmethod
    def _finish(self) -> Entries:
        """Runs all other phases; returns the sum over ranks that is delivered, without zeros."""

    def encode(self, x: Tensor, part: Part) -> None:
        self.lane.encode(x, part)
        self._pack(x, part)

    def start(self) -> Work:
        lane = self._start_lane()
        self._launch_first()

        def other_phases() -> None:
            lane.wait()
            self._result = self._finish()

        return LaterWork(other_phases)

    def _start_lane(self) -> Work:
        self.bytes_sent, self.bytes_received = self.lane.bytes_sent, self.lane.bytes_received
        return self.lane.start()

    def verdict(self) -> Verdict:
        return self.lane.verdict()

    def decode(self, scratch: Tensor) -> Tensor:
        scratch[self._result.indices] = self._result.values * (1.0 / self.transport.world_size)
        self._written = []
        self._note_written(self._result.indices)
        self.lane.copy_to(scratch)
        return scratch

    def sent(self) -> tuple[Tensor, Tensor]:
        # undelivered entries stay in the residual
        delivered = self._offered[torch.isin(self._offered.indices, self._result.indices, assume_unique=True)]
        return delivered.indices, delivered.values

    def sent_dense(self, start: int, stop: int, x: Tensor) -> Tensor:
        return self.lane.sent_dense(start, stop, x)

    def _all_to_all(
        self, transport: Transport, tensor: Tensor, sizes: Sequence[int], incoming: Sequence[int]
    ) -> tuple[Tensor, Work]:
        """Launches an all-to-all and counts its bytes; returns where the pieces of all ranks will be."""
        received = torch.zeros(sum(incoming), dtype=tensor.dtype, device=self.device)
        self.bytes_sent += tensor.nbytes
        self.bytes_received += (received.numel() - incoming[transport.rank]) * received.itemsize
        return received, transport.all_to_all(received, tensor, incoming, sizes)

    def _all_gather(self, transport: Transport, message: Tensor, incoming: Sequence[int]) -> Tensor:
        """All-gathers messages of any sizes as an all-to-all: libraries have none, or pad to the longest."""
        n = transport.world_size
        received, work = self._all_to_all(transport, message.repeat(n), [message.numel()] * n, incoming)
        self.bytes_sent -= (n - 1) * message.nbytes
        work.wait()
        return received

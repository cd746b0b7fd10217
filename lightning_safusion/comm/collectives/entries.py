"""Lists of entries of a span: what the ranks of a sparse reduction send to each other, add up and cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.sparsify.base import Selection, span_segments
from lightning_safusion.sparsify.topk import TopK

_TOP = TopK()


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
        return cls(torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device))

    @classmethod
    def of(cls, selection: Selection | None, device: torch.device) -> Entries:
        """What was selected, without padding."""
        if selection is None:
            return cls.none(device)
        count = int(selection.count)
        return cls(selection.indices[:count], selection.values[:count])

    def __len__(self) -> int:
        return len(self.indices)

    def shifted(self, distance: int) -> Entries:
        """The same at positions that are ``distance`` higher."""
        return Entries(self.indices + distance, self.values)

    def where(self, mask: Tensor) -> Entries:
        """Those for which ``mask`` (bool [K]) is true."""
        return Entries(self.indices[mask], self.values[mask])

    def among(self, others: Entries) -> Entries:
        """Those at positions that ``others`` has too."""
        return self.where(torch.isin(self.indices, others.indices, assume_unique=True))

    def cut(self, edges: Sequence[int]) -> list[Entries]:
        """The entries of each region ``[edges[j], edges[j + 1])``, positions counted from its start."""
        bounds = torch.tensor(edges, dtype=torch.int64, device=self.indices.device)
        places = torch.searchsorted(self.indices, bounds).tolist()
        return [
            Entries(self.indices[low:high] - edge, self.values[low:high])
            for edge, low, high in zip(edges, places, places[1:], strict=False)
        ]

    def largest(self, count: int) -> Entries:
        """The ``count`` entries of the largest magnitude, the first ones among equals; NaN counts as the largest."""
        if len(self) <= count:
            return self
        places = Entries.of(_TOP.select(self.values, span_segments(len(self), count), 0), self.values.device).indices
        return Entries(self.indices[places], self.values[places])


def joined(parts: Sequence[Entries]) -> Entries:
    """Lists one behind the other; every position of a list must be above those of the lists before it."""
    return Entries(torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts]))


def added(first: Entries, second: Entries) -> Entries:
    """The sum of two lists, which does not depend on their order, bit for bit."""
    both = torch.cat([first.indices, second.indices])
    indices, places = torch.unique(both, return_inverse=True)
    sums = torch.zeros(len(indices), device=both.device)
    sums.index_add_(0, places, torch.cat([first.values, second.values]))
    return Entries(indices, sums)


def summed(parts: Sequence[Entries], numel: int, device: torch.device) -> Entries:
    """The sum of lists of a region of ``numel`` elements, added one after the other; zeros are left out."""
    region = torch.zeros(numel, device=device)
    for part in parts:
        region.index_add_(0, part.indices, part.values)
    support = region.nonzero().view(-1)
    return Entries(support, region[support])


def encoded(parts: Sequence[Entries], codecs: Sequence[Codec | None], device: torch.device) -> tuple[Tensor, Entries]:
    """Messages one behind the other; where the codec is None there is nothing to send and no message.

    Returns:
        uint8 [sum of the codecs' sizes]; and all entries with the values that will be decoded, at the positions given.
    """
    message = torch.zeros(sum(message_sizes(codecs)), dtype=torch.uint8, device=device)
    sent = []
    for part, codec, out in zip(parts, codecs, message.split(message_sizes(codecs)), strict=True):
        values = part.values
        if codec is not None:
            values = codec.encode(Selection(part.indices, part.values, len(part)), out)
        sent.append(Entries(part.indices, values))
    return message, joined(sent)


def decoded(message: Tensor, codecs: Sequence[Codec | None]) -> list[Entries]:
    """Reads what :func:`encoded` has written; zeros are left out, since padding cannot be told from them."""
    lists = []
    for codec, part in zip(codecs, message.split(message_sizes(codecs)), strict=True):
        entries = Entries.none(message.device) if codec is None else Entries(*codec.decode(part))
        lists.append(entries.where(entries.values != 0))
    return lists


def message_sizes(codecs: Sequence[Codec | None]) -> list[int]:
    """Bytes of the messages."""
    return [0 if codec is None else codec.nbytes for codec in codecs]

"""The contract of a wire format: the selection of one span as bytes of a fixed size."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_safusion.comm.wire.values import Values
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Selection

#: Gives ascending positions (int64 [K]) and values (float32 [K]) of a message in the elements ``[start, stop)``.
Reader: TypeAlias = Callable[[int, int], tuple[Tensor, Tensor]]
#: Gives the messages of all ranks, as compiled kernels that are there read them; they hold until the next call.
Inbox: TypeAlias = Callable[[], native.Together[native.Message]]
#: Writes a selection; see :meth:`Codec.encode`.
Outbox: TypeAlias = Callable[[Selection, bool], Tensor]


class Codec(ABC):
    """Encodes the selection of one span into exactly ``nbytes`` bytes.

    The size is a function of the span and its capacity only, so that it is the same on all ranks. Encoding is
    deterministic and writes every byte; padding is zeros. Finite values too large for a 16-bit format saturate: the
    values that :meth:`encode` returns show the excess, so that it stays with the sender. NaN and infinities are sent
    unchanged.

    Args:
        numel: Elements of the span.
        capacity: Most elements that a selection may hold.
        values: The value format.
        edges: Where the parts of the span begin and end whose values share a scale.
        runs: Where each tensor that may have entries begins and ends, ascending.

    Attributes:
        name: ``"<layout>-<values>"``, for example ``"eliasfano-bf16"``.

    Raises:
        ValueError: If the capacity does not fit the span, or the format cannot carry the span or the values.
    """

    layout: ClassVar[str]
    #: Elements of the longest span.
    most_elements: ClassVar[float] = math.inf

    def __init__(
        self, numel: int, capacity: int, values: Values, edges: Sequence[int], runs: Sequence[tuple[int, int]]
    ) -> None:
        if not 0 <= capacity <= numel:
            raise ValueError(f"capacity must be between 0 and the {numel} elements of the span, got {capacity}")
        if numel > self.most_elements:
            raise ValueError(f"{self.layout} cannot address {numel} elements (2^31 or more): use eliasfano")
        self.numel, self.capacity, self.values = numel, capacity, values
        self.field = values.field(capacity, edges)
        self.name = f"{self.layout}-{values.name}"

    @property
    @abstractmethod
    def field_bytes(self) -> tuple[int, ...]:
        """Bytes of each field, in an order that aligns every field to its own element size."""

    @cached_property
    def nbytes(self) -> int:
        """Size of a message, bytes, a multiple of 4."""
        return -(-sum(self.field_bytes) // 4) * 4

    @cached_property
    def _split_sizes(self) -> list[int]:
        sizes = self.field_bytes
        return [*sizes, self.nbytes - sum(sizes)]

    def encode(self, selection: Selection, out: Tensor, *, echo: bool = True) -> Tensor:
        """Writes every byte of ``out`` (uint8 [nbytes], 4-byte aligned).

        Args:
            selection: What is sent.
            out: Is written.
            echo: Return the decoded values.

        Returns:
            float32 [L], one per entry of ``selection.indices``: the value as every receiver will decode it (padding 0).
            May be ``selection.values`` itself. Undefined without ``echo``.

        Raises:
            ValueError: If the selection exceeds the capacity, or ``out`` has another size.
        """
        self._check(out)
        return self._encode(selection, self._fields(out), echo)

    def _encode(self, selection: Selection, fields: Sequence[Tensor], echo: bool) -> Tensor:
        if selection.positions.numel() > self.capacity:
            raise ValueError(
                f"the selection has {selection.positions.numel()} entries, the message has room for {self.capacity}: "
                "cut the selection to the quotas of its segments"
            )
        count, entries = selection.count, len(selection.values)
        if isinstance(count, int) and count < entries:
            valid = Selection(selection.indices[:count], selection.values[:count], count)
            return pad(self._encode(valid, fields, echo), (0, entries - count))
        fields[-1].zero_()
        return self.write(selection, fields[:-1], echo)

    @abstractmethod
    def write(self, selection: Selection, fields: Sequence[Tensor], echo: bool) -> Tensor:
        """:meth:`encode` with the operations of PyTorch, into uint8 views of the fields.

        A selection has padding only if its count is a tensor.
        """

    def decode(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Reads a message (uint8 [nbytes], 4-byte aligned).

        Returns:
            ``(indices int64 [L], values float32 [L])``: positions in the span, and values; entries that are padding
            have value 0 and an index inside the span; no index is there more than twice. Valid ones are unique and
            ascending. On the CPU padding is cut off. Values may share the memory of the message.

        Raises:
            ValueError: If the message has another size or, on the CPU, is damaged.
        """
        self._check(message)
        return self.reader(message)(0, self.numel) if message.is_cpu else self.decode_padded(message)

    @abstractmethod
    def reader(self, message: Tensor) -> Reader:
        """Reads a message in host memory piece by piece, in any order.

        This call or a later one raises ValueError for a damaged message, before it reads out of bounds.
        """

    def inbox(self, messages: Tensor) -> Inbox | None:
        """Reads the messages in uint8 [ranks, nbytes] on the host, again in every step; None if kernels cannot."""
        return None

    def outbox(self, memory: Tensor) -> Outbox:
        """Writes messages into uint8 [nbytes] (4-byte aligned), again in every step: views of it are made once."""
        self._check(memory)
        fields, one = self._fields(memory), self.outgoing(memory) if memory.is_cpu else None
        outgoing = None if one is None else native.Together([one])

        def write(selection: Selection, echo: bool) -> Tensor:
            positions, values, count = selection.positions, selection.values, selection.count
            exact = isinstance(count, int) and count == len(positions)
            if outgoing is not None and (selection.compiled or (exact and native.serves(positions, values))):
                counts, sent = np.array([len(positions)]), native.empty(len(positions), np.float32) if echo else None
                if native.write_messages(positions.numpy(), values.numpy(), counts, outgoing, sent):
                    return values if sent is None else torch.from_numpy(sent)
            return self._encode(selection, fields, echo)

        return write

    def outgoing(self, memory: Tensor) -> native.Outgoing | None:
        """How compiled kernels write all of a message into uint8 [nbytes] on the host; None if they cannot."""
        return None

    @abstractmethod
    def decode_padded(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`decode` on any device: a fixed number of entries, so that the host need not know the count."""

    def _check(self, message: Tensor) -> None:
        if message.dtype != torch.uint8 or message.dim() != 1 or message.numel() != self.nbytes:
            raise ValueError(
                f"a {self.name} message for {self.capacity} of {self.numel} elements is uint8 [{self.nbytes}], "
                f"got {message.dtype} {list(message.shape)}"
            )

    def _fields(self, message: Tensor) -> tuple[Tensor, ...]:
        """Views of the fields, and of the padding that rounds the size up."""
        return message.split(self._split_sizes)

    def _write_values(self, selection: Selection, field: Tensor, echo: bool) -> Tensor:
        positions, count = selection.positions, selection.count
        if isinstance(count, int):
            return self.field.write(positions, selection.values, field, echo)
        if self.values.few_bits:  # those of a part are added up
            positions = spread(positions, count)
        return self._without_padding(self.field.write(positions, selection.values, field, echo), count)

    def _without_padding(self, values: Tensor, count: Tensor) -> Tensor:
        if not self.values.few_bits:  # others have a zero
            return values
        return torch.where(torch.arange(len(values), device=values.device) < count, values, 0.0)

    def _padded(self, indices: Tensor, field: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """The result of :meth:`decode_padded` from what it has found; ``count``: entries, one element."""
        indices = spread(indices, count)
        return indices, self._without_padding(self.field.read(indices, field), count)


def check_order(positions: np.ndarray, start: int, stop: int) -> None:
    """Raises ValueError if positions that a message has of the elements ``[start, stop)`` do not ascend there."""
    if len(positions) and (positions[0] < start or positions[-1] >= stop or not (positions[1:] > positions[:-1]).all()):
        raise ValueError(
            f"a message has positions of the elements {start} to {stop} that are not in ascending order among them: "
            "it is damaged"
        )


def check_damage(sound: bool, what: str) -> None:
    """Raises ValueError if a message is not sound."""
    if not sound:
        raise ValueError(f"a message {what}: it is damaged")


def marked(bitmap: np.ndarray) -> np.ndarray:
    """int64, ascending places of the bits that are set in bytes, of which the lowest comes first."""
    if native.usable():
        return native.marked(bitmap)
    return np.flatnonzero(np.unpackbits(bitmap, bitorder="little").view(np.bool_))


def blocks_of(count: int, length: int) -> int:
    """Blocks of ``length`` that ``count`` elements fill, the last one in part."""
    return -(-count // length)


def spread(indices: Tensor, count: int | Tensor) -> Tensor:
    """Positions (int64 [L]) with those of padding, behind the first ``count``, replaced by 0, 1, ...

    No position is there more than twice then. Additions to one element follow each other: to a hundred thousand they
    would, where each gets the same padding and algorithms are deterministic, take seconds.
    """
    if isinstance(count, int) and count == len(indices):
        return indices
    places = torch.arange(len(indices), device=indices.device)
    return torch.where(places < count, indices, places)


def positions_to_write(selection: Selection, padding: int) -> Tensor:
    """The positions of a selection, with ``padding`` behind the valid ones; int64, or int32 if they were found so."""
    if isinstance(selection.count, int):
        return selection.positions
    places = torch.arange(selection.indices.numel(), device=selection.indices.device)
    return selection.indices.masked_fill(places >= selection.count, padding)

"""Wire formats of offsets in blocks: those of most messages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.wire.codec import Codec, Inbox, Outbox, Reader, blocks_of, check_order, positions_to_write
from lightning_safusion.comm.wire.values import fill
from lightning_safusion.kernels import cpu as native
from lightning_safusion.kernels.cuda import serves
from lightning_safusion.sparsify.base import Selection


class BlockCodec(Codec):
    """Offsets in blocks of a fixed length, with a count for every block.

    Ascending positions are already in the order of the blocks, so that both directions are a few element-wise passes.
    """

    offset_bits: ClassVar[int]
    count_dtype: ClassVar[torch.dtype]

    @cached_property
    def blocks(self) -> int:
        """Number of blocks of the span."""
        return blocks_of(self.numel, 1 << self.offset_bits)

    @property
    def field_bytes(self) -> tuple[int, ...]:
        header = blocks_of(self.count_dtype.itemsize * self.blocks, 4) * 4  # what follows is aligned
        return header, self.field.nbytes, self.offset_bits // 8 * self.capacity

    def write(self, selection: Selection, fields: Sequence[Tensor], echo: bool) -> Tensor:
        header, values, offsets = fields
        # Padding lies behind the last block: it is counted in no block, and its low bits are 0.
        positions = positions_to_write(selection, padding=self.blocks << self.offset_bits)
        if native.serves(positions):
            counts, every = header.view(self.count_dtype).numpy(), self._host_offsets(offsets)
            native.write_offsets(positions.numpy(), counts[: self.blocks], every)
            counts[self.blocks :], every[len(positions) :] = 0, 0
        else:
            fill(header.view(self.count_dtype), self._block_counts(positions))
            fill(self._offsets(offsets), positions)  # the conversion keeps the low bits
        return self._write_values(selection, values, echo)

    def _offsets(self, field: Tensor) -> Tensor:
        return field.view(torch.int16) if self.offset_bits == 16 else field

    def _host_offsets(self, field: Tensor) -> np.ndarray:
        return field.numpy().view(np.uint16 if self.offset_bits == 16 else np.uint8)

    def _counts(self, header: Tensor) -> Tensor:
        return header.view(self.count_dtype).narrow(-1, 0, self.blocks)

    def reader(self, message: Tensor) -> Reader:
        header, values, offsets, _ = self._fields(message)
        counts, every = self._counts(header).numpy(), self._host_offsets(offsets)
        ends = native.ends_of(counts, len(every))

        def entry(position: int) -> int:
            """The first that is not before a position."""
            block, offset = position >> self.offset_bits, position & ((1 << self.offset_bits) - 1)
            if not offset:
                return int(ends[block])
            return int(ends[block] + every[ends[block] : ends[block + 1]].searchsorted(every.dtype.type(offset)))

        def between(start: int, stop: int) -> tuple[Tensor, Tensor]:
            low, high = start >> self.offset_bits, blocks_of(stop, 1 << self.offset_bits)
            first, last = entry(start), entry(stop)
            numbers = np.diff(np.clip(ends[low : high + 1], first, last))
            found = self._host_positions(every[first:last], numbers, low)
            check_order(found, start, stop)
            positions = torch.from_numpy(found)
            return positions, self.field.read(positions, values, first)

        return between

    def outbox(self, memory: Tensor) -> Outbox:
        return BlockOutbox(self, memory).write if memory.is_cpu else super().outbox(memory)

    def inbox(self, messages: Tensor) -> Inbox | None:
        headers, values, offsets, _ = messages.split(self._split_sizes, dim=1)
        counts, every = self._counts(headers).numpy(), self._host_offsets(offsets)
        ends = np.zeros((len(messages), self.blocks + 1), np.int64)
        found = [self.field.compiled(*message) for message in zip(values, every, ends, strict=True)]
        known = [message for message in found if message is not None]

        def read() -> list[native.Message]:
            counts.cumsum(1, out=ends[:, 1:])
            if counts.size and (counts.min() < 0 or ends[:, -1].max() > self.capacity):
                for each in counts:
                    native.ends_of(each, self.capacity)  # raises for the message that is damaged
            return known

        return read if len(known) == len(messages) else None

    def _host_positions(self, offsets: np.ndarray, counts: np.ndarray, first_block: int) -> np.ndarray:
        """int64 [K], of entries from offsets in some blocks (int64 [blocks], how many each has)."""
        if native.usable():
            return native.positions(offsets, counts, first_block)
        blocks = np.arange(first_block, first_block + len(counts))
        return offsets.astype(np.int64) + np.repeat(blocks << self.offset_bits, counts)

    def _block_counts(self, positions: Tensor) -> Tensor:
        """Entries of each block, from ascending positions."""
        edges = torch.arange(self.blocks + 1, device=positions.device) << self.offset_bits
        return torch.searchsorted(positions.long(), edges).diff()

    def decode_padded(self, message: Tensor) -> tuple[Tensor, Tensor]:
        header, field, offsets, _ = self._fields(message)
        counts = self._counts(header)
        indices = self._padded_indices(counts, self._offsets(offsets))
        return indices, self._read_padded(indices, field, lambda: counts.sum(dtype=torch.int64))

    def _padded_indices(self, counts: Tensor, offsets: Tensor) -> Tensor:
        if self.has_kernel and serves(counts.device):
            from lightning_safusion.kernels.cuda import wire  # imports Triton

            return wire.decode_block16(counts, offsets, self.capacity)
        block = torch.searchsorted(counts.cumsum(0), torch.arange(self.capacity, device=counts.device), right=True)
        # Padding is past the last end; as its offset is 0 it becomes the first element of the last block.
        block.clamp_(max=max(self.blocks - 1, 0))
        return (block << self.offset_bits) + (offsets.long() & ((1 << self.offset_bits) - 1))


class BlockOutbox:
    """Where a message is written in host memory; the views of its fields are made once."""

    def __init__(self, codec: BlockCodec, memory: Tensor) -> None:
        self._codec, self._memory = codec, memory
        header, self._values, offsets, self._rest = codec._fields(memory)
        every = header.view(codec.count_dtype).numpy()
        self._counts, self._unused_counts = every[: codec.blocks], every[codec.blocks :]
        self._offsets = codec._host_offsets(offsets)
        self._codes = codec.field.codes(self._values)

    def write(self, selection: Selection, echo: bool) -> Tensor:
        positions, values, count = selection.positions, selection.values, selection.count
        entries = len(positions)
        exact = isinstance(count, int) and count == entries <= self._codec.capacity
        if echo or not exact or not native.serves(positions, values):
            return self._codec.encode(selection, self._memory, echo=echo)
        host = positions.numpy()
        native.write_offsets(host, self._counts, self._offsets)
        self._unused_counts[:], self._offsets[entries:] = 0, 0
        self._rest.zero_()
        if self._codes is not None:
            self._values.zero_()
            if native.quantize(host, values.numpy(), self._codes):
                return values
        return self._codec.field.write(positions, values, self._values, False)


class Block16Codec(BlockCodec):
    """16-bit offsets in blocks of 65 536 elements."""

    layout = "block16"
    offset_bits = 16
    count_dtype = torch.int32


class Block8Codec(BlockCodec):
    """8-bit offsets in blocks of 256 elements: half the bits for positions at densities of some per cent."""

    layout = "block8"
    has_kernel = False
    offset_bits = 8
    count_dtype = torch.int16

"""Wire formats of offsets in blocks: those of most messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.wire.codec import Codec, Inbox, Reader, blocks_of, check_order, positions_to_write
from lightning_safusion.comm.wire.values import fill
from lightning_safusion.kernels import cpu as native
from lightning_safusion.kernels.cuda import serves
from lightning_safusion.sparsify.base import Selection


class BlockCodec(Codec):
    """Offsets in blocks of a fixed length, with a count for every block.

    Ascending positions are already in the order of the blocks, so that both directions are a few element-wise passes.
    """

    value_field = 1
    offset_bits: ClassVar[int]
    offset_dtype: ClassVar[torch.dtype]
    count_dtype: ClassVar[torch.dtype]

    @cached_property
    def blocks(self) -> int:
        """Number of blocks of the span."""
        return blocks_of(self.numel, 1 << self.offset_bits)

    @property
    def field_bytes(self) -> tuple[int, ...]:
        header = blocks_of(self.count_dtype.itemsize * self.blocks, 4) * 4  # so that the values are aligned
        return header, self.field.nbytes, self.offset_bits // 8 * self.capacity

    def write(self, selection: Selection, fields: Sequence[Tensor], echo: bool) -> Tensor:
        header, values, offsets = fields
        # Padding lies behind the last block: it is counted in no block, and its low bits are 0.
        positions = positions_to_write(selection, padding=self.blocks << self.offset_bits)
        if native.serves(positions):
            self.placer(fields)(positions.numpy())
        else:
            edges = torch.arange(self.blocks + 1, device=positions.device) << self.offset_bits
            fill(header.view(self.count_dtype), torch.searchsorted(positions.long(), edges).diff())
            # the conversion keeps the low bits
            fill(offsets.view(self.offset_dtype), positions)
        return self._write_values(selection, values, echo)

    def _offsets(self, field: Tensor) -> np.ndarray:
        return field.numpy().view(f"u{self.offset_bits // 8}")

    def _counts(self, header: Tensor) -> Tensor:
        return header.view(self.count_dtype).narrow(-1, 0, self.blocks)

    def reader(self, message: Tensor) -> Reader:
        header, values, offsets, _ = self._fields(message)
        counts, every = self._counts(header).numpy(), self._offsets(offsets)
        ends = np.zeros(self.blocks + 1, np.int64)
        self._add_up(counts, ends)

        def entry(position: int) -> int:
            """The first that is not before a position."""
            block, offset = position >> self.offset_bits, position & ((1 << self.offset_bits) - 1)
            if not offset:
                return int(ends[block])
            return int(ends[block] + every[ends[block] : ends[block + 1]].searchsorted(every.dtype.type(offset)))

        def between(start: int, stop: int) -> tuple[Tensor, Tensor]:
            low, high = start >> self.offset_bits, blocks_of(stop, 1 << self.offset_bits)
            first, last = entry(start), entry(stop)
            numbers: np.ndarray = np.diff(np.clip(ends[low : high + 1], first, last))
            if native.usable():
                found = native.positions(every[first:last], numbers, low)
            else:
                blocks = np.arange(low, high)
                found = every[first:last].astype(np.int64) + np.repeat(blocks << self.offset_bits, numbers)
            check_order(found, start, stop)
            positions = torch.from_numpy(found)
            return positions, self.field.read(positions, values, first)

        return between

    def _add_up(self, counts: np.ndarray, ends: np.ndarray) -> None:
        """Writes the entries before each block, and in all (int64 [..., blocks + 1]), from those in each block.

        Raises:
            ValueError: If a number is negative, or there are more entries than there is room for.
        """
        counts.cumsum(-1, out=ends[..., 1:])
        if counts.size and (counts.min() < 0 or ends[..., -1].max() > self.capacity):
            native.check_entries(int(ends[..., -1].max()), self.capacity)
            native.check_entries(int(counts.min()), self.capacity)

    def placer(self, fields: Sequence[Tensor]) -> Callable[[np.ndarray], None]:
        counts, every = fields[0].view(self.count_dtype).numpy(), self._offsets(fields[2])
        numbers, unused = counts[: self.blocks], counts[self.blocks :]

        def place(positions: np.ndarray) -> None:
            native.write_offsets(positions, numbers, every)
            unused[:], every[len(positions) :] = 0, 0

        return place

    def inbox(self, messages: Tensor) -> Inbox | None:
        headers, values, offsets, _ = messages.split(self._split_sizes, dim=1)
        counts, every = self._counts(headers).numpy(), self._offsets(offsets)
        ends = np.zeros((len(messages), self.blocks + 1), np.int64)
        found = [
            self.field.compiled(field, native.Places.in_blocks(own, before))
            for field, own, before in zip(values, every, ends, strict=True)
        ]
        known = [message for message in found if message is not None]

        def read() -> list[native.Message]:
            self._add_up(counts, ends)
            return known

        return read if len(known) == len(messages) else None

    def decode_padded(self, message: Tensor) -> tuple[Tensor, Tensor]:
        header, field, offsets, _ = self._fields(message)
        counts = self._counts(header)
        every = offsets.view(self.offset_dtype)
        if self.has_kernel and serves(message.device):
            from lightning_safusion.kernels.cuda import wire  # imports Triton

            indices = wire.decode_block16(counts, every, self.capacity)
        else:
            entries = torch.arange(self.capacity, device=message.device)
            block = torch.searchsorted(counts.cumsum(0), entries, right=True)
            block.clamp_(max=max(self.blocks - 1, 0))  # padding is past the last end
            indices = (block << self.offset_bits) + (every.long() & ((1 << self.offset_bits) - 1))
        return self._padded(indices, field, counts.sum(dtype=torch.int64))


class Block16Codec(BlockCodec):
    """16-bit offsets in blocks of 65 536 elements."""

    layout = "block16"
    offset_bits = 16
    offset_dtype = torch.int16
    count_dtype = torch.int32


class Block8Codec(BlockCodec):
    """8-bit offsets in blocks of 256 elements: half the bits for positions at densities of some per cent."""

    layout = "block8"
    has_kernel = False
    offset_bits = 8
    offset_dtype = torch.uint8
    count_dtype = torch.int16

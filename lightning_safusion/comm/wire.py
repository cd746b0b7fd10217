"""Wire formats: how a selection becomes bytes of a fixed size.

======== ================================================ ===================================
layout   positions                                        header
======== ================================================ ===================================
dense    none, the value of every element travels         none
block16  16-bit offset in a block of 65 536 elements      int32, entries of every block
coo      int32 position in the span                       int32, entries
bitmap   one bit for every element of the span            none
======== ================================================ ===================================

Coordinate lists are the common format of sparse gradients (Aji and Heafield, EMNLP 2017, section 3); bitmaps and
shorter index codes are compared by Xu et al. (DeepReduce, NeurIPS 2021, section 4). All formats here have a fixed rate:
the size of a message is known without looking at the gradient, and they need no serial pass over bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.codec import VALUE_DTYPES, Codec
from lightning_safusion.kernels import serves
from lightning_safusion.sparsify.base import Selection

_BLOCK_BITS = 16


class DenseCodec(Codec):
    """The value of every element and no positions: the smallest message at high density."""

    layout = "dense"
    has_kernel = False

    @property
    def field_bytes(self) -> tuple[int, ...]:
        return (self.numel * self.value_dtype.itemsize,)

    def write(self, selection: Selection, fields: Sequence[Tensor]) -> Tensor:
        (field,) = fields
        coded, sent = self._quantize(selection.values)
        # The place behind the span takes the padding, whose own positions are those of other entries.
        span = torch.zeros(self.numel + 1, dtype=self.value_dtype, device=selection.indices.device)
        positions = _positions(selection, padding=self.numel)
        span.index_copy_(0, positions, coded[: positions.numel()])
        field.view(self.value_dtype).copy_(span[:-1])
        return sent

    def decode_cut(self, message: Tensor) -> tuple[Tensor, Tensor]:
        return self.decode_padded(message)

    def decode_padded(self, message: Tensor) -> tuple[Tensor, Tensor]:
        field, _ = self._fields(message)
        return torch.arange(self.numel, device=message.device), self._read_values(field, self.numel)


class CooCodec(Codec):
    """int32 positions: the smallest message for a handful of entries in a very long span.

    Raises:
        ValueError: If the span has 2^31 elements or more.
    """

    layout = "coo"

    def __init__(self, numel: int, capacity: int, value_dtype: torch.dtype) -> None:
        super().__init__(numel, capacity, value_dtype)
        if numel >= 2**31:
            raise ValueError(f"coo cannot address {numel} elements (2^31 or more): use block16 or split the span")

    @property
    def field_bytes(self) -> tuple[int, ...]:
        return 4, 4 * self.capacity, self.value_dtype.itemsize * self.capacity

    def write(self, selection: Selection, fields: Sequence[Tensor]) -> Tensor:
        header, indices, values = fields
        coded, sent = self._quantize(selection.values)
        positions = _positions(selection, padding=0)
        if isinstance(selection.count, int):
            header.view(torch.int32).fill_(selection.count)
        else:
            header.view(torch.int32).copy_(selection.count)
        _fill(indices.view(torch.int32), positions)
        _fill(values.view(self.value_dtype), coded[: positions.numel()])
        return sent

    def decode_cut(self, message: Tensor) -> tuple[Tensor, Tensor]:
        return self._read(message, int(self._fields(message)[0].view(torch.int32)))

    def decode_padded(self, message: Tensor) -> tuple[Tensor, Tensor]:
        return self._read(message, self.capacity)

    def _read(self, message: Tensor, count: int) -> tuple[Tensor, Tensor]:
        _, indices, values, _ = self._fields(message)
        return indices.view(torch.int32)[:count].long(), self._read_values(values, count)


class Block16Codec(Codec):
    """16-bit offsets in blocks of 65 536 elements, with a count for every block.

    Ascending positions are already in the order of the blocks, so that both directions are a few element-wise passes.
    """

    layout = "block16"

    @cached_property
    def blocks(self) -> int:
        """Number of blocks of the span."""
        return _ceil(self.numel, 1 << _BLOCK_BITS)

    @property
    def field_bytes(self) -> tuple[int, ...]:
        return 4 * self.blocks, self.value_dtype.itemsize * self.capacity, 2 * self.capacity

    def write(self, selection: Selection, fields: Sequence[Tensor]) -> Tensor:
        header, values, offsets = fields
        coded, sent = self._quantize(selection.values)
        # Padding lies behind the last block: it is counted in no block, and its low 16 bits are 0.
        positions = _positions(selection, padding=self.blocks << _BLOCK_BITS)
        header.view(torch.int32).copy_(self._block_counts(positions))
        _fill(values.view(self.value_dtype), coded[: positions.numel()])
        _fill(offsets.view(torch.int16), positions)  # the conversion keeps the low 16 bits
        return sent

    def decode_cut(self, message: Tensor) -> tuple[Tensor, Tensor]:
        header, values, offsets, _ = self._fields(message)
        counts = header.numpy().view(np.int32)
        count = int(counts.sum())
        indices = offsets.numpy().view(np.uint16)[:count].astype(np.int64)
        if self.blocks > 1:
            indices += np.repeat(np.arange(self.blocks) << _BLOCK_BITS, counts)
        return torch.from_numpy(indices), self._read_values(values, count)

    def _block_counts(self, positions: Tensor) -> Tensor:
        """Entries of each block, from ascending positions; on the CPU a few NumPy calls cost half as much."""
        if positions.device.type == "cpu":
            ends = positions.numpy().searchsorted(np.arange(self.blocks + 1) << _BLOCK_BITS)
            return torch.from_numpy(ends[1:] - ends[:-1])
        edges = torch.arange(self.blocks + 1, device=positions.device) << _BLOCK_BITS
        return torch.searchsorted(positions, edges).diff()

    def decode_padded(self, message: Tensor) -> tuple[Tensor, Tensor]:
        header, values, offsets, _ = self._fields(message)
        if serves(message.device):
            from lightning_safusion.kernels import wire  # imports Triton

            indices = wire.decode_block16(header.view(torch.int32), offsets.view(torch.int16), self.capacity)
            return indices, self._read_values(values, self.capacity)
        ends = header.view(torch.int32).cumsum(0)
        block = torch.searchsorted(ends, torch.arange(self.capacity, device=message.device), right=True)
        # Padding is past the last end; as its offset is 0 it becomes the first element of the last block.
        block.clamp_(max=max(self.blocks - 1, 0))
        indices = (block << _BLOCK_BITS) + (offsets.view(torch.int16).long() & 0xFFFF)
        return indices, self._read_values(values, self.capacity)


class BitmapCodec(Codec):
    """One bit for every element of the span: smaller than 16-bit offsets above a density of 1/16."""

    layout = "bitmap"

    @property
    def field_bytes(self) -> tuple[int, ...]:
        return 4 * _ceil(self.numel, 32), self.value_dtype.itemsize * self.capacity

    def write(self, selection: Selection, fields: Sequence[Tensor]) -> Tensor:
        bits, values = fields
        coded, sent = self._quantize(selection.values)
        places = 8 * bits.numel()
        mask = torch.zeros(places + 1, dtype=torch.bool, device=selection.indices.device)
        positions = _positions(selection, padding=places)
        mask.index_fill_(0, positions, True)
        bits.copy_(_pack_bits(mask[:places]))
        _fill(values.view(self.value_dtype), coded[: positions.numel()])
        return sent

    def decode_cut(self, message: Tensor) -> tuple[Tensor, Tensor]:
        bits, values, _ = self._fields(message)
        indices = np.flatnonzero(np.unpackbits(bits.numpy(), bitorder="little").view(np.bool_))
        return torch.from_numpy(indices), self._read_values(values, len(indices))

    def decode_padded(self, message: Tensor) -> tuple[Tensor, Tensor]:
        bits, values, _ = self._fields(message)
        if serves(message.device):
            from lightning_safusion.kernels import wire  # imports Triton

            indices = wire.decode_bitmap(bits.view(torch.int32), self.capacity)
            return indices, self._read_values(values, self.capacity)
        shifts = torch.arange(8, dtype=torch.uint8, device=message.device)
        mask = ((bits[:, None] >> shifts) & 1).bool().view(-1)
        # The k-th set bit writes its position to place k; all others write to the place behind the last.
        places = torch.where(mask, mask.cumsum(0) - 1, self.capacity)
        indices = torch.zeros(self.capacity + 1, dtype=torch.int64, device=message.device)
        indices.scatter_(0, places, torch.arange(mask.numel(), device=message.device))
        return indices[:-1], self._read_values(values, self.capacity)


_CODECS: dict[str, type[Codec]] = {codec.layout: codec for codec in (DenseCodec, Block16Codec, BitmapCodec, CooCodec)}


def available_wires() -> tuple[str, ...]:
    """Names that :func:`resolve_codec` takes."""
    return ("auto", *VALUE_DTYPES, *(f"{layout}-{value}" for layout in _CODECS for value in VALUE_DTYPES))


def resolve_codec(wire: str, numel: int, capacity: int, grad_dtype: torch.dtype) -> Codec:
    """Chooses the format of a span's messages, from its size and capacity only.

    Args:
        wire: ``"auto"``: the smallest format that is lossless for the dtype of the gradients; ``"fp32"``, ``"bf16"`` or
            ``"fp16"``: the smallest format with these values; or a layout and values, such as ``"block16-bf16"``.
        numel: Elements of the span.
        capacity: Most elements that a selection may hold.
        grad_dtype: Dtype of the gradients; 16-bit gradients travel in their own dtype with ``"auto"``, all others in
            float32.

    Raises:
        ValueError: If the name is unknown, or the format cannot carry the span.
    """
    if wire not in available_wires():
        raise ValueError(f"unknown wire format {wire!r}; available: {', '.join(available_wires())}")
    layout, _, value = wire.rpartition("-")
    if layout:
        return _CODECS[layout](numel, capacity, VALUE_DTYPES[value])
    lossless = grad_dtype if grad_dtype in VALUE_DTYPES.values() else torch.float32
    value_dtype = lossless if wire == "auto" else VALUE_DTYPES[wire]
    layouts = [codec for codec in _CODECS.values() if codec is not CooCodec or numel < 2**31]
    return min((codec(numel, capacity, value_dtype) for codec in layouts), key=lambda codec: codec.nbytes)


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit)


def _positions(selection: Selection, padding: int) -> Tensor:
    """Positions to be written: the valid ones if the host knows how many, else all, with ``padding`` behind them."""
    if isinstance(selection.count, int):
        every = selection.count == selection.indices.numel()
        return selection.indices if every else selection.indices[: selection.count]
    places = torch.arange(selection.indices.numel(), device=selection.indices.device)
    return selection.indices.masked_fill(places >= selection.count, padding)


def _fill(field: Tensor, entries: Tensor) -> None:
    """Writes the entries into the front of a field, and zeros behind them."""
    used = entries.numel()
    if used < field.numel():
        field[used:].zero_()
        field = field[:used]
    field.copy_(entries)


def _pack_bits(mask: Tensor) -> Tensor:
    """Packs a bool mask, whose length is a multiple of 8, into bytes; the first element is the lowest bit."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))
    return _pack_bits_on_device(mask)


def _pack_bits_on_device(mask: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (mask.view(-1, 8).to(torch.uint8) << shifts).sum(1, dtype=torch.uint8)

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

from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.sparsify.base import Selection

_VALUE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_VALUE_NAMES = {dtype: name for name, dtype in _VALUE_DTYPES.items()}
_BLOCK_BITS = 16


class Codec(ABC):
    """Encodes the selection of one span into exactly ``nbytes`` bytes.

    The size is a function of the span and its capacity only, so that it is the same on all ranks without asking.
    Encoding is deterministic and writes every byte; padding is zeros. Finite values too large for a 16-bit format
    saturate: the values that :meth:`encode` returns show what was cut, so that it stays with the sender. NaN and
    infinities travel as they are.

    Args:
        numel: Elements of the span.
        capacity: Most elements that a selection may hold.
        value_dtype: float32, bfloat16 or float16 on the wire.

    Attributes:
        name: ``"<layout>-<values>"``, for example ``"block16-bf16"``.

    Raises:
        ValueError: If the capacity does not fit the span, or the format cannot carry the span or the dtype.
    """

    layout: ClassVar[str]

    def __init__(self, numel: int, capacity: int, value_dtype: torch.dtype) -> None:
        if not 0 <= capacity <= numel:
            raise ValueError(f"capacity must be between 0 and the {numel} elements of the span, got {capacity}")
        if value_dtype not in _VALUE_NAMES:
            raise ValueError(f"values travel as float32, bfloat16 or float16, got {value_dtype}")
        self.numel = numel
        self.capacity = capacity
        self.value_dtype = value_dtype
        self.name = f"{self.layout}-{_VALUE_NAMES[value_dtype]}"

    @property
    @abstractmethod
    def field_bytes(self) -> tuple[int, ...]:
        """Bytes of each field, in an order that aligns every field to its own element size."""

    @cached_property
    def nbytes(self) -> int:
        """Size of a message, bytes, a multiple of 4."""
        return _ceil(sum(self.field_bytes), 4) * 4

    @cached_property
    def _split_sizes(self) -> list[int]:
        """Bytes of the fields, and of what rounds the size up."""
        sizes = self.field_bytes
        return [*sizes, self.nbytes - sum(sizes)]

    @abstractmethod
    def encode(self, selection: Selection, out: Tensor) -> Tensor:
        """Writes every byte of ``out`` (uint8 [nbytes], 4-byte aligned).

        Returns:
            float32 [L], one per entry of ``selection.indices``: the value as every receiver will decode it (padding 0).
            May be ``selection.values`` itself.

        Raises:
            ValueError: If the selection exceeds the capacity, or ``out`` has another size.
        """

    def decode(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Reads a message (uint8 [nbytes], 4-byte aligned).

        Returns:
            ``(indices int64 [L], values float32 [L])``: positions in the span, and values; entries that are padding
            have value 0 and an index inside the span. Valid indices are unique and ascending. On the CPU padding is
            cut off. Values may share the memory of the message.

        Raises:
            ValueError: If the message has another size.
        """
        self._check(message)
        return self.decode_cut(message) if message.device.type == "cpu" else self.decode_padded(message)

    @abstractmethod
    def decode_cut(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`decode` of a message in host memory: as many entries as were sent."""

    @abstractmethod
    def decode_padded(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`decode` on any device: a fixed number of entries, so that the host need not know the count."""

    def _check(self, message: Tensor) -> None:
        if message.dtype != torch.uint8 or message.dim() != 1 or message.numel() != self.nbytes:
            raise ValueError(
                f"a {self.name} message for {self.capacity} of {self.numel} elements is uint8 [{self.nbytes}], "
                f"got {message.dtype} {list(message.shape)}"
            )

    def _open(self, out: Tensor, selection: Selection) -> tuple[Tensor, ...]:
        """Views of the fields of a message that is to carry ``selection``; the bytes behind them are zeroed."""
        self._check(out)
        if selection.indices.numel() > self.capacity:
            raise ValueError(
                f"the selection has {selection.indices.numel()} entries, the message has room for {self.capacity}: "
                "cut the selection to the quotas of its segments"
            )
        *fields, tail = self._fields(out)
        if self._split_sizes[-1]:
            tail.zero_()
        return tuple(fields)

    def _fields(self, message: Tensor) -> tuple[Tensor, ...]:
        """Views of the fields, and of the bytes that round the size up."""
        return message.split(self._split_sizes)

    def _quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Values (float32 [L]) in the dtype of the wire, and the same as float32."""
        if self.value_dtype == torch.float32:
            return values, values
        limit = torch.finfo(self.value_dtype).max
        # Clamping an infinity would hide an overflow that the training loop must see.
        coded = torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(self.value_dtype)
        return coded, coded.float()

    def _read_values(self, field: Tensor, count: int) -> Tensor:
        values = field.view(self.value_dtype)
        return (values if count == len(values) else values[:count]).float()


class DenseCodec(Codec):
    """The value of every element and no positions: the smallest message at high density."""

    layout = "dense"

    @property
    def field_bytes(self) -> tuple[int, ...]:
        return (self.numel * self.value_dtype.itemsize,)

    def encode(self, selection: Selection, out: Tensor) -> Tensor:
        (field,) = self._open(out, selection)
        coded, sent = self._quantize(selection.values)
        # The place behind the span takes the padding, whose own positions are those of other entries.
        span = torch.zeros(self.numel + 1, dtype=self.value_dtype, device=out.device)
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

    def encode(self, selection: Selection, out: Tensor) -> Tensor:
        header, indices, values = self._open(out, selection)
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

    def encode(self, selection: Selection, out: Tensor) -> Tensor:
        header, values, offsets = self._open(out, selection)
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

    def encode(self, selection: Selection, out: Tensor) -> Tensor:
        bits, values = self._open(out, selection)
        coded, sent = self._quantize(selection.values)
        places = 8 * bits.numel()
        mask = torch.zeros(places + 1, dtype=torch.bool, device=out.device)
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
    return ("auto", *_VALUE_DTYPES, *(f"{layout}-{value}" for layout in _CODECS for value in _VALUE_DTYPES))


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
        return _CODECS[layout](numel, capacity, _VALUE_DTYPES[value])
    lossless = grad_dtype if grad_dtype in _VALUE_NAMES else torch.float32
    value_dtype = lossless if wire == "auto" else _VALUE_DTYPES[wire]
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

"""Wire formats: how a selection becomes bytes of a fixed size.

========= ================================================ ===================================
layout    positions                                        header
========= ================================================ ===================================
eliasfano quotients in unary, remainders in binary         uint32, entries before every region
coo       int32 position in the span                       int32, entries
bitmap    one bit for every element of the span            none
========= ================================================ ===================================

Coordinate lists are the common format of sparse gradients (Aji and Heafield, EMNLP 2017, section 3); bitmaps and
shorter index codes are compared by Xu et al. (DeepReduce, NeurIPS 2021, section 4). All formats here have a fixed rate:
the size of a message is known without looking at the gradient, and they need no serial pass over bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.wire.codec import Codec, Reader, blocks_of, check_order, marked, positions_to_write
from lightning_safusion.comm.wire.elias_fano import EliasFanoCodec
from lightning_safusion.comm.wire.values import VALUES, Values, fill, packed, scale_edges, unpacked
from lightning_safusion.kernels import cpu as native
from lightning_safusion.kernels.fields import MESSAGE_BYTES
from lightning_safusion.lookup import look_up
from lightning_safusion.sparsify.base import Selection
from lightning_safusion.sparsify.selection.torch_view import find_marked


class CooCodec(Codec):
    """int32 positions: the smallest message for a handful of entries in a very long span."""

    layout = "coo"
    most_elements = 2**31 - 1

    @property
    def field_bytes(self) -> tuple[int, ...]:
        return 4, 4 * self.capacity, self.field.nbytes

    def write(self, selection: Selection, fields: Sequence[Tensor], echo: bool) -> Tensor:
        header, indices, values = fields
        positions = positions_to_write(selection, padding=0)
        header.view(torch.int32)[:] = selection.count
        fill(indices.view(torch.int32), positions)
        return self._write_values(selection, values, echo)

    def reader(self, message: Tensor) -> Reader:
        header, indices, values, _ = self._fields(message)
        count = int(header.view(torch.int32))
        native.check_entries(count, self.capacity)
        every = indices.view(torch.int32)[:count]
        check_order(every.numpy(), 0, self.numel)

        def between(start: int, stop: int) -> tuple[Tensor, Tensor]:
            first, last = every.numpy().searchsorted(np.array([start, stop], np.int32))
            positions = every[first:last].long()
            return positions, self.field.read(positions, values, int(first))

        return between

    def decode_padded(self, message: Tensor) -> tuple[Tensor, Tensor]:
        header, indices, values, _ = self._fields(message)
        return self._padded(indices.view(torch.int32).long(), values, header.view(torch.int32))


class BitmapCodec(Codec):
    """One bit for every element of the span: the smallest message at high density."""

    layout = "bitmap"

    @property
    def field_bytes(self) -> tuple[int, ...]:
        return 4 * blocks_of(self.numel, 32), self.field.nbytes

    def write(self, selection: Selection, fields: Sequence[Tensor], echo: bool) -> Tensor:
        bits, values = fields
        places = 8 * bits.numel()
        positions = positions_to_write(selection, padding=places)
        if native.serves(positions):
            native.mark(positions.numpy(), bits.numpy())
            return self._write_values(selection, values, echo)
        mask = torch.zeros(places + 1, dtype=torch.bool, device=positions.device)
        mask.index_fill_(0, positions.long(), True)
        bits.copy_(packed(mask[:places].view(torch.uint8), 1))
        return self._write_values(selection, values, echo)

    def reader(self, message: Tensor) -> Reader:
        bits, values, _ = self._fields(message)
        every = bits.numpy()
        known = (0, 0)  # bytes, and entries in them

        def between(start: int, stop: int) -> tuple[Tensor, Tensor]:
            nonlocal known
            low, high = start >> 3, blocks_of(stop, 8)
            if low < known[0]:
                known = (0, 0)
            known = low, known[1] + _number_marked(every[known[0] : low])
            indices = marked(every[low:high])
            native.check_entries(known[1] + len(indices), self.capacity)
            indices += low << 3
            first, last = indices.searchsorted([start, stop]).tolist()
            positions = torch.from_numpy(indices[first:last])
            return positions, self.field.read(positions, values, known[1] + first)

        return between

    def decode_padded(self, message: Tensor) -> tuple[Tensor, Tensor]:
        bits, field, _ = self._fields(message)
        indices, count = find_marked(unpacked(bits, 1).bool(), self.capacity)
        return self._padded(indices, field, count)


_LOSSLESS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_CODECS: dict[str, type[Codec]] = {codec.layout: codec for codec in (EliasFanoCodec, BitmapCodec, CooCodec)}
#: Layouts of earlier versions, whose messages were no smaller than those of another.
_GONE = {"block16": "eliasfano", "block8": "eliasfano", "dense": "bitmap"}

# The format that kernels of devices write is taken unless another is smaller by a ninth; a 25th if values are large.
_SERVED, _SERVED_LARGE = 8 / 9, 24 / 25


def available_wires() -> tuple[str, ...]:
    """Names that :func:`resolve_codec` takes."""
    return ("auto", *VALUES, *(f"{layout}-{values}" for layout, values in itertools.product(_CODECS, VALUES)))


def value_format(wire: str, grad_dtype: torch.dtype = torch.float32) -> Values:
    """The value format of a wire format; see :func:`resolve_codec`.

    Raises:
        ValueError: If the name is unknown, or its layout is no more.
    """
    layout, _, values = wire.rpartition("-")
    if layout in _GONE and values in VALUES:
        better = f"{_GONE[layout]}-{values}"
        raise ValueError(f"wire={wire!r} is no more: use {better!r}, or {values!r} for the smallest layout")
    look_up("wire format", wire, dict.fromkeys(available_wires()))
    return VALUES[_LOSSLESS.get(grad_dtype, "fp32") if wire == "auto" else values]


def message_bytes(wire: str, numel: int, entries: int, grad_dtype: torch.dtype = torch.float32) -> int:
    """Bytes of a message with so many entries of so many elements; see :func:`resolve_codec`."""
    return resolve_codec(wire, numel, entries, grad_dtype).nbytes


def resolve_codec(
    wire: str,
    numel: int,
    capacity: int,
    grad_dtype: torch.dtype,
    edges: Sequence[int] | None = None,
    entries: Sequence[int] | None = None,
) -> Codec:
    """Chooses the format of a span's messages, from its size and capacity only.

    Args:
        wire: ``"auto"``: the smallest format that is lossless for the dtype of the gradients; ``"fp32"``, ``"bf16"``,
            ``"fp16"``, ``"q4"``, ``"q2"`` or ``"sign"``: the smallest format with these values; or a layout and values,
            such as ``"eliasfano-bf16"``.
        numel: Elements of the span.
        capacity: Most elements that a selection may hold.
        grad_dtype: Dtype of the gradients; 16-bit gradients are sent in their own dtype with ``"auto"``, all others in
            float32.
        edges: Where the tensors of the span begin and end; by default it is one tensor.
        entries: Most entries of each tensor, if they are known.

    Raises:
        ValueError: If the name is unknown, or the format cannot carry the span.
    """
    values, layout = value_format(wire, grad_dtype), wire.rpartition("-")[0]
    edges = (0, numel) if edges is None else edges
    some = itertools.repeat(1) if entries is None else entries
    runs = [run for run, own in zip(itertools.pairwise(edges), some, strict=False) if own and run[0] < run[1]]
    shared = scale_edges(edges, entries, capacity) if values.few_bits else edges
    shape = numel, capacity, values, shared, runs
    if layout:
        return _CODECS[layout](*shape)
    layouts = [codec for codec in _CODECS.values() if numel <= codec.most_elements]
    # what a message is rounded up to anyway is no reason to leave the format that has kernels on devices
    unit, factor = (MESSAGE_BYTES, _SERVED) if values.few_bits else (1, _SERVED_LARGE)
    weight = {EliasFanoCodec.layout: factor}
    return min(
        (codec(*shape) for codec in layouts),
        key=lambda codec: math.ceil(codec.nbytes * weight.get(codec.layout, 1) / unit),
    )


def _number_marked(bitmap: np.ndarray) -> int:
    return native.number_marked(bitmap) if native.usable() else int(np.unpackbits(bitmap).sum())

"""Messages of :mod:`lightning_safusion.comm.wire.formats` written and read by one or two launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from lightning_safusion.kernels.cuda import messages
from lightning_safusion.kernels.cuda.launch import launch
from lightning_safusion.sparsify.base import Selection

_BLOCK = 1024  # entries, or words of a bitmap, that a program handles at a time
_WORDS = 256  # of a bitmap, that a program counts at a time
_READ = 64  # and that it reads at a time
PROGRAMS = 1024
_ENCODERS = {"coo": messages.encode_coo, "block16": messages.encode_block16, "bitmap": messages.encode_bitmap}


def encode(layout: str, selection: Selection, fields: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Writes every byte of a message.

    Args:
        layout: ``"coo"``, ``"block16"`` or ``"bitmap"``.
        selection: What is sent; no more entries than there is room for.
        fields: uint8 views of the fields of the message, and of the bytes that round its size up.
        dtype: Of the values on the wire.

    Returns:
        float32, one per entry: the value as it will be decoded.
    """
    header, field = fields[0].view(torch.int32), fields[2 if layout == "coo" else 1]
    values = field.view(torch.int16 if dtype == torch.bfloat16 else dtype)  # a kernel writes bfloat16 as bits
    known, entries = isinstance(selection.count, int), selection.indices.numel()
    sizes = [int(selection.count) if known else 0, entries, len(values)]
    if layout == "coo":
        arrays = [header, fields[1].view(torch.int32), values]
    else:
        arrays = [header, values, fields[2].view(torch.int16)] if layout == "block16" else [header, values]
        sizes += [len(header), max(entries, 1).bit_length()]  # regions or words, found by bisection
    narrow = dtype != torch.float32
    sent = torch.empty(entries, dtype=torch.float32, device=values.device) if narrow else selection.values
    given = (selection.indices.contiguous(), selection.values.contiguous())
    count = selection.indices if known else selection.count
    options = {"KNOWN": known, "LIMIT": torch.finfo(dtype).max if narrow else 0, "TAIL": fields[-1].numel() > 0}
    programs = triton.cdiv(max(len(values), len(header), 1), _BLOCK)
    launch(_ENCODERS[layout], programs, *given, count, *arrays, sent, *sizes, **options, BLOCK=_BLOCK)
    return sent


def decode_block16(header: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    """int64 [capacity], positions from the entries of blocks of 65 536 (int32) and offsets in the blocks (int16)."""
    indices = torch.empty(capacity, dtype=torch.int64, device=header.device)
    regions = len(header)
    sizes = {"REGIONS": triton.next_power_of_2(regions), "BLOCK": _BLOCK}
    launch(messages.decode_block16, regions, header, offsets, indices, regions, capacity, **sizes)
    return indices


def decode_bitmap(words: Tensor, capacity: int) -> Tensor:
    """int64 [capacity], positions of the bits set in ``words`` (int32), then zeros."""
    indices = torch.empty(capacity, dtype=torch.int64, device=words.device)
    length = len(words)
    width = triton.cdiv(length, PROGRAMS * _WORDS) * _WORDS
    programs = triton.cdiv(length, width) if length else 0
    counts = torch.empty(programs, dtype=torch.int32, device=words.device)
    launch(messages.count_bits, programs, words, counts, length, width, BLOCK=_WORDS)
    sizes = {"PROGRAMS": triton.next_power_of_2(programs), "BLOCK": _READ}
    launch(messages.decode_bitmap, programs, words, counts, indices, length, width, programs, capacity, **sizes)
    return indices

"""Wire formats: positions as offsets in blocks, values as codes of a few bits, and back."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lightning_safusion.native.library import call
from lightning_safusion.native.workspace import empty


class Message(NamedTuple):
    """What a rank has sent, as it has travelled.

    Args:
        offsets: uint8 or uint16 [K or more], in blocks of 256 or 65536 elements; int64: positions in the span.
        ends: int64 [blocks + 1], entries before each block, and in all.
        values: float32 or uint16 (the bits of bfloat16) [K or more], or uint8, codes as :func:`quantized` gives them.
        bits: Of a value.
        scales: uint16 [P], of codes: bits of a bfloat16 for each part.
        starts: int64 [P], the first position of each part, ascending.
    """

    offsets: np.ndarray
    ends: np.ndarray
    values: np.ndarray
    bits: int
    scales: np.ndarray = np.empty(0, np.uint16)
    starts: np.ndarray = np.empty(0, np.int64)

    @classmethod
    def decoded(cls, indices: Tensor, values: Tensor) -> Message:
        """Ascending positions (int64 [K]) and values (float32 [K])."""
        return cls(indices.numpy(), np.array([0, len(indices)]), values.contiguous().numpy(), 32)

    def described(self) -> list[int]:
        """``struct message``; holds as long as this does."""
        addresses = [array.ctypes.data for array in (self.offsets, self.ends, self.values, self.scales, self.starts)]
        offsets, ends, values, scales, starts = addresses
        blocks = (offsets, 8 * self.offsets.itemsize, ends, len(self.ends) - 1)
        return [*blocks, values, self.bits, scales, starts, len(self.starts)]


def ends_of(counts: np.ndarray, room: int) -> np.ndarray:
    """Entries before each block, and in all (int64 [blocks + 1]), from those in each.

    Raises:
        ValueError: If some are negative, or there are more than there is room for.
    """
    ends = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=ends[1:])
    if len(counts) and (counts.min() < 0 or ends[-1] > room):
        raise ValueError(f"a message with {ends[-1]} entries has room for {room}: it is damaged")
    return ends


def take_out_message(memory: Tensor, message: Message) -> None:
    """``memory[position] -= value`` for what was sent: float32 [D], contiguous."""
    described = np.array(message.described(), np.int64)
    call("safusion_add_message", described, len(memory), ctypes.c_float(-1), memory.numpy())


def positions(offsets: np.ndarray, counts: np.ndarray, first_block: int = 0) -> np.ndarray:
    """Positions (int64 [K]) from offsets (uint8 or uint16 [K or more]) in blocks of 256 or 65536 elements.

    Args:
        offsets: Those of the first block, of the second, and so on.
        counts: Entries of each block.
        first_block: Which block that is.

    Raises:
        ValueError: If there are fewer offsets than entries.
    """
    number = int(counts.sum())
    if not 0 <= number <= len(offsets):
        raise ValueError(f"a message with {number} entries has room for {len(offsets)}: it is damaged")
    found = empty(number, np.int64)
    call("safusion_positions", offsets, 8 * offsets.itemsize, counts.astype(np.int64), len(counts), first_block, found)
    return found


def write_offsets(positions: np.ndarray, counts: np.ndarray, offsets: np.ndarray) -> None:
    """The inverse of :func:`positions`.

    Args:
        positions: int32 or int64 [K], not negative; what lies behind the last block is counted in none.
        counts: int16 or int32 [blocks], is written: entries of each block of 256 or 65536 elements.
        offsets: uint8 or uint16 [K or more], the first K are written.
    """
    counts[:] = 0
    call("safusion_offsets", *_described(positions), 8 * offsets.itemsize, len(counts), counts, offsets)


def number_marked(bitmap: np.ndarray) -> int:
    """How many bits are set in a bitmap (uint8 [B])."""
    return call("safusion_marked", bitmap, len(bitmap), None)


def marked(bitmap: np.ndarray) -> np.ndarray:
    """Ascending places (int64 [K]) of the bits that are set in a bitmap (uint8 [B], the lowest bit of a byte first)."""
    found = empty(number_marked(bitmap), np.int64)
    call("safusion_marked", bitmap, len(bitmap), found)
    return found


def mark(positions: np.ndarray, bitmap: np.ndarray) -> None:
    """The inverse of :func:`marked`: writes the whole bitmap; positions (int32 or int64 [K]) behind its end are left
    out."""
    bitmap[:] = 0
    call("safusion_mark", *_described(positions), 8 * len(bitmap), bitmap)


class Quantized(NamedTuple):
    """Values in a few bits.

    Args:
        codes: uint8, a multiple of 8 codes: of each a level, and the sign in the highest bit.
        scales: uint16 [P], bits of a bfloat16 for each part.
        values: float32 [K], what the codes stand for.
    """

    codes: np.ndarray
    scales: np.ndarray
    values: np.ndarray


def quantized(positions: np.ndarray, values: np.ndarray, starts: np.ndarray, bits: int) -> Quantized | None:
    """Codes of values relative to the largest magnitude of their part; with one bit, to twice the mean magnitude.

    Args:
        positions: int32 or int64 [K].
        values: float32 [K].
        starts: int64 [P], the first position of each part, ascending.
        bits: Of a code: 1, 2 or 4.

    Returns:
        None if positions do not ascend, or something is not finite, or would not be in bfloat16.
    """
    codes = np.zeros(-(-len(values) // 8) * bits, np.uint8)
    scales, sent = np.empty(len(starts), np.uint16), empty(len(values), np.float32)
    done = call("safusion_quantize", *_described(positions), values, starts, len(starts), bits, codes, scales, sent)
    return Quantized(codes, scales, sent) if done else None


def values(
    positions: np.ndarray, starts: np.ndarray, codes: np.ndarray, scales: np.ndarray, bits: int, first: int = 0
) -> np.ndarray | None:
    """What :func:`quantized` codes stand for, float32 [K]; None if positions (int64 [K]) do not ascend.

    Args:
        positions: int64 [K].
        starts: int64 [P], the first position of each part, ascending.
        codes: uint8.
        scales: uint16 [P], bits of a bfloat16 for each part.
        bits: Of a code: 1, 2 or 4.
        first: How many codes there are before that of the first position.

    Raises:
        ValueError: If there are fewer codes than positions, or another number of scales than of parts.
    """
    if len(codes) * 8 // bits < first + len(positions) or len(scales) != len(starts):
        sizes = f"{len(codes)} bytes of codes and {len(scales)} scales"
        raise ValueError(f"a message of {sizes} is damaged: {len(positions)} entries in {len(starts)} parts")
    found = empty(len(positions), np.float32)
    count, parts = len(positions), len(starts)
    done = call("safusion_values", positions, count, starts, parts, bits, codes, first, scales, found)
    return found if done else None


def _described(positions: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Positions, their bits, and how many there are."""
    return positions, 8 * positions.itemsize, len(positions)

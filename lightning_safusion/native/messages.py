"""Wire formats: positions from offsets in blocks, codes of a few bits and back."""

from __future__ import annotations

import numpy as np

from lightning_safusion.native.library import call


def positions(offsets: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Positions (int64 [K]) from offsets (uint8 or uint16 [K or more]) in blocks of 256 or 65536 elements.

    Args:
        offsets: Those of the first block, of the second, and so on.
        counts: Entries of each block.

    Raises:
        ValueError: If there are fewer offsets than entries.
    """
    found = np.empty(_number(counts, len(offsets)), np.int64)
    call("safusion_positions", offsets, 8 * offsets.itemsize, counts.astype(np.int64), len(counts), found)
    return found


def codes(values: np.ndarray, scales: np.ndarray, counts: np.ndarray, bits: int) -> np.ndarray:
    """Signs and levels of values, packed: uint8, a multiple of 8 bits of each.

    Args:
        values: float32 [K].
        scales: float32 [P], the largest magnitude of each part, finite.
        counts: int64 [P], values of each part.
        bits: Of a code: 1, 2 or 4.
    """
    packed = np.zeros(-(-len(values) // 8) * bits, np.uint8)
    call("safusion_codes", values, scales, counts, len(counts), bits, packed)
    return packed


def values(packed: np.ndarray, scales: np.ndarray, counts: np.ndarray, bits: int) -> np.ndarray:
    """What :func:`codes` stand for, float32 [K].

    Raises:
        ValueError: If there are fewer codes than values.
    """
    found = np.empty(_number(counts, len(packed) * 8 // bits), np.float32)
    call("safusion_values", packed, scales, counts, len(counts), bits, found)
    return found


def _number(counts: np.ndarray, most: int) -> int:
    number = int(counts.sum())
    if not 0 <= number <= most:
        raise ValueError(f"a message with {number} entries has room for {most}: it is damaged")
    return number

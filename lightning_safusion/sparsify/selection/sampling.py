"""Floors guessed from strided samples: what a sweep need not collect. Counting finds a guess that is too high."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_safusion.sparsify.selection.view import MAGNITUDE_BITS

_LEAST = 1024  # elements of a sample


def guessed_floor(bits: np.ndarray, rank: int) -> int:
    """A floor below which the largest elements of a segment hardly ever reach; -1 takes all.

    Args:
        bits: int32 [N], of its elements.
        rank: How many of them.
    """
    size = len(bits)
    if rank == 0:
        return MAGNITUDE_BITS
    if 2 * rank > size:
        return -1
    # A sample with h hits costs h / density, and what it cannot tell apart rank / sqrt(h) candidates more: for the
    # least of both h goes with this power. 128 put the floor within 9 % (one sigma) of the rank.
    hits = min(128, max(24, int((3 * rank * rank / size) ** (2 / 3))))
    stride = size // min(size // 16, max(_LEAST, hits * size // rank)) | 1
    sample = bits[::stride] & MAGNITUDE_BITS
    deep = _deep(rank / stride)
    if deep >= len(sample):
        return -1
    value = _largest(sample, deep)
    # One value in a large part of the segment is not worth collecting (the zeros of an embedding's gradient): leave it
    # out, and fill up with its first elements if they are needed after all.
    tied = np.count_nonzero(sample >= value) > 4 * deep
    return value if tied else max(value - 1, 0)


def common_floor(segments: Sequence[np.ndarray], rank: int) -> int:
    """A floor below which the largest elements of all segments together hardly ever reach; -1 takes all.

    Args:
        segments: int32, bits of the elements of each.
        rank: How many of them, more than none.
    """
    size = sum(map(len, segments))
    stride = max(1, size // min(size, max(_LEAST, 128 * size // rank))) | 1
    sample = np.concatenate([bits[::stride] for bits in segments]) & MAGNITUDE_BITS
    deep = _deep(rank * len(sample) / size)
    if deep >= len(sample):
        return -1
    return max(_largest(sample, deep) - 1, 0)


def _deep(expected: float) -> int:
    """Three sigma deeper than so many of a sample."""
    return int(expected + 3 * expected**0.5 + 4)


def _largest(sample: np.ndarray, rank: int) -> int:
    return int(np.partition(sample, len(sample) - rank)[len(sample) - rank])

"""Kernels that count and add up the elements of tensors, from which compressors estimate thresholds."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_safusion.kernels.cuda.elements import MAGNITUDE
from lightning_safusion.kernels.cuda.rows import QUOTAS


@triton.jit(do_not_specialize=["number", "count"], do_not_specialize_on_alignment=["x"])
def count_above(
    x: tl.tensor,
    chunks: tl.tensor,
    tensors: tl.tensor,
    thresholds: tl.tensor,
    found: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Adds to ``found`` (int32 [T]) how many magnitudes of each tensor exceed its threshold (float32 [T]).

    ``x`` are the bits of the elements. None exceeds NaN. A program for each chunk.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(chunks + chunk)
    if tl.load(tensors + QUOTAS * (number + 1) + tensor) > 0:
        start, stop = tl.load(chunks + count + chunk), tl.load(chunks + 2 * count + chunk)
        threshold = tl.load(thresholds + tensor)
        floor = tl.where(threshold < 0, -1, threshold.to(tl.int32, bitcast=True) & MAGNITUDE)
        floor = tl.where(threshold != threshold, MAGNITUDE, floor)
        above = tl.zeros([BLOCK], tl.int32)
        for at in range(start, stop, BLOCK):
            offsets = at + tl.arange(0, BLOCK)
            inside = offsets < stop
            above += (inside & ((tl.load(x + offsets, mask=inside, other=0) & MAGNITUDE) > floor)).to(tl.int32)
        tl.atomic_add(found + tensor, tl.sum(above, 0), sem="relaxed")


@triton.jit(do_not_specialize=["number", "count"], do_not_specialize_on_alignment=["x"])
def add_up(
    x: tl.tensor,
    chunks: tl.tensor,
    tensors: tl.tensor,
    sums: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    MAGNITUDES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sums of the elements (float32) of each chunk, or of their magnitudes, and of squares: float64 [2, count].

    A program for each chunk.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(chunks + chunk)
    total, squares = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    if tl.load(tensors + QUOTAS * (number + 1) + tensor) > 0:
        start, stop = tl.load(chunks + count + chunk), tl.load(chunks + 2 * count + chunk)
        for at in range(start, stop, BLOCK):
            offsets = at + tl.arange(0, BLOCK)
            value = tl.load(x + offsets, mask=offsets < stop, other=0.0)
            wide = value.to(tl.float64)
            squares += wide * wide
            total += tl.abs(value).to(tl.float64) if MAGNITUDES else wide
    tl.store(sums + chunk, tl.sum(total, 0))
    tl.store(sums + count + chunk, tl.sum(squares, 0))

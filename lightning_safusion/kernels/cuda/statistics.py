"""Kernels of the statistics of all segments: one pass over the span, and one over the sums of the chunks.

Within a block sums are float32 trees, across blocks and chunks float64 in a fixed order, as on the CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_safusion.kernels.cuda.selection import _floor, _keys


@triton.jit(do_not_specialize=["chunks"])
def chunk_moments(
    x: tl.tensor, table: tl.tensor, partial: tl.tensor, chunks: tl.tensor, ABSOLUTE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Writes the sum of the elements, or of their magnitudes, and of their squares (float64 [2, C])."""
    chunk = tl.program_id(0)
    start, stop = tl.load(table + chunks + chunk), tl.load(table + 2 * chunks + chunk)
    first, second = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    for at in range(start, stop, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        elements = tl.load(x + offsets, mask=offsets < stop, other=0.0)
        if ABSOLUTE:
            elements = tl.abs(elements)
        first += tl.sum(elements, 0).to(tl.float64)
        second += tl.sum(elements * elements, 0).to(tl.float64)
    tl.store(partial + chunk, first)
    tl.store(partial + chunks + chunk, second)


@triton.jit(do_not_specialize=["chunks"])
def chunk_logarithms(
    x: tl.tensor, table: tl.tensor, partial: tl.tensor, chunks: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Writes the sum of ln |x| over the elements that are not zero, and how many they are (float64 [2, C])."""
    chunk = tl.program_id(0)
    start, stop = tl.load(table + chunks + chunk), tl.load(table + 2 * chunks + chunk)
    total, present = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    for at in range(start, stop, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        elements = tl.abs(tl.load(x + offsets, mask=offsets < stop, other=0.0))
        total += tl.sum(tl.log(tl.where(elements == 0, 1.0, elements)), 0).to(tl.float64)
        present += tl.sum((elements != 0).to(tl.int32), 0).to(tl.float64)
    tl.store(partial + chunk, total)
    tl.store(partial + chunks + chunk, present)


@triton.jit(do_not_specialize=["chunks"])
def chunk_excesses(
    x: tl.tensor,
    table: tl.tensor,
    active: tl.tensor,
    thresholds: tl.tensor,
    partial: tl.tensor,
    chunks: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Writes the number of elements above the threshold, and the sums of what they exceed it by, and of its square.

    ``partial`` is float64 [3, C].
    """
    chunk = tl.program_id(0)
    start, stop = tl.load(table + chunks + chunk), tl.load(table + 2 * chunks + chunk)
    threshold = tl.load(thresholds + tl.load(active + tl.load(table + chunk)))
    number, first, second = tl.zeros([], tl.float64), tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    for at in range(start, stop, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        inside = offsets < stop
        excess = tl.abs(tl.load(x + offsets, mask=inside, other=0.0)) - threshold
        number += tl.sum((inside & (excess > 0)).to(tl.int32), 0).to(tl.float64)
        excess = tl.where(inside & ~(excess <= 0), excess, 0.0)  # NaN stays
        first += tl.sum(excess, 0).to(tl.float64)
        second += tl.sum(excess * excess, 0).to(tl.float64)
    tl.store(partial + chunk, number)
    tl.store(partial + chunks + chunk, first)
    tl.store(partial + 2 * chunks + chunk, second)


@triton.jit(do_not_specialize=["chunks"])
def chunk_counts(
    bits: tl.tensor,
    table: tl.tensor,
    active: tl.tensor,
    thresholds: tl.tensor,
    partial: tl.tensor,
    chunks: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Writes the number of elements above the threshold (float64 [1, C])."""
    chunk = tl.program_id(0)
    start, stop = tl.load(table + chunks + chunk), tl.load(table + 2 * chunks + chunk)
    floor = _floor(thresholds, active, tl.load(table + chunk), True)
    number = tl.zeros([BLOCK], tl.int32)
    for at in range(start, stop, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        inside = offsets < stop
        number += (inside & (_keys(bits, offsets, inside) > floor)).to(tl.int32)
    tl.store(partial + chunk, tl.sum(number, 0).to(tl.float64))


@triton.jit(do_not_specialize=["chunks"])
def chunk_largest(
    bits: tl.tensor, table: tl.tensor, partial: tl.tensor, chunks: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Writes the largest magnitude as the number that its bits are (float64 [1, C])."""
    chunk = tl.program_id(0)
    start, stop = tl.load(table + chunks + chunk), tl.load(table + 2 * chunks + chunk)
    largest = tl.zeros([BLOCK], tl.int32)
    for at in range(start, stop, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, _keys(bits, offsets, offsets < stop))
    tl.store(partial + chunk, tl.max(largest, 0).to(tl.float64))


@triton.jit(do_not_specialize=["chunks", "segments", "every"])
def combine(
    partial: tl.tensor,
    spans: tl.tensor,
    active: tl.tensor,
    out: tl.tensor,
    chunks: tl.tensor,
    segments: tl.tensor,
    every: tl.tensor,
    LARGEST: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Adds up the sums of the chunks of a segment, or takes the largest (float64 [R, C] to float64 [R, M])."""
    place, row = tl.program_id(0) % segments, tl.program_id(0) // segments
    first, stop = tl.load(spans + place), tl.load(spans + segments + place)
    chunk = first + tl.arange(0, CHUNKS)
    parts = tl.load(partial + row * chunks + chunk, mask=chunk < stop, other=0.0)
    total = tl.max(parts, 0) if LARGEST else tl.sum(parts, 0)
    tl.store(out + row * every + tl.load(active + place), total)

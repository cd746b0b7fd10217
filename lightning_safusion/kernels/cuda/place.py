"""The kernel that writes positions which another compressor than Top-k has chosen."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_safusion.kernels.cuda.elements import MAGNITUDE, store_rank
from lightning_safusion.kernels.cuda.rows import BUCKETS, EDGES, HIGH, LOW_BITS, PART_BITS, PARTS, REGION_COUNT, ROOM


@triton.jit
def _first_above(table: tl.tensor, number: tl.tensor, limits: tl.tensor, steps: tl.tensor) -> tl.tensor:
    """Places of the first of ascending numbers that are larger than limits; ``steps``: halvings of ``number``."""
    low, high = limits * 0 - 1, limits * 0 + number
    for _ in range(steps):
        middle = (low + high) >> 1
        apart = high - low > 1
        above = tl.load(table + middle, mask=apart, other=0) > limits
        high = tl.where(apart & above, middle, high)
        low = tl.where(apart & (above == 0), middle, low)
    return high


@triton.jit(do_not_specialize=["most", "number", "steps"])
def place(
    positions: tl.tensor,
    values: tl.tensor,
    tensors: tl.tensor,
    shape: tl.tensor,
    regions: tl.tensor,
    message: tl.tensor,
    entries: tl.tensor,
    largest: tl.tensor,
    most: tl.tensor,
    number: tl.tensor,
    steps: tl.tensor,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """What :func:`~lightning_safusion.kernels.cuda.encode.write` leaves, of elements that are known.

    ``positions`` (int64) ascend, ``values`` are the bits of float32 numbers; as many of both are sent as ``shape`` says
    (``ROOM``). ``regions`` are the first elements of regions (int32); the high bits are zeros. ``steps``: halvings of
    the longest table that is searched. A program for each ``BLOCK`` of entries and of regions.
    """
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    room, low_bits = tl.load(shape + ROOM), tl.load(shape + LOW_BITS)
    valid = own < room
    position = tl.load(positions + own, mask=valid, other=0).to(tl.int32)
    raw = tl.load(values + own, mask=valid, other=0)
    rows = tensors + _first_above(tensors + EDGES * (number + 1), number + 1, position, steps) - 1
    local = position - tl.load(rows + EDGES * (number + 1), mask=valid, other=0)
    part_bits = tl.load(rows + PART_BITS * (number + 1), mask=valid, other=0)
    part = tl.load(rows + PARTS * (number + 1), mask=valid, other=0) + (local >> part_bits)
    tl.store(entries + own, (part << low_bits) | (local & ((1 << low_bits) - 1)), mask=valid)
    tl.store(entries + most + own, raw, mask=valid)
    if SCALED:
        tl.atomic_max(largest + part, raw & MAGNITUDE, mask=valid, sem="relaxed")
    unary = own + tl.load(rows + BUCKETS * (number + 1), mask=valid, other=0) + (local >> low_bits)
    tl.atomic_or(message + tl.load(shape + HIGH) + (unary >> 5), 1 << (unary & 31), mask=valid, sem="relaxed")
    ranked = own < tl.load(shape + REGION_COUNT)
    first = tl.load(regions + own, mask=ranked, other=0)
    store_rank(message, shape, own, _first_above(positions, room, first - 1, steps), ranked)

"""How a program reads the entries of its tile in a message: for means, for the sums of owners, and for what was sent.

A tile is some elements of one tensor in one region of positions. Bits of the region are looked through a block at a
time, and those blocks are read that have bits of the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_safusion.kernels.cuda.elements import ANY_VALUES, FOUR_BITS, MAGNITUDE, load_float, load_kind, load_rank
from lightning_safusion.kernels.cuda.rows import (
    CAPACITY,
    CODES,
    HIGH,
    LOW,
    LOW_BITS,
    PART_BITS,
    PARTS,
    SCALES,
    TILE_BEGIN,
    TILE_BUCKET,
    TILE_BUCKETS,
    TILE_ELEMENTS,
    TILE_OFFSET,
    TILE_REGION,
    TILE_SIZE,
    VALUES_KIND,
)

#: Elements of a tile that are in registers at a time.
PIECE = tl.constexpr(512)


@triton.jit
def read_region(
    message: tl.tensor, shape: tl.tensor, tiles: tl.tensor, tile: tl.tensor, count: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Entries before the region of a tile and behind it, bits that it has, and whether the ranks are impossible."""
    region, buckets = tl.load(tiles + TILE_REGION * count + tile), tl.load(tiles + TILE_BUCKETS * count + tile)
    before, behind = load_rank(message, shape, region), load_rank(message, shape, region + 1)
    wrong = (before < 0) | (behind < before) | (behind > tl.load(shape + CAPACITY)) | ((region == 0) & (before != 0))
    behind = tl.where(wrong, before, behind)
    return before, behind, tl.where(wrong, 0, behind - before + buckets), wrong


@triton.jit
def describe_tile(
    shape: tl.tensor, tensors: tl.tensor, tiles: tl.tensor, tile: tl.tensor, number: tl.tensor, count: tl.tensor
) -> tuple[tl.tensor, ...]:
    """What :func:`read_entries` needs of a tile and of all its messages, loaded once: memory is written between blocks,
    so that the compiler would load it again for each.

    Returns:
        Buckets before the region, its elements, those of it before the tile, of the tile, of the tensor before the
        region; the first part of the tensor and the bits of a part; bits of a position; words before high bits, low
        bits, values and scales; the first and the last bucket of the tile in the region; the kind of the values.
    """
    tensor, begin = tl.load(tiles + tile), tl.load(tiles + TILE_BEGIN * count + tile)
    bucket, elements = tl.load(tiles + TILE_BUCKET * count + tile), tl.load(tiles + TILE_ELEMENTS * count + tile)
    size, offset = tl.load(tiles + TILE_SIZE * count + tile), tl.load(tiles + TILE_OFFSET * count + tile)
    part = tl.load(tensors + PARTS * (number + 1) + tensor)
    part_bits = tl.load(tensors + PART_BITS * (number + 1) + tensor)
    low_bits, high, low = tl.load(shape + LOW_BITS), tl.load(shape + HIGH), tl.load(shape + LOW)
    codes, scales = tl.load(shape + CODES), tl.load(shape + SCALES)
    # what is behind the region is damage, which the program of its end finds
    last = tl.where(begin + size < elements, (begin + size - 1) >> low_bits, MAGNITUDE)
    first, earlier = begin >> low_bits, offset - begin
    kind = tl.load(shape + VALUES_KIND)
    return (
        bucket, elements, begin, size, earlier, part, part_bits, low_bits, high, low, codes, scales, first, last, kind,
    )  # fmt: skip


@triton.jit
def read_bits(
    message: tl.tensor, first: tl.tensor, at: tl.tensor, length: tl.tensor, BITS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Which of some bits of a region are entries, and how many; ``message``: int32, from its high bits on."""
    bit = at + tl.arange(0, BITS)
    place = first + bit
    word = tl.load(message + (place >> 5), mask=bit < length, other=0)
    marked = tl.where(bit < length, (word >> (place & 31)) & 1, 0)
    return marked, tl.sum(marked, 0)


@triton.jit
def _decoded(
    message: tl.tensor,
    entry: tl.tensor,
    hit: tl.tensor,
    place: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
) -> tl.tensor:
    """Values of four bits, from their codes and the scales of their parts."""
    in_parts = (message + scales).to(tl.pointer_type(tl.int16)) + place
    scale = (tl.load(in_parts, mask=hit, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    code = tl.load(message + codes + (entry >> 3), mask=hit, other=0) >> ((entry & 7) * 4)
    value = ((120 + (code & 7)) << 23).to(tl.float32, bitcast=True) * scale
    # before Triton 3.9 -value is 0 - value, which has another sign where value is 0
    return (value.to(tl.int32, bitcast=True) ^ ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _values(
    message: tl.tensor,
    entry: tl.tensor,
    hit: tl.tensor,
    place: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    kind: tl.tensor,
    VALUES: tl.constexpr,
) -> tl.tensor:
    """float32, the values of entries; ``place``: their parts."""
    if VALUES == FOUR_BITS:
        found = _decoded(message, entry, hit, place, codes, scales)
    elif VALUES == ANY_VALUES:
        found = load_kind((message + codes).to(tl.int64), entry, hit, kind)
        if kind == FOUR_BITS:
            found = _decoded(message, entry, hit, place, codes, scales)
    else:
        found = load_float((message + codes).to(tl.int64), entry, hit, VALUES)
    return found


@triton.jit
def _low(message: tl.tensor, field: tl.tensor, low_bits: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Low bits of entries, from words of 32; ``message``: int32, from its low bits on."""
    pair = message + (field >> 5)
    lower = tl.load(pair, mask=there, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    upper = tl.load(pair + 1, mask=there, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    both = ((upper << 32) | lower) >> (field & 31).to(tl.uint64)
    return both.to(tl.int32) & ((1 << low_bits) - 1)


@triton.jit
def _descends(
    message: tl.tensor, first: tl.tensor, at: tl.tensor, high: tl.tensor, field: tl.tensor, low: tl.tensor,
    own: tl.tensor, low_bits: tl.tensor, hit: tl.tensor, BITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Whether entries do not lie behind the one before them. The bit before that of an entry of the same bucket is set.

    A position that came twice would get one of two values, on each device another.
    """
    bit = at + tl.arange(0, BITS)
    place = first + bit - 1
    word = tl.load(message + high + (place >> 5), mask=hit & (bit > 0), other=0)
    follows = hit & (((word >> (place & 31)) & 1) != 0)
    return follows & (_low(message + low, field - low_bits, low_bits, follows) >= own)


@triton.jit
def read_entries(
    message: tl.tensor,
    marked: tl.tensor,
    before: tl.tensor,
    seen: tl.tensor,
    behind: tl.tensor,
    at: tl.tensor,
    bucket: tl.tensor,
    elements: tl.tensor,
    begin: tl.tensor,
    size: tl.tensor,
    earlier: tl.tensor,
    part: tl.tensor,
    part_bits: tl.tensor,
    low_bits: tl.tensor,
    high: tl.tensor,
    low: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    kind: tl.tensor,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """What some bits of a region say: values, their places in the tile, which are there, and which are damaged.

    Args:
        message: int32, one message.
        marked: Of :func:`read_bits`.
        before, behind: Of :func:`read_region`.
        seen: Entries up to these bits.
        at: Bits before them.
        bucket, elements, begin, size, earlier, part, part_bits, low_bits, high, low, codes, scales, kind: Of
            :func:`describe_tile`.
        BITS: How many.
        VALUES: Their kind, or ``ANY_VALUES`` if only the device knows it.
    """
    entry = seen + tl.cumsum(marked, 0) - marked
    hit = (marked != 0) & (entry < behind)
    field = entry * low_bits
    own = _low(message + low, field, low_bits, hit)
    inside = ((at + tl.arange(0, BITS) - (entry - before)) << low_bits) + own
    wrong = hit & (inside >= elements)
    wrong |= _descends(message, before + bucket, at, high, field, low, own, low_bits, hit, BITS)
    hit = hit & (inside >= begin) & (inside < begin + size)
    place = part + ((earlier + inside) >> part_bits)
    value = _values(message, entry, hit, place, codes, scales, kind, VALUES)
    return value, inside - begin, hit, wrong.to(tl.int32)


@triton.jit
def add_messages(
    messages: tl.tensor,
    stride: tl.tensor,
    times: tl.tensor,
    factor: tl.tensor,
    sums: tl.tensor,
    shape: tl.tensor,
    tensors: tl.tensor,
    tiles: tl.tensor,
    tile: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
) -> tl.tensor:
    """Adds up in the memory of a tile what some messages have there, one after the other; whether one is damaged.

    Args:
        messages: int32, the first.
        stride: Words from one to the next.
        times: How many.
        factor: For their values.
        sums: float32, of the tile; it is overwritten.
        shape, tensors, tiles, tile, number, count, BITS, VALUES: See :func:`decode`.
    """
    bucket, elements, begin, size, earlier, part, part_bits, low_bits, high, low, codes, scales, first, last, kind = (
        describe_tile(shape, tensors, tiles, tile, number, count)
    )
    damaged, entries_damaged = tile * 0, tl.zeros([BITS], tl.int32)
    for at in range(0, size, PIECE):
        lanes = at + tl.arange(0, PIECE)
        tl.store(sums + lanes, tl.zeros([PIECE], tl.float32), mask=lanes < size)
    tl.debug_barrier()
    for _ in range(times):
        before, behind, length, wrong = read_region(messages, shape, tiles, tile, count)
        seen = before
        for at in range(0, length, BITS):
            marked, here = read_bits(messages + high, before + bucket, at, length, BITS)
            buckets = at - (seen - before)
            if (buckets <= last) & (buckets + BITS - here >= first):
                value, place, hit, outside = read_entries(
                    messages, marked, before, seen, behind, at, bucket,
                    elements, begin, size, earlier, part, part_bits, low_bits, high, low, codes, scales, kind, BITS,
                    VALUES,
                )  # fmt: skip
                old = tl.load(sums + place, mask=hit, other=0.0)
                tl.store(sums + place, old + value * factor, mask=hit)
                entries_damaged |= outside
            seen += here
        damaged |= (wrong | (seen != behind)).to(tl.int32)
        messages += stride
        tl.debug_barrier()
    return damaged | tl.max(entries_damaged, 0)

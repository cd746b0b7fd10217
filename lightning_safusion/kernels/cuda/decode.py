"""Kernels that read messages: the mean of all ranks into gradients, and what was sent out of the residual.

A program owns a tile, some elements of one tensor in one region. It reads the messages rank by rank, with a barrier
between, so that every element gets its terms in the order of ranks: the same sums as on the CPU, on all workers.
Numbers are never added by atomics, which have no order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_safusion.kernels.cuda.elements import (
    BAD,
    CAPACITY,
    CODES,
    DESCRIPTION,
    EDGES,
    FAILED,
    FLAGS,
    FRESH,
    GRADS,
    HIGH,
    INFINITE,
    LANES,
    LOW,
    LOW_BITS,
    PART_BITS,
    PARTS,
    RANKS,
    SCALES,
    SHAPES,
    SUMS,
    load_float,
    magnitudes,
    quotient,
    store_float,
)

# Elements of a tile that are in registers at a time.
_PIECE = tl.constexpr(512)
# Bits of the status of a window. Any of them, and nothing of it leaves the residual.
DAMAGED, NOT_FINITE, IRREGULAR = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)

# Rows of the table of tiles, int32 [8, n], behind that of tensors: the region, elements of it before the tile, elements
# of the tile, of the tensor before it, buckets before the region, its buckets, and its elements.
_REGION, _BEGIN, TILE_SIZE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
TILE_OFFSET, _BUCKET, _BUCKETS, _ELEMENTS = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)


@triton.jit
def read_region(
    message: tl.tensor, shape: tl.tensor, tiles: tl.tensor, tile: tl.tensor, count: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Entries before the region of a tile and behind it, bits that it has, and whether the ranks are impossible."""
    region, buckets = tl.load(tiles + _REGION * count + tile), tl.load(tiles + _BUCKETS * count + tile)
    ranks = message + tl.load(shape + RANKS) + region
    before, behind = tl.load(ranks), tl.load(ranks + 1)
    wrong = (before < 0) | (behind < before) | (behind > tl.load(shape + CAPACITY)) | ((region == 0) & (before != 0))
    behind = tl.where(wrong, before, behind)
    return before, behind, tl.where(wrong, 0, behind - before + buckets), wrong


@triton.jit
def read_entries(
    message: tl.tensor,
    shape: tl.tensor,
    tensors: tl.tensor,
    tiles: tl.tensor,
    tile: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    before: tl.tensor,
    seen: tl.tensor,
    behind: tl.tensor,
    at: tl.tensor,
    length: tl.tensor,
    BITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """What some bits of a region say: values, their places in the tile, which are there, how many, and damage."""
    low_bits, tensor = tl.load(shape + LOW_BITS), tl.load(tiles + tile)
    bit = at + tl.arange(0, BITS)
    place = before + tl.load(tiles + _BUCKET * count + tile) + bit
    word = tl.load(message + tl.load(shape + HIGH) + (place >> 5), mask=bit < length, other=0)
    marked = tl.where(bit < length, (word >> (place & 31)) & 1, 0)
    entry = seen + tl.cumsum(marked, 0) - marked
    hit = (marked != 0) & (entry < behind)
    field = entry * low_bits
    pair = message + tl.load(shape + LOW) + (field >> 5)
    lower = tl.load(pair, mask=hit, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    upper = tl.load(pair + 1, mask=hit, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    both = ((upper << 32) | lower) >> (field & 31).to(tl.uint64)
    inside = ((bit - (entry - before)) << low_bits) + (both.to(tl.int32) & ((1 << low_bits) - 1))
    wrong = tl.max((hit & (inside >= tl.load(tiles + _ELEMENTS * count + tile))).to(tl.int32), 0)
    begin = tl.load(tiles + _BEGIN * count + tile)
    hit = hit & (inside >= begin) & (inside < begin + tl.load(tiles + TILE_SIZE * count + tile))
    in_tensor = tl.load(tiles + TILE_OFFSET * count + tile) - begin + inside
    part = tl.load(tensors + PARTS * (number + 1) + tensor)
    part += in_tensor >> tl.load(tensors + PART_BITS * (number + 1) + tensor)
    scales = (message + tl.load(shape + SCALES)).to(tl.pointer_type(tl.int16))
    scale = (tl.load(scales + part, mask=hit, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    code = tl.load(message + tl.load(shape + CODES) + (entry >> 3), mask=hit, other=0) >> ((entry & 7) * 4)
    value = (((code & 7).to(tl.float32) + 0.5) * 0.125) * scale
    return tl.where((code & 8) != 0, -value, value), inside - begin, hit, tl.sum(marked, 0), wrong


@triton.jit
def _undo(
    memory: tl.tensor, grads: tl.tensor, offset: tl.tensor, size: tl.tensor, decay: tl.tensor, KIND: tl.constexpr
) -> None:
    """Takes the elements of a bad gradient that were added out of the residual of a tile."""
    for at in range(0, size, _PIECE):
        lanes = at + tl.arange(0, _PIECE)
        g = load_float(grads, offset + lanes, lanes < size, KIND)
        added = (lanes < size) & (magnitudes(g) < INFINITE)
        r = tl.load(memory + lanes, mask=added, other=0.0)
        tl.store(memory + lanes, quotient(r - g, tl.zeros([_PIECE], tl.float32) + decay), mask=added)


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
) -> tl.tensor:
    """Adds up in the memory of a tile what some messages have there, one after the other; whether one is damaged.

    Args:
        messages: int32, the first.
        stride: Words from one to the next.
        times: How many.
        factor: For their values.
        sums: float32, of the tile; it is overwritten.
        shape, tensors, tiles, tile, number, count, BITS: See :func:`decode`.
    """
    size = tl.load(tiles + TILE_SIZE * count + tile)
    damaged = tile * 0
    for at in range(0, size, _PIECE):
        lanes = at + tl.arange(0, _PIECE)
        tl.store(sums + lanes, tl.zeros([_PIECE], tl.float32), mask=lanes < size)
    tl.debug_barrier()
    for _ in range(times):
        before, behind, length, wrong = read_region(messages, shape, tiles, tile, count)
        seen = before
        for at in range(0, length, BITS):
            value, place, hit, marked, outside = read_entries(
                messages, shape, tensors, tiles, tile, number, count, before, seen, behind, at, length, BITS
            )
            old = tl.load(sums + place, mask=hit, other=0.0)
            tl.store(sums + place, old + value * factor, mask=hit)
            seen += marked
            damaged |= outside
        damaged |= (wrong | (seen != behind)).to(tl.int32)
        messages += stride
        tl.debug_barrier()
    return damaged


@triton.jit
def _irregular(header: tl.tensor, at: tl.tensor, number: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """Not 0 where a tensor of a rank is not there, or is not finite, or the rank has failed."""
    place = at + tl.arange(0, WIDE)
    byte = tl.load(header + place, mask=place <= number, other=0).to(tl.int32)
    return tl.where(place < number, byte ^ FRESH, byte & FAILED)


@triton.jit
def _judge(
    own: tl.tensor,
    headers: tl.tensor,
    stride: tl.tensor,
    ranks: tl.tensor,
    status: tl.tensor,
    number: tl.tensor,
    WIDE: tl.constexpr,
    APART: tl.constexpr,
) -> None:
    """Whether all ranks have sent all tensors, and none has failed; ``APART``: this rank is not among the others."""
    wrong = tl.zeros([WIDE], tl.int32)
    if APART:
        for at in range(0, number + 1, WIDE):
            wrong |= _irregular(own, at, number, WIDE)
    for _ in range(ranks):
        for at in range(0, number + 1, WIDE):
            wrong |= _irregular(headers, at, number, WIDE)
        headers += stride
    tl.atomic_or(status, IRREGULAR, mask=tl.max((wrong != 0).to(tl.int32), 0) > 0, sem="relaxed")


@triton.jit
def _is_bad(own: tl.tensor, flags: tl.tensor, stride: tl.tensor, ranks: tl.tensor) -> tl.tensor:
    """Whether a tensor is not finite on some rank: this one, or one of those whose flags of it follow each other."""
    bad = own.to(tl.int32)
    for _ in range(ranks):
        bad |= tl.load(flags).to(tl.int32)
        flags += stride
    return bad & BAD


@triton.jit
def _deliver(
    mean: tl.tensor,
    bad: tl.tensor,
    grads: tl.tensor,
    sums: tl.tensor,
    place: tl.tensor,
    lanes: tl.tensor,
    size: tl.tensor,
    KIND: tl.constexpr,
    WRITTEN: tl.constexpr,
) -> tl.tensor:
    """Writes means into their gradient, and what that cannot hold where they were added up; their largest magnitude.

    Args:
        mean: float32, of some lanes of a tile.
        bad: Whether the tensor is not finite on some rank: its first element becomes so.
        grads, sums: Where the gradient is, and where the means of the tile were added up.
        place: Of the tile in its tensor.
        lanes, size: Some elements of the tile, and how many it has.
        KIND: Of the gradient.
        WRITTEN: The means were added up in the gradient itself: all but the poison is there.
    """
    inside = lanes < size
    poisoned = place + lanes == tl.where(bad != 0, 0, -1)
    mean = tl.where(poisoned, float("nan"), mean)
    wanted = (poisoned if WRITTEN else inside) & inside
    held = store_float(grads, place + lanes, mean, wanted, KIND)
    if KIND != 0:
        tl.store(sums + lanes, mean - held, mask=inside)
    return tl.max(tl.where(inside, magnitudes(mean), 0), 0)


@triton.jit(
    do_not_specialize=["stride", "header_stride", "ranks", "world", "heads", "number", "count"],
    do_not_specialize_on_alignment=["own", "headers", "memory", "status"],
)
def decode(
    received: tl.tensor,
    own: tl.tensor,
    headers: tl.tensor,
    memory: tl.tensor,
    tiles: tl.tensor,
    tensors: tl.tensor,
    addresses: tl.tensor,
    shape: tl.tensor,
    status: tl.tensor,
    decay: tl.tensor,
    factor: tl.tensor,
    stride: tl.tensor,
    header_stride: tl.tensor,
    ranks: tl.tensor,
    world: tl.tensor,
    heads: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    OWNED: tl.constexpr,
) -> None:
    """Writes the mean of all messages into gradients of one kind, and judges the window.

    A tensor that is not finite on some rank comes out not finite. What it added to this rank's residual is undone,
    before its gradient is overwritten.

    Args:
        received: int32 [world, stride], the messages.
        own: uint8, this rank's header; dense lanes are counted from there.
        headers: uint8 [ranks, header_stride], those of others.
        memory: float32 [N], the residual.
        tiles: int32 [8, count]; a program each.
        tensors: int32 [13, number + 1].
        addresses: int64 [4, number].
        shape: int32 [n, 15], of messages.
        status: int32 [1].
        decay: Of the residual.
        factor: Of all values.
        heads: Tensors in a header.
        KIND: Of the gradients.
        BITS: Of messages that are read together.
        OWNED: Elements are in the message of their owner only, and lanes hold means.
    """
    tile = tl.program_id(0)
    tensor = tl.load(tiles + tile)
    row = tensors + tensor
    offset, size = tl.load(tiles + TILE_OFFSET * count + tile), tl.load(tiles + TILE_SIZE * count + tile)
    grads = tl.load(addresses + GRADS * number + tensor)
    sums = tl.load(addresses + SUMS * number + tensor).to(tl.pointer_type(tl.float32)) + offset
    lane, flag = tl.load(addresses + LANES * number + tensor), tl.load(row + FLAGS * (number + 1))
    if tile == 0:
        _judge(own, headers, header_stride, ranks, status, heads, 256, OWNED)
    mine = tl.load(own + flag)
    if (mine & BAD) != 0:
        first = tl.load(row + EDGES * (number + 1)) + offset
        _undo(memory + first, grads, offset, size, decay, KIND)
        tl.debug_barrier()
    bad = _is_bad(mine, headers + flag, header_stride, ranks)
    damaged, largest = tile * 0, tile * 0
    if lane != -1:
        for at in range(0, size, _PIECE):
            lanes, mean = at + tl.arange(0, _PIECE), tl.zeros([_PIECE], tl.float32)
            if OWNED:
                mean = load_float((own + lane).to(tl.int64), offset + lanes, lanes < size, KIND)
            else:
                message = received
                for _ in range(world):
                    sent = (message.to(tl.pointer_type(tl.uint8)) + lane).to(tl.int64)
                    mean += load_float(sent, offset + lanes, lanes < size, KIND) * factor
                    message += stride
            most = _deliver(mean, bad, grads, sums, offset, lanes, size, KIND, False)
            largest = tl.maximum(largest, most)
    else:
        message, times = received, world
        if OWNED:
            described = tl.load(row + SHAPES * (number + 1))
            shape += described
            message += (described // DESCRIPTION).to(tl.int64) * stride
            times = tile * 0 + 1
        damaged = add_messages(message, stride, times, factor, sums, shape, tensors, tiles, tile, number, count, BITS)
        for at in range(0, size, _PIECE):
            lanes = at + tl.arange(0, _PIECE)
            mean = tl.load(sums + lanes, mask=lanes < size, other=0.0)
            most = _deliver(mean, bad, grads, sums, offset, lanes, size, KIND, KIND == 0)
            largest = tl.maximum(largest, most)
    damaged |= tl.where(largest >= INFINITE, NOT_FINITE, 0)
    tl.atomic_or(status, damaged, mask=damaged != 0, sem="relaxed")

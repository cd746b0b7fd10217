"""The kernel that reads messages: the mean of all ranks into gradients, and whether the window is good.

A program owns a tile, some elements of one tensor in one region. It reads the messages rank by rank, with a barrier
between, so that every element gets its terms in the order of ranks: the same sums as on the CPU, on all workers.
Numbers are never added by atomics, which have no order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_safusion.kernels.cuda.elements import (
    BAD,
    DESCRIPTION,
    FAILED,
    FRESH,
    INFINITE,
    load_float,
    magnitudes,
    quotient,
    store_float,
)
from lightning_safusion.kernels.cuda.entries import PIECE, add_messages
from lightning_safusion.kernels.cuda.rows import EDGES, FLAGS, GRADS, LANES, SHAPES, SUMS, TILE_OFFSET, TILE_SIZE

# Bits of the status of a window. Any of them, and the device takes nothing of it out of the residual.
DAMAGED, NOT_FINITE, IRREGULAR = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)


@triton.jit
def _undo(
    memory: tl.tensor,
    grads: tl.tensor,
    offset: tl.tensor,
    size: tl.tensor,
    decay: tl.tensor,
    unscale: tl.tensor,
    KIND: tl.constexpr,
) -> None:
    """Takes the elements of a bad gradient that were added out of the residual of a tile."""
    for at in range(0, size, PIECE):
        lanes = at + tl.arange(0, PIECE)
        g = load_float(grads, offset + lanes, lanes < size, KIND)
        added = (lanes < size) & (magnitudes(g) < INFINITE)
        r = tl.load(memory + lanes, mask=added, other=0.0)
        tl.store(memory + lanes, quotient(r - g * unscale, tl.zeros([PIECE], tl.float32) + decay), mask=added)


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
    scale: tl.tensor,
    unscale: tl.tensor,
    KIND: tl.constexpr,
    WRITTEN: tl.constexpr,
) -> tl.tensor:
    """Writes means into their gradient, and what that cannot hold where they were added up.

    Returns the largest magnitude of the means.

    Args:
        mean: float32, of some lanes of a tile.
        bad: Whether the tensor is not finite on some rank: its first element becomes so.
        grads, sums: Where the gradient is, and where the means of the tile were added up.
        place: Of the tile in its tensor.
        lanes, size: Some elements of the tile, and how many it has.
        scale, unscale: Factor of the loss that the gradient gets, and its reciprocal.
        KIND: Of the gradient.
        WRITTEN: The means were added up in the gradient itself: without a factor all but the poison is there.
    """
    inside = lanes < size
    largest = tl.max(tl.where(inside, magnitudes(mean), 0), 0)
    poisoned = place + lanes == tl.where(bad != 0, 0, -1)
    mean = tl.where(poisoned, float("nan"), mean * scale)
    wanted = (tl.where(scale == 1.0, poisoned, True) if WRITTEN else inside) & inside
    held = store_float(grads, place + lanes, mean, wanted, KIND)
    if KIND != 0:
        tl.store(sums + lanes, (mean - held) * unscale, mask=inside)
    return largest


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
    scales: tl.tensor,
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
    VALUES: tl.constexpr,
    OWNED: tl.constexpr,
) -> None:
    """Writes the mean of all messages into gradients of one kind, and judges the window.

    A tensor that is not finite on some rank comes out not finite. What it added to this rank's residual is undone,
    before its gradient is overwritten. A tensor without a place in which means are added up keeps its gradient.

    Args:
        received: int32 [world, stride], the messages.
        own: uint8, this rank's header; dense lanes are counted from there.
        headers: uint8 [ranks, header_stride], those of others.
        memory: float32 [N], the residual.
        tiles: int32 [8, count]; a program each.
        tensors: int32 [15, number + 1].
        addresses: int64 [4, number].
        shape: int32 [n, 16], of messages.
        scales: float32 [2]; see :func:`~lightning_safusion.kernels.cuda.accumulate.compensate`.
        status: int32 [1].
        decay: Of the residual.
        factor: Of all values.
        heads: Tensors in a header.
        KIND: Of the gradients.
        BITS: Of messages that are read together.
        VALUES: Their kind.
        OWNED: Elements are in the message of their owner only, and lanes hold means.
    """
    tile = tl.program_id(0)
    tensor = tl.load(tiles + tile)
    row = tensors + tensor
    offset, size = tl.load(tiles + TILE_OFFSET * count + tile), tl.load(tiles + TILE_SIZE * count + tile)
    grads = tl.load(addresses + GRADS * number + tensor)
    there = tl.load(addresses + SUMS * number + tensor)
    sums = there.to(tl.pointer_type(tl.float32)) + offset
    scale, unscale = tl.load(scales), tl.load(scales + 1)
    lane, flag = tl.load(addresses + LANES * number + tensor), tl.load(row + FLAGS * (number + 1))
    if tile == 0:
        _judge(own, headers, header_stride, ranks, status, heads, 256, OWNED)
    mine = tl.load(own + flag)
    if (mine & BAD) != 0:
        first = tl.load(row + EDGES * (number + 1)) + offset
        _undo(memory + first, grads, offset, size, decay, unscale, KIND)
        tl.debug_barrier()
    bad = _is_bad(mine, headers + flag, header_stride, ranks)
    damaged, largest = tile * 0, tile * 0
    if (lane != -1) & (there != 0):
        for at in range(0, size, PIECE):
            lanes, mean = at + tl.arange(0, PIECE), tl.zeros([PIECE], tl.float32)
            if OWNED:
                mean = load_float((own + lane).to(tl.int64), offset + lanes, lanes < size, KIND)
            else:
                message = received
                for _ in range(world):
                    sent = (message.to(tl.pointer_type(tl.uint8)) + lane).to(tl.int64)
                    mean += load_float(sent, offset + lanes, lanes < size, KIND) * factor
                    message += stride
            most = _deliver(mean, bad, grads, sums, offset, lanes, size, scale, unscale, KIND, False)
            largest = tl.maximum(largest, most)
    if (lane == -1) & (there != 0):
        message, times = received, world
        if OWNED:
            described = tl.load(row + SHAPES * (number + 1))
            shape += described
            message += (described // DESCRIPTION).to(tl.int64) * stride
            times = tile * 0 + 1
        damaged = add_messages(
            message, stride, times, factor, sums, shape, tensors, tiles, tile, number, count, BITS, VALUES
        )
        for at in range(0, size, PIECE):
            lanes = at + tl.arange(0, PIECE)
            mean = tl.load(sums + lanes, mask=lanes < size, other=0.0)
            most = _deliver(mean, bad, grads, sums, offset, lanes, size, scale, unscale, KIND, KIND == 0)
            largest = tl.maximum(largest, most)
    damaged |= tl.where(largest >= INFINITE, NOT_FINITE, 0)
    tl.atomic_or(status, damaged, mask=damaged != 0, sem="relaxed")

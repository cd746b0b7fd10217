"""The kernel with which an owner adds up what others have selected in its shard."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_safusion.kernels.cuda.accumulate import keys_of, own_histogram, uncounted_digits
from lightning_safusion.kernels.cuda.elements import magnitudes
from lightning_safusion.kernels.cuda.entries import PIECE, add_messages
from lightning_safusion.kernels.cuda.rows import EDGES, ELSEWHERE, MOMENTS, TILE_OFFSET, TILE_SIZE


@triton.jit(
    do_not_specialize=["stride", "others", "number", "count", "digit"], do_not_specialize_on_alignment=["memory"]
)
def reduce(
    arriving: tl.tensor,
    memory: tl.tensor,
    sums: tl.tensor,
    held: tl.tensor,
    keys: tl.tensor,
    tiles: tl.tensor,
    tensors: tl.tensor,
    addresses: tl.tensor,
    epsilons: tl.tensor,
    shape: tl.tensor,
    histogram: tl.tensor,
    limits: tl.tensor,
    stride: tl.tensor,
    others: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    digit: tl.tensor,
    MOMENT: tl.constexpr,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """Adds up the messages of others, in the order of ranks, and to that sum this rank's residual.

    What is damaged becomes not finite: all ranks see it in what this one delivers, and none takes anything out of its
    residual. A program for each tile.

    Args:
        arriving: int32 [others, stride], the messages.
        memory: float32 [N], the residual with this rank's gradients.
        sums: float32 [S], of the messages alone.
        held: float32 [S], with the residual.
        keys: int32 [S], by which elements are compared; only with ``MOMENT`` of 0 or more, the kind of the moments.
        tiles, tensors: Of the shard; ``tensors`` say where its pieces are in the buffer.
        addresses: int64 [4, number], of the moments of these pieces.
        epsilons: float32 [number].
        shape: int32 [1, 16], of the messages.
        histogram: int32 [rows, 2^digit], of the first digits of the keys above ``uncounted_digits``.
        limits: int32 [number], of the last window.
        BITS: Of messages that are read together.
        VALUES: Their kind.
    """
    tile = tl.program_id(0)
    piece = tl.load(tiles + tile)
    row = tensors + piece
    offset, size = tl.load(tiles + TILE_OFFSET * count + tile), tl.load(tiles + TILE_SIZE * count + tile)
    place = tl.load(row + EDGES * (number + 1)) + offset
    sums, held, keys = sums + place, held + place, keys + place
    memory += tl.load(row + ELSEWHERE * (number + 1)) + offset
    moments, epsilon = tl.load(addresses + MOMENTS * number + piece), tl.load(epsilons + piece)
    damaged = add_messages(
        arriving, stride, others, 1.0, sums, shape, tensors, tiles, tile, number, count, BITS, VALUES
    )
    histogram = own_histogram(histogram, tensors, piece, tile, number, digit)
    uncounted = uncounted_digits(limits, piece, digit)
    for at in range(0, size, PIECE):
        lanes = at + tl.arange(0, PIECE)
        inside = lanes < size
        x = tl.load(memory + lanes, mask=inside, other=0.0) + tl.load(sums + lanes, mask=inside, other=0.0)
        x = tl.where(damaged != 0, float("nan"), x)
        tl.store(held + lanes, x, mask=inside)
        compared = x
        if MOMENT >= 0:
            compared = keys_of(x, moments, epsilon, offset + lanes, inside, MOMENT)
            tl.store(keys + lanes, magnitudes(compared), mask=inside)
        digits = magnitudes(compared) >> (31 - digit)
        tl.atomic_add(histogram + digits, 1, mask=inside & (digits > uncounted), sem="relaxed")

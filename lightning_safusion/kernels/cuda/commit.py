"""The kernel that ends a window: what was sent leaves the residual, and the host gets what it reads later."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_safusion.kernels.cuda.decode import TILE_OFFSET, TILE_SIZE, read_entries, read_region
from lightning_safusion.kernels.cuda.elements import EDGES, KINDS, LANES, MESSAGE_WORDS, SUMS, load_float

# Columns of the table of buffers, int64 [B, 8]: addresses of its own message, of the descriptions of message, tensors
# and gradients, of its span of the residual and of the messages of all ranks; its tensors; the place of its headers.
_MESSAGE, _SHAPE, _TENSORS, _ADDRESSES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_MEMORY, _RECEIVED, _NUMBER, _HEADERS = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
_COLUMNS = tl.constexpr(8)
# Elements of a tile that are in registers at a time.
_PIECE = tl.constexpr(512)
# The row of the table of tiles behind those of a buffer's own.
_BUFFER = tl.constexpr(8)


@triton.jit
def _load_kind(address: tl.tensor, offsets: tl.tensor, inside: tl.tensor, kind: tl.tensor) -> tl.tensor:
    """:func:`load_float` of a kind that is known on the device only."""
    found = tl.zeros_like(offsets).to(tl.float32)
    if kind == 0:
        found = load_float(address, offsets, inside, 0)
    if kind == 1:
        found = load_float(address, offsets, inside, 1)
    if kind == 2:
        found = load_float(address, offsets, inside, 2)
    return found


@triton.jit
def _take_out(tiles: tl.tensor, row: tl.tensor, tile: tl.tensor, count: tl.tensor, BITS: tl.constexpr) -> None:
    """Subtracts what a tile has in this rank's message, and adds what a narrow gradient could not hold of the mean."""
    message = tl.load(row + _MESSAGE).to(tl.pointer_type(tl.int32))
    shape = tl.load(row + _SHAPE).to(tl.pointer_type(tl.int32))
    tensors = tl.load(row + _TENSORS).to(tl.pointer_type(tl.int32))
    addresses = tl.load(row + _ADDRESSES).to(tl.pointer_type(tl.int64))
    number, tensor = tl.load(row + _NUMBER).to(tl.int32), tl.load(tiles + tile)
    offset, size = tl.load(tiles + TILE_OFFSET * count + tile), tl.load(tiles + TILE_SIZE * count + tile)
    first = tl.load(tensors + EDGES * (number + 1) + tensor) + offset
    memory = tl.load(row + _MEMORY).to(tl.pointer_type(tl.float32)) + first
    kind = tl.load(tensors + KINDS * (number + 1) + tensor)
    lane = tl.load(addresses + LANES * number + tensor)
    if lane >= 0:
        for at in range(0, size, _PIECE):
            elements = at + tl.arange(0, _PIECE)
            sent = _load_kind(tl.load(row + _MESSAGE) + lane, offset + elements, elements < size, kind)
            old = tl.load(memory + elements, mask=elements < size, other=0.0)
            tl.store(memory + elements, old - sent, mask=elements < size)
    else:
        before, behind, length, _wrong = read_region(message, shape, tiles, tile, count)
        seen = before
        for at in range(0, length, BITS):
            value, place, hit, marked, _outside = read_entries(
                message, shape, tensors, tiles, tile, number, count, before, seen, behind, at, length, BITS
            )
            old = tl.load(memory + place, mask=hit, other=0.0)
            tl.store(memory + place, old - value, mask=hit)
            seen += marked
    if kind != 0:
        tl.debug_barrier()
        errors = tl.load(addresses + SUMS * number + tensor).to(tl.pointer_type(tl.float32)) + offset
        for at in range(0, size, _PIECE):
            elements = at + tl.arange(0, _PIECE)
            old = tl.load(memory + elements, mask=elements < size, other=0.0)
            error = tl.load(errors + elements, mask=elements < size, other=0.0)
            tl.store(memory + elements, old + error, mask=elements < size)


@triton.jit
def _report(row: tl.tensor, verdicts: tl.tensor, world: tl.tensor, WIDE: tl.constexpr) -> None:
    """Copies the headers of a buffer's messages, one behind the other."""
    source = tl.load(row + _RECEIVED).to(tl.pointer_type(tl.uint8))
    stride = 4 * tl.load(tl.load(row + _SHAPE).to(tl.pointer_type(tl.int32)) + MESSAGE_WORDS).to(tl.int64)
    size = tl.load(row + _NUMBER).to(tl.int32) + 1
    target = verdicts + tl.load(row + _HEADERS)
    for _ in range(world):
        for at in range(0, size, WIDE):
            place = at + tl.arange(0, WIDE)
            byte = tl.load(source + place, mask=place < size, other=0)
            tl.store(target + place, byte, mask=place < size)
        source += stride
        target += size


@triton.jit(do_not_specialize=["turn", "world", "count"])
def commit(
    tiles: tl.tensor,
    buffers: tl.tensor,
    status: tl.tensor,
    verdicts: tl.tensor,
    turn: tl.tensor,
    world: tl.tensor,
    count: tl.tensor,
    BITS: tl.constexpr,
) -> None:
    """Takes what all buffers have sent out of the residual if the window is good: one program a tile.

    Behind them one program a buffer reports: ``verdicts`` (uint8) gets the status and the headers. ``status`` is int32
    [2]: that of this window (``turn``), and of the next, which becomes 0.
    """
    program = tl.program_id(0)
    if program < count:
        if tl.load(status + turn) == 0:
            row = buffers + _COLUMNS * tl.load(tiles + _BUFFER * count + program)
            _take_out(tiles, row, program, count, BITS)
    else:
        if program == count:
            tl.store(verdicts.to(tl.pointer_type(tl.int32)), tl.load(status + turn))
            tl.store(status + 1 - turn, 0)
        _report(buffers + _COLUMNS * (program - count), verdicts, world, 256)

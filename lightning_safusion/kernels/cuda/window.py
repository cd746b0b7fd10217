"""The end of a window in one launch: what was sent leaves the residual, and the host gets what it reads later."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_safusion.kernels.cuda import launch
from lightning_safusion.kernels.cuda.elements import load_kind, round_float
from lightning_safusion.kernels.cuda.entries import PIECE, describe_tile, read_bits, read_entries, read_region
from lightning_safusion.kernels.cuda.rows import (
    EDGES,
    ELSEWHERE,
    HEADER_HEADS,
    HEADER_RANKS,
    HEADER_STRIDE,
    KINDS,
    LANES,
    OTHER_HEADERS,
    OWN_ADDRESSES,
    OWN_HEADER,
    OWN_MEMORY,
    OWN_MESSAGE,
    OWN_NUMBER,
    OWN_SHAPES,
    OWN_TENSORS,
    OWNER_SUMS,
    REPORT_PLACE,
    SHAPES,
    SUMS,
    TILE_OFFSET,
    TILE_SIZE,
    BufferRow,
    TileRows,
)
from lightning_safusion.kernels.cuda.tables import ANY_VALUES, FOUR_BITS
from lightning_safusion.recent import Recent
from lightning_safusion.sparsify.selection.view import device_constant

if TYPE_CHECKING:
    from lightning_safusion.kernels.cuda.buffer import BufferKernels

#: Sets of tensors, each of an optimizer, that take turns without being told to the device again.
TURNS = 4
_HEADERS = 16  # bytes before the headers in what the host reads
_COLUMNS = tl.constexpr(len(BufferRow._fields))
# The row of the table of tiles behind those of a buffer's own.
_BUFFER = tl.constexpr(len(TileRows._fields))


class WindowKernels:
    """Ends the windows of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._status = torch.zeros(2, dtype=torch.int32, device=device)
        self._turn = 0
        self._recent = Recent[tuple[object, ...], tuple[Tensor, Tensor]](TURNS)
        self._own: list[np.ndarray] = []  # tiles of the buffers
        #: uint8, the status and the headers of the window that has ended last.
        self.verdicts = self._tiles = torch.empty(0, dtype=torch.float32)

    @property
    def status(self) -> Tensor:
        """int32 [1], what is wrong with the open window; 0 if nothing is."""
        return self._status[self._turn : self._turn + 1]

    def forget(self) -> None:
        """The open window does not end."""
        self._status.zero_()

    def commit(self, buffers: Sequence[BufferKernels]) -> None:
        """Takes what the buffers have sent out of their residuals, if nothing is wrong with the window."""
        places = _places(buffers)
        parts = [part for buffer, place in zip(buffers, places, strict=False) for part in buffer.parts(place)]
        rows, own = [row for _, row in parts], [tiles for tiles, _ in parts]
        if len(own) != len(self._own) or any(tiles is not other for tiles, other in zip(own, self._own, strict=True)):
            self._own = own
            numbered = [np.vstack([tiles, np.full((1, tiles.shape[1]), i)]) for i, tiles in enumerate(own)]
            joined = np.ascontiguousarray(np.concatenate(numbered, axis=1), np.int32)
            self._tiles = device_constant(joined, self._device)

        def told() -> tuple[Tensor, Tensor]:
            described = device_constant(np.array(rows, np.int64), self._device)
            return described, torch.zeros(places[-1], dtype=torch.uint8, device=self._device)

        described, self.verdicts = self._recent.get(tuple(rows), told)
        count, world = self._tiles.shape[1], buffers[0].world
        arrays = self._tiles, described, self._status, self.verdicts
        sizes = self._turn, 1.0 / world, world, count
        kinds = {buffer.tables.message.values for buffer in buffers if buffer.tables.room}
        values = kinds.pop() if len(kinds) == 1 else ANY_VALUES if kinds else FOUR_BITS
        launch.launch(commit, count + len(parts), *arrays, *sizes, BITS=launch.BITS, VALUES=values)
        self._turn = 1 - self._turn

    def read(self, copy: Tensor, buffers: Sequence[BufferKernels]) -> tuple[int, list[Tensor]]:
        """From a copy of the verdicts in host memory: the status, and uint8 [ranks, T + 1] of each buffer."""
        headers = [copy[start:stop] for start, stop in pairwise(_places(buffers))]
        by_rank = [own.view(buffer.world, -1) for own, buffer in zip(headers, buffers, strict=True)]
        return int(copy[:4].view(torch.int32)), by_rank


def _places(buffers: Sequence[BufferKernels]) -> list[int]:
    """Where the headers of buffers begin in the verdicts, and where the last end."""
    return list(accumulate((buffer.headers() for buffer in buffers), initial=_HEADERS))


@triton.jit
def _take_lane(
    row: tl.tensor,
    lane: tl.tensor,
    offset: tl.tensor,
    size: tl.tensor,
    memory: tl.tensor,
    kind: tl.tensor,
    good: tl.tensor,
    factor: tl.tensor,
    world: tl.tensor,
) -> None:
    """Subtracts what a tile of a dense tensor has sent: what is in its message, or rounded shares of what it holds."""
    for at in range(0, size, PIECE):
        elements = at + tl.arange(0, PIECE)
        inside = elements < size
        old = tl.load(memory + elements, mask=inside, other=0.0)
        sent = old
        if tl.load(row + OWNER_SUMS) == 0:
            sent = load_kind(tl.load(row + OWN_MESSAGE) + lane, offset + elements, inside, kind)
        if (tl.load(row + OWNER_SUMS) != 0) & (kind != 0):
            sent = round_float(old * factor, kind) * world.to(tl.float32)
        tl.store(memory + elements, old - sent, mask=elements < tl.where(good, size, 0))


@triton.jit
def _take_out(
    tiles: tl.tensor,
    row: tl.tensor,
    tile: tl.tensor,
    count: tl.tensor,
    good: tl.tensor,
    factor: tl.tensor,
    world: tl.tensor,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """Subtracts what a tile has in this rank's message, and adds what a narrow gradient could not hold of the mean.

    In its own shard what this rank delivers is subtracted from what others have sent to it, and the rest of that is
    added to the residual. A window that is not good leaves the residual alone, and any window that of a tensor whose
    mean was not delivered.
    """
    message = tl.load(row + OWN_MESSAGE).to(tl.pointer_type(tl.int32))
    shape = tl.load(row + OWN_SHAPES).to(tl.pointer_type(tl.int32))
    tensors = tl.load(row + OWN_TENSORS).to(tl.pointer_type(tl.int32))
    addresses = tl.load(row + OWN_ADDRESSES).to(tl.pointer_type(tl.int64))
    number, tensor = tl.load(row + OWN_NUMBER).to(tl.int32), tl.load(tiles + tile)
    offset, size = tl.load(tiles + TILE_OFFSET * count + tile), tl.load(tiles + TILE_SIZE * count + tile)
    first = tl.load(tensors + EDGES * (number + 1) + tensor) + offset
    memory = tl.load(row + OWN_MEMORY).to(tl.pointer_type(tl.float32)) + first
    kind = tl.load(tensors + KINDS * (number + 1) + tensor)
    lane = tl.load(addresses + LANES * number + tensor)
    shape += tl.load(tensors + SHAPES * (number + 1) + tensor)
    shard, means = tl.load(row + OWNER_SUMS), tl.load(addresses + SUMS * number + tensor)
    good = good & (means != 0)
    if lane != -1:
        _take_lane(row, lane, offset, size, memory, kind, good, factor, world)
    else:
        target = memory
        if shard != 0:
            elsewhere = tl.load(tensors + ELSEWHERE * (number + 1) + tensor) + offset
            target = shard.to(tl.pointer_type(tl.float32)) + elsewhere
        (
            bucket, elements, begin, _size, earlier, part, part_bits, low_bits, high, low, codes, scales, lowest, last,
            values,
        ) = describe_tile(shape, tensors, tiles, tile, number, count)  # fmt: skip
        before, behind, length, _wrong = read_region(message, shape, tiles, tile, count)
        length, seen = tl.where(good | (shard != 0), length, 0), before
        for at in range(0, length, BITS):
            marked, here = read_bits(message + high, before + bucket, at, length, BITS)
            buckets = at - (seen - before)
            if (buckets <= last) & (buckets + BITS - here >= lowest):
                value, place, hit, _outside = read_entries(
                    message, marked, before, seen, behind, at, bucket,
                    elements, begin, size, earlier, part, part_bits, low_bits, high, low, codes, scales, values,
                    BITS, VALUES,
                )  # fmt: skip
                old = tl.load(target + place, mask=hit, other=0.0)
                tl.store(target + place, old - value, mask=hit)
            seen += here
        if shard != 0:
            tl.debug_barrier()
            _add(memory, target, tl.where(good, size, 0))
    if (kind != 0) & good:
        tl.debug_barrier()
        _add(memory, means.to(tl.pointer_type(tl.float32)) + offset, size)


@triton.jit
def _add(memory: tl.tensor, added: tl.tensor, size: tl.tensor) -> None:
    """Adds float32 numbers to others."""
    for at in range(0, size, PIECE):
        elements = at + tl.arange(0, PIECE)
        old = tl.load(memory + elements, mask=elements < size, other=0.0)
        more = tl.load(added + elements, mask=elements < size, other=0.0)
        tl.store(memory + elements, old + more, mask=elements < size)


@triton.jit
def _report(row: tl.tensor, verdicts: tl.tensor, WIDE: tl.constexpr) -> None:
    """Copies the headers of a buffer, one behind the other, this rank's last if it is not among the others."""
    source, own = tl.load(row + OTHER_HEADERS), tl.load(row + OWN_HEADER)
    stride, size = tl.load(row + HEADER_STRIDE), tl.load(row + HEADER_HEADS).to(tl.int32) + 1
    target, ranks = verdicts + tl.load(row + REPORT_PLACE), tl.load(row + HEADER_RANKS).to(tl.int32)
    for rank in range(ranks + (own != 0).to(tl.int32)):
        header = tl.where(rank < ranks, source, own).to(tl.pointer_type(tl.uint8))
        for at in range(0, size, WIDE):
            place = at + tl.arange(0, WIDE)
            byte = tl.load(header + place, mask=place < size, other=0)
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
    factor: tl.tensor,
    world: tl.tensor,
    count: tl.tensor,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """Takes what all buffers have sent out of the residual if the window is good: one program a tile.

    Behind them one program a buffer reports: ``verdicts`` (uint8) gets the status and the headers. ``status`` is int32
    [2]: that of this window (``turn``), and of the next, which becomes 0. ``VALUES``: the kind of those in messages.
    """
    program = tl.program_id(0)
    if program < count:
        good = tl.load(status + turn) == 0
        row = buffers + _COLUMNS * tl.load(tiles + _BUFFER * count + program)
        if good | (tl.load(row + OWNER_SUMS) != 0):
            _take_out(tiles, row, program, count, good, factor, world, BITS, VALUES)
    else:
        if program == count:
            tl.store(verdicts.to(tl.pointer_type(tl.int32)), tl.load(status + turn))
            tl.store(status + 1 - turn, 0)
        _report(buffers + _COLUMNS * (program - count), verdicts, 256)

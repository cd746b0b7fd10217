"""A buffer whose shards have owners: from gradients to owners, and from the sums of owners to means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_safusion.kernels.cuda import launch
from lightning_safusion.kernels.cuda.accumulate import keys_of, own_histogram, uncounted_digits
from lightning_safusion.kernels.cuda.buffer import BufferKernels, Located, grouped
from lightning_safusion.kernels.cuda.elements import magnitudes
from lightning_safusion.kernels.cuda.entries import PIECE, add_messages
from lightning_safusion.kernels.cuda.packer import Constants, Packer, Workspace
from lightning_safusion.kernels.cuda.rows import EDGES, ELSEWHERE, MOMENTS, TILE_OFFSET, TILE_SIZE, BufferRow
from lightning_safusion.kernels.cuda.tables import ShardTables


@dataclass(frozen=True, eq=False)
class Mail:
    """Memory of the messages of a buffer, uint8."""

    sending: Tensor  #: those for owners, and behind them this worker's header
    arriving: Tensor  #: [workers - 1, nbytes], what others have selected in its shard
    delivering: Tensor  #: the sums that it delivers
    gathered: Tensor  #: [workers, nbytes], those of all owners
    lane: Tensor  #: the means of dense tensors
    header: int  #: bytes of ``sending`` before the header


class OwnerKernels(BufferKernels):
    """Selects for owners, adds up and selects its own shard, and decodes what all owners deliver.

    Args:
        tables: Of the buffer.
        memory: float32 [N], its span of the residual.
        mail: Its messages.
        rank: This worker.
        workspace: Of the stream on which it selects.
        owning: Of the stream on which it adds up its shard.
    """

    owned: ClassVar[bool] = True

    def __init__(
        self, tables: ShardTables, memory: Tensor, mail: Mail, rank: int, workspace: Workspace, owning: Workspace
    ) -> None:
        super().__init__(tables.first, memory, mail.sending, mail.gathered.view(-1), workspace)
        self.world, self.mail, device, second = len(mail.gathered), mail, memory.device, tables.second
        self.origin, self.share = mail.sending[mail.header :], 1.0 / self.world
        self._lane_memory, self._lanes = mail.lane.view(torch.uint8), second.lanes
        self._headers, self._header_stride, self._header_ranks = mail.arriving, mail.arriving.shape[1], self.world - 1
        self._decoding, self._tiles = Constants.of(second, device), self._by_kind(second)
        own, delivering = tables.first.pieces.owners == rank, tables.delivering
        self._owned = np.flatnonzero(own & (second.quotas > 0))
        # what is taken out of the residual at the end; one element more, so that there is an address
        numel = 0 if delivering is None else delivering.numel
        self._sums = torch.zeros(numel + 1, dtype=torch.float32, device=device)
        self._owner = None if delivering is None else Packer(delivering, mail.delivering, owning)
        self._shard = tables.arriving
        self._arriving = None if tables.arriving is None else Constants.of(tables.arriving, device)
        taken = np.isin(second.tiles[0], np.flatnonzero(own | (second.lanes != -1)))
        self._taken = np.ascontiguousarray(second.tiles[:, taken])

    def _grouped(
        self, table: np.ndarray, epsilons: np.ndarray, moment_kinds: np.ndarray, weighed: bool, flags: np.ndarray | None
    ) -> Located:
        located = super()._grouped(table, epsilons, moment_kinds, weighed, flags)
        tables, owned, launches = self._shard, self._owned, []
        if tables is not None:
            for moment, members in grouped(moment_kinds[owned], np.ones(len(owned), bool), weighed):
                tiles = np.ascontiguousarray(tables.tiles[:, members[tables.tiles[0]]])
                if tiles.shape[1]:
                    launches.append((moment, self._told(tiles), tiles.shape[1]))
            addresses = self._told(np.ascontiguousarray(table[:, owned]))
            located.shard = addresses, self._told(epsilons[owned]), launches
        return located

    def reduce(self) -> None:
        """Adds up its shard in what has arrived, and writes what it delivers of that."""
        packer, constants = self._owner, self._arriving
        if packer is None or constants is None or self.located.shard is None:
            return
        addresses, epsilons, launches = self.located.shard
        numel, others, words = packer.tables.numel, self.world - 1, self.mail.arriving.shape[1] // 4
        weighed = any(moment >= 0 for moment, _, _ in launches)  # keys are in other units than the elements
        held, keys = packer.take((numel, numel if weighed else 0))
        for moment, tiles, count in launches:
            arrays = addresses, epsilons, constants.shape, packer.histogram, packer.limits
            launch.launch(
                reduce, count, self.mail.arriving.view(torch.int32), self.memory, self._sums, held.view(torch.float32),
                keys, tiles, constants.tensors, *arrays, words, others, packer.tables.number, count,
                packer.tables.digits[0], MOMENT=moment, BITS=launch.BITS, VALUES=packer.tables.message.values,
            )  # fmt: skip
        packer.find(keys if weighed else held, held)
        packer.pack(0)

    def parts(self, place: int) -> Iterator[tuple[np.ndarray, BufferRow]]:
        yield self.tables.tiles, self._row(self.sent, self.constants)
        delivered = self._with_headers(self._row(self.mail.delivering, self._decoding), place)
        address_of = launch.address_of
        yield self._taken, delivered._replace(owner_sums=address_of(self._sums), own_header=address_of(self.origin))

    def leaving(self) -> Tensor:
        """float32 [S], what the end of the last window has taken out of the residual of its shard."""
        return -self._sums[:-1]


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

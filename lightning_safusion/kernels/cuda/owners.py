"""The launches of a buffer whose shards have owners: from gradients to owners, and from the sums of owners to means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.kernels.cuda import buffer, decode
from lightning_safusion.kernels.cuda import reduce as reducing
from lightning_safusion.kernels.cuda.buffer import BITS, BufferKernels, Packer
from lightning_safusion.kernels.cuda.located import Located, Reductions, grouped
from lightning_safusion.kernels.cuda.rows import BufferRow
from lightning_safusion.kernels.cuda.tables import ShardTables
from lightning_safusion.kernels.cuda.workspace import Constants, Workspace
from lightning_safusion.sparsify.selection.view import device_constant


@dataclass(frozen=True, eq=False)
class Mail:
    """Memory of the messages of a buffer, uint8.

    Args:
        sending: Those for owners, and behind them this worker's header.
        arriving: [workers - 1, nbytes], what others have selected in its shard.
        delivering: The sums that it delivers.
        gathered: [workers, nbytes], those of all owners.
        lane: The means of dense tensors.
        header: Bytes of ``sending`` before the header.
    """

    sending: Tensor
    arriving: Tensor
    delivering: Tensor
    gathered: Tensor
    lane: Tensor
    header: int


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

    def __init__(
        self, tables: ShardTables, memory: Tensor, mail: Mail, rank: int, workspace: Workspace, owning: Workspace
    ) -> None:
        super().__init__(tables.first, memory, mail.sending, mail.gathered.view(-1), rank, workspace)
        self.world, self.mail, self._shards, device = len(mail.gathered), mail, tables, memory.device
        self.origin, self.share = mail.sending[mail.header :], 1.0 / self.world
        self._second, self._tiles = Constants.of(tables.second, device), self._by_kind(tables.second)
        cut, sparse = tables.first.cut, tables.second.quotas > 0
        owners = tables.first.owners if cut is None else cut.owners
        self._owned = np.flatnonzero((owners == rank) & sparse)
        shard = 0 if tables.delivering is None else tables.delivering.numel
        # what is taken out of the residual at the end; one element more, so that there is an address
        self._sums = torch.zeros(shard + 1, dtype=torch.float32, device=device)
        self._arriving = None if tables.arriving is None else Constants.of(tables.arriving, device)
        delivering = tables.delivering
        self._owner = None if delivering is None else Packer(delivering, mail.delivering, owning)
        taken = np.isin(tables.second.tiles[0], np.flatnonzero((owners == rank) | (tables.second.lanes != -1)))
        self._taken = np.ascontiguousarray(tables.second.tiles[:, taken])

    def _lanes(self) -> np.ndarray:
        lanes = self._shards.second.lanes
        distance = buffer.address_of(self.mail.lane) - buffer.address_of(self.origin)
        return np.where(lanes != -1, lanes + distance, -1)

    def _lane_memory(self) -> tuple[Tensor, np.ndarray]:
        return self.mail.lane.view(torch.uint8), self._shards.second.lanes

    def _told(
        self, table: np.ndarray, epsilons: np.ndarray, moment_kinds: np.ndarray, weighed: bool, flags: np.ndarray | None
    ) -> Located:
        located = super()._told(table, epsilons, moment_kinds, weighed, flags)
        tables, device, owned = self._shards.arriving, self.memory.device, self._owned
        if tables is not None:
            launches = []
            for moment, members in grouped(moment_kinds[owned], np.ones(len(owned), bool), weighed):
                tiles = np.ascontiguousarray(tables.tiles[:, members[tables.tiles[0]]])
                if tiles.shape[1]:
                    launches.append((moment, device_constant(tiles, device), tiles.shape[1]))
            addresses = device_constant(np.ascontiguousarray(table[:, owned]), device)
            located.shard = Reductions(addresses, device_constant(epsilons[owned], device), launches)
        return located

    def reduce(self) -> None:
        """Adds up its shard in what has arrived, and writes what it delivers of that."""
        packer, constants, shard = self._owner, self._arriving, self.located.shard
        if packer is None or constants is None or shard is None:
            return
        numel, others, words = packer.tables.numel, self.world - 1, self.mail.arriving.shape[1] // 4
        weighed = any(moment >= 0 for moment, _, _ in shard.launches)  # keys are in other units than the elements
        held, keys = packer.take((numel, numel if weighed else 0))
        for moment, tiles, count in shard.launches:
            arrays = shard.addresses, shard.epsilons, constants.shape, packer.histogram, packer.limits
            buffer.launch(
                reducing.reduce, count, self.mail.arriving.view(torch.int32), self.memory, self._sums,
                held.view(torch.float32), keys, tiles, constants.tensors, *arrays, words, others, packer.tables.number,
                count, packer.tables.digits[0], MOMENT=moment, BITS=BITS,
                VALUES=packer.tables.message.values,
            )  # fmt: skip
        packer.find(keys if weighed else held, held)
        packer.selected = True
        packer.pack(0)

    def decode(self, decay: float, status: Tensor) -> None:
        constants, number, mail = self._second, self._shards.second.number, self.mail
        words, row, heads = mail.gathered.shape[1] // 4, mail.arriving.shape[1], self.tables.heads
        for kind, tiles, count in self._tiles:
            arrays = self.memory, tiles, constants.tensors, self.located.addresses, constants.shape, self.scales, status
            factors, strides = (decay, 1.0 / self.world), (words, row, self.world - 1, self.world)
            buffer.launch(
                decode.decode, count, self.received.view(torch.int32), self.origin, mail.arriving, *arrays, *factors,
                *strides, heads, number, count, KIND=kind, BITS=BITS, OWNED=True,
                VALUES=self.tables.message.values,
            )  # fmt: skip

    def parts(self, place: int) -> Iterator[tuple[np.ndarray, BufferRow]]:
        address_of, mail = buffer.address_of, self.mail
        first = BufferRow(
            own_message=address_of(mail.sending),
            own_shapes=address_of(self.constants.shape),
            own_tensors=address_of(self.constants.tensors),
            own_addresses=address_of(self.located.addresses),
            own_memory=address_of(self.memory),
            owner_sums=0,
            own_number=self.tables.number,
            own_header=0,
            other_headers=0,
            header_ranks=0,
            header_stride=0,
            header_heads=0,
            report_place=0,
        )
        yield self.tables.tiles, first
        second = first._replace(
            own_message=address_of(mail.delivering),
            own_shapes=address_of(self._second.shape),
            own_tensors=address_of(self._second.tensors),
            owner_sums=address_of(self._sums),
            own_header=address_of(self.origin),
            other_headers=address_of(mail.arriving),
            header_ranks=self.world - 1,
            header_stride=mail.arriving.shape[1],
            header_heads=self.tables.heads,
            report_place=place,
        )
        yield self._taken, second

    def leaving(self) -> Tensor:
        """float32 [S], what the end of the last window has taken out of the residual of its shard."""
        return -self._sums[:-1]

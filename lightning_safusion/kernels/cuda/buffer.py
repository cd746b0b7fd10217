"""The launches of a buffer and of a window: from gradients to messages, and from messages to means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.kernels.cuda import accumulate as accumulating
from lightning_safusion.kernels.cuda import commit, decode, digits, encode
from lightning_safusion.kernels.cuda.launch import address_of, launch
from lightning_safusion.kernels.cuda.tables import KINDS, WIDTH, Message, Runs, Tables
from lightning_safusion.sparsify.selection.view import device_constant

#: Elements that a program of the kernels holds at a time, and entries, in groups of 32, and bits of a message.
BLOCK, GROUPS, BITS = 1024, 16, 256
_HEADERS = 16  # bytes before the headers in what the host reads


class Weighing(NamedTuple):
    """What the optimizer divides gradients by, where keys are compared.

    Args:
        moments: Second moments, flat; None for a tensor whose elements are their own keys.
        epsilons: What is added to their roots.
        keys: int32 [N], is written.
    """

    moments: Sequence[Tensor | None]
    epsilons: Sequence[float]
    keys: Tensor


class Workspace:
    """Memory that the selections of all buffers of one stream use in turn."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.int32, device=device)

    def take(self, sizes: Sequence[int], zeros: int) -> list[Tensor]:
        """int32 vectors that lie one behind the other, the first ``zeros`` of them filled with zeros at once."""
        ends = list(accumulate(sizes, initial=0))
        if len(self._memory) < ends[-1]:
            self._memory = torch.empty(ends[-1], dtype=torch.int32, device=self._memory.device)
        self._memory[: ends[zeros]].zero_()
        return list(self._memory[: ends[-1]].split(list(sizes)))


@dataclass(frozen=True, eq=False)
class _Constants:
    """Tables of a buffer on its device."""

    tensors: Tensor
    shape: Tensor
    chunks: Tensor

    @classmethod
    def of(cls, tables: Tables, device: torch.device) -> _Constants:
        arrays = tables.tensors, tables.message.described(), tables.chunks
        return cls(*(device_constant(array, device) for array in arrays))


class BufferKernels:
    """Selects, packs and decodes one buffer.

    Args:
        tables: Its constants.
        memory: float32 [N], its span of the residual.
        sent: uint8, its own message.
        received: uint8, those of all ranks.
        rank: This rank.
        workspace: Of the stream on which it selects.
    """

    def __init__(
        self, tables: Tables, memory: Tensor, sent: Tensor, received: Tensor, rank: int, workspace: Workspace
    ) -> None:
        self.tables, self.memory, self.rank = tables, memory, rank
        self.sent, self.received = sent, received
        self.world = len(received) // len(sent)
        self._workspace, device = workspace, memory.device
        self._words, self._halves = sent.view(torch.int32), sent.view(torch.int16)
        self.constants = _Constants.of(tables, device)
        kinds = sorted({*tables.kinds.tolist()})
        tiles = [(kind, tables.tiles_of(kind)) for kind in kinds]
        self._tiles = [(kind, device_constant(own, device), own.shape[1]) for kind, own in tiles if own.shape[1]]
        narrow = np.where(tables.kinds > 0, tables.sizes, 0)
        #: float32, what narrow gradients cannot hold of the means.
        self._errors = torch.zeros(int(narrow.sum()), device=device)
        self._error_places = 4 * (narrow.cumsum() - narrow)
        self._known: tuple[object, ...] | None = None  # the host's copy of addresses and epsilons
        self.addresses, self._epsilons = torch.empty(0), torch.empty(0)
        self._launches: list[tuple[int, int, Tensor, int]] = []  # kinds of gradients and moments, and their chunks
        self._packed: tuple[Tensor, Tensor, Tensor] | None = None

    # -- addresses -------------------------------------------------------------------------------------------------

    def locate(self, gradients: Sequence[Tensor], weighing: Weighing | None) -> None:
        """Tells the device where the gradients and moments of this window are, if it does not know."""
        grads = tuple(map(address_of, gradients))
        known: tuple[object, ...] = (grads,)
        if weighing is not None:
            moments = tuple(0 if moment is None else address_of(moment) for moment in weighing.moments)
            kinds = tuple(-1 if moment is None else KINDS.index(moment.dtype) for moment in weighing.moments)
            known = (grads, moments, kinds, tuple(weighing.epsilons))
        if known == self._known:
            return
        self._known, number, device = known, self.tables.number, self.memory.device
        table = np.zeros((4, number), np.int64)
        table[0], table[2] = grads, self.tables.lanes
        table[3] = np.where(self.tables.kinds > 0, address_of(self._errors) + self._error_places, table[0])
        epsilons, moment_kinds = np.zeros(number, np.float32), np.full(number, -1)
        if weighing is not None:
            table[1], moment_kinds, epsilons[:] = moments, np.array(kinds), weighing.epsilons
        self.addresses, self._epsilons = device_constant(table, device), device_constant(epsilons, device)
        self._launches = self._grouped(moment_kinds, weighing is not None)

    def _grouped(self, moment_kinds: np.ndarray, weighed: bool) -> list[tuple[int, int, Tensor, int]]:
        """The chunks of tensors with gradients and moments of the same kinds; without moments goes with any."""
        kinds, launches = self.tables.kinds, []
        for kind in sorted({*kinds.tolist()}):
            own = kinds == kind
            found = sorted({*moment_kinds[own].tolist()} - {-1}) or [0 if weighed else -1]
            for place, moment in enumerate(found):
                members = own & ((moment_kinds == moment) | (moment_kinds == -1) & (place == 0))
                if members.all():
                    chunks, count = self.constants.chunks, self.constants.chunks.shape[1]
                else:
                    part = self.tables.chunks_of(np.flatnonzero(members).tolist())
                    chunks, count = device_constant(part, self.memory.device), part.shape[1]
                launches.append((kind, moment, chunks, count))
        return launches

    # -- from gradients to a message ---------------------------------------------------------------------------------

    def select(self, decay: float, weighing: Weighing | None) -> None:
        """Adds the gradients to the residual, and finds what is sent of the sum."""
        tables, number = self.tables, self.tables.number
        message, count, levels = tables.message, tables.chunks.shape[1], tables.digits
        histogram_sizes = [number << bits for bits in levels] if tables.room else []
        pool_sizes = [1 << bits for bits in levels] if tables.pool else []
        zeros = [number, message.parts, *histogram_sizes, *pool_sizes]
        rest = [4 * number] * len(levels) + [2 * count, 2 * message.capacity]
        flags, largest, *others = self._workspace.take([*zeros, *rest], len(zeros))
        histograms, pools = others[: len(histogram_sizes)], others[len(histogram_sizes) : len(zeros) - 2]
        *states, counts, entries = others[len(zeros) - 2 :]
        keys = self.memory.view(torch.int32) if weighing is None else weighing.keys
        self._compensate(keys, flags, histograms[0] if histograms else flags, decay)
        self._packed = flags, largest, entries
        if tables.room:
            self._find(keys, histograms, pools, states, counts)
            found, words = states[-1], self._words
            arrays = self.constants.chunks, self.constants.tensors, self.constants.shape, found, counts, words
            launch(
                encode.write, count, keys, self.memory.view(torch.int32), *arrays, entries, largest, tables.room,
                number, count, POOLED=bool(pools), BLOCK=BLOCK,
            )  # fmt: skip

    def _compensate(self, keys: Tensor, flags: Tensor, histogram: Tensor, decay: float) -> None:
        bits = self.tables.digits[0] if self.tables.room else 0
        for kind, moment, chunks, count in self._launches:
            arrays = self.constants.tensors, self.addresses, self._epsilons, flags, histogram, self.sent
            sizes, options = (decay, self.tables.number, count), {"GRAD": kind, "MOMENT": moment, "BITS": bits}
            launch(accumulating.compensate, count, self.memory, keys, chunks, *arrays, *sizes, **options, BLOCK=BLOCK)

    def _find(
        self,
        keys: Tensor,
        histograms: Sequence[Tensor],
        pools: Sequence[Tensor],
        states: Sequence[Tensor],
        counts: Tensor,
    ) -> None:
        """Finds the limits, digit by digit, and counts what is above and at them."""
        constants, number, count = self.constants, self.tables.number, self.tables.chunks.shape[1]
        room, pooled, levels = self.tables.room, bool(pools), self.tables.digits
        span = keys, constants.chunks, constants.tensors
        shift, found = 31 - levels[0], states[0]
        for level, bits in enumerate(levels):
            first, before = level == 0, found
            pool = pools[level] if pooled else histograms[level]
            if pooled:
                launch(
                    digits.share, number, histograms[level], constants.tensors, before, pool, number,
                    BITS=bits, FIRST=first,
                )  # fmt: skip
            found = states[level]
            if level == len(levels) - 1:
                arrays = histograms[level], pool, before, found, counts
                sizes = room, number, count
                launch(digits.count_chunks, count, *span, *arrays, *sizes, BITS=bits, POOLED=pooled, BLOCK=WIDTH)
                return
            following = levels[level + 1]
            shift -= following
            launch(
                digits.narrow, count, *span, constants.shape, self._words, histograms[level], pool, before, found,
                histograms[level + 1], room, number, count, BITS_BEFORE=bits, BITS=following, SHIFT=shift,
                FIRST=first, POOLED=pooled, BLOCK=WIDTH,
            )  # fmt: skip

    def pack(self, notices: int) -> None:
        """Writes the message; ``notices``: bits for all ranks."""
        if self._packed is None:
            raise RuntimeError("nothing was selected that could be packed")
        (flags, largest, entries), self._packed = self._packed, None
        tables, selected = self.tables, self.tables.room > 0
        programs = max(1, -(-tables.message.capacity // (32 * GROUPS)))
        arrays = entries, largest, flags, self.constants.shape, self._words, self.sent, self._halves
        sizes = notices, tables.room, tables.number
        launch(encode.pack, programs, *arrays, *sizes, SELECTED=selected, GROUPS=GROUPS)

    # -- from messages to means --------------------------------------------------------------------------------------

    def decode(self, decay: float, status: Tensor) -> None:
        """Writes the means into the gradients, and what is wrong with the messages into the status (int32 [1])."""
        constants, number = self.constants, self.tables.number
        received = self.received.view(torch.int32)
        for kind, tiles, count in self._tiles:
            arrays = received, self.memory, tiles, constants.tensors, self.addresses, constants.shape, status
            sizes = decay, 1.0 / self.world, self.world, self.rank, number, count
            launch(decode.decode, count, *arrays, *sizes, KIND=kind, BITS=BITS)

    def headers(self) -> int:
        """Bytes of the headers of all messages."""
        return self.world * (self.tables.number + 1)

    def row(self, place: int) -> list[int]:
        """What the end of a window is told of this buffer, whose headers it puts at a place."""
        held = self.sent, self.constants.shape, self.constants.tensors, self.addresses, self.memory, self.received
        return [*map(address_of, held), self.tables.number, place]


class WindowKernels:
    """Ends the windows of one device.

    Args:
        device: Where the buffers live.

    Attributes:
        verdicts: uint8, the status and the headers of the window that has ended last.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._status = torch.zeros(2, dtype=torch.int32, device=device)
        self._turn = 0
        self._known: tuple[object, ...] = ()
        self._tiles = self._buffers = self.verdicts = torch.empty(0)

    @property
    def status(self) -> Tensor:
        """int32 [1], what is wrong with the open window; 0 if nothing is."""
        return self._status[self._turn : self._turn + 1]

    def forget(self) -> None:
        """The open window does not end."""
        self._status.zero_()

    def commit(self, buffers: Sequence[BufferKernels]) -> None:
        """Takes what the buffers have sent out of their residuals, if nothing is wrong with the window."""
        places = list(accumulate((buffer.headers() for buffer in buffers), initial=_HEADERS))
        rows = [buffer.row(place) for buffer, place in zip(buffers, places, strict=False)]
        known = tuple(map(tuple, rows))
        if known != self._known:
            self._known = known
            tiles = [
                np.vstack([b.tables.tiles, np.full((1, b.tables.tiles.shape[1]), i)]) for i, b in enumerate(buffers)
            ]
            joined = np.ascontiguousarray(np.concatenate(tiles, axis=1), np.int32)
            self._tiles = device_constant(joined, self._device)
            self._buffers = device_constant(np.array(rows, np.int64), self._device)
            self.verdicts = torch.zeros(places[-1], dtype=torch.uint8, device=self._device)
        count = self._tiles.shape[1]
        arrays = self._tiles, self._buffers, self._status, self.verdicts
        sizes = self._turn, buffers[0].world, count
        launch(commit.commit, count + len(buffers), *arrays, *sizes, BITS=BITS)
        self._turn = 1 - self._turn

    def read(self, copy: Tensor, buffers: Sequence[BufferKernels]) -> tuple[int, list[Tensor]]:
        """From a copy of the verdicts in host memory: the status, and uint8 [ranks, T + 1] of each buffer."""
        places = list(accumulate((buffer.headers() for buffer in buffers), initial=_HEADERS))
        headers = [
            copy[place : place + buffer.headers()].view(buffer.world, -1)
            for buffer, place in zip(buffers, places, strict=False)
        ]
        return int(copy[:4].view(torch.int32)), headers


def probe(device: torch.device) -> None:
    """Compiles and starts the kernels; raises what the toolchain raises where that is not possible."""
    fields, edges = (4, 8, 12, 20, 24), np.array([0, 64])
    runs = Runs(np.array([0, 8]), np.array([0, 1]), np.array([0]), np.array([7]))
    message = Message(6, 3, 1, fields, 128, 16, runs)
    tables = Tables(edges, np.array([6]), 0, np.array([0]), np.array([-1]), message)
    sent, memory = torch.zeros(128, dtype=torch.uint8, device=device), torch.zeros(64, device=device)
    kernels, windows = BufferKernels(tables, memory, sent, sent, 0, Workspace(device)), WindowKernels(device)
    kernels.locate([torch.ones_like(memory)], None)
    kernels.select(1.0, None)
    kernels.pack(0)
    kernels.decode(1.0, windows.status)
    windows.commit([kernels])

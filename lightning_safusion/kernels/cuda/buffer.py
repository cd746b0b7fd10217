"""The launches of a buffer and of a window: from gradients to messages, and from messages to means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.kernels.cuda import accumulate as accumulating
from lightning_safusion.kernels.cuda import commit, decode, digits, encode
from lightning_safusion.kernels.cuda.elements import FRESH, ROOM, SUMS
from lightning_safusion.kernels.cuda.graphs import Recorded, recorded
from lightning_safusion.kernels.cuda.launch import address_of, launch
from lightning_safusion.kernels.cuda.tables import ANY_VALUES, FOUR_BITS, KINDS, Message, Runs, Tables
from lightning_safusion.kernels.cuda.workspace import Constants, Weighing, Workspace
from lightning_safusion.sparsify.selection.view import device_constant

__all__ = ["BufferKernels", "Packer", "Weighing", "WindowKernels", "Workspace", "probe"]

#: Elements that a program of the kernels holds at a time, and entries, in groups of 32, and bits of a message.
BLOCK, GROUPS, BITS = 1024, 16, 256
_ITEMS = 512  # of its candidates
_HEADERS = 16  # bytes before the headers in what the host reads


class Packer:
    """Finds the largest elements of a vector, and writes them into messages.

    Args:
        tables: Of the vector and the messages.
        out: uint8, the memory of the messages.
        workspace: Of the stream on which it works.
    """

    def __init__(self, tables: Tables, out: Tensor, workspace: Workspace) -> None:
        self.tables, self.out, self.workspace = tables, out, workspace
        self.constants = Constants.of(tables, out.device)
        self.words, self._halves = out.view(torch.int32), out.view(torch.int16)
        self.entries = self.largest = torch.empty(0, dtype=torch.int32)  #: [2, most], [P]: see :func:`encode.write`
        self.selected = False  #: what :meth:`pack` writes is there
        self.room = tables.room  #: entries of a window
        #: int32 [T], [T, bins]: what is written before :meth:`find`.
        self.flags = self.histogram = torch.empty(0, dtype=torch.int32)

    def take(self, more: Sequence[int] = (), *, known: bool = False) -> list[Tensor]:
        """Takes memory for a selection; returns further int32 vectors of the lengths ``more``.

        ``known``: Nothing will be searched for.
        """
        tables, number = self.tables, self.tables.number
        levels = () if known or not tables.room else tables.digits
        message, count = tables.message, tables.chunks.shape[1]
        histogram_sizes = [(number if level else int(tables.rows[-1])) << bits for level, bits in enumerate(levels)]
        self._listing = int(tables.lists[-1]) if levels else 0
        pool_sizes = [1 << bits for bits in levels] if tables.pool else []
        zeros = [tables.heads, message.parts, *pool_sizes, *histogram_sizes]
        # entries are written when histograms have been read for the last time: they begin where these do
        beyond = max(0, 2 * message.capacity - sum(histogram_sizes))
        rest = [beyond, *[4 * number] * len(levels), 3 * count, 2 * self._listing, *more]
        taken = iter(self.workspace.take([*zeros, *rest], len(zeros)))
        self.flags, self.largest = next(taken), next(taken)
        self._pools = [next(taken) for _ in pool_sizes]
        self._histograms = [next(taken) for _ in histogram_sizes]
        behind = next(taken)
        self.entries = [*self._histograms, behind][0].as_strided((2 * message.capacity,), (1,))
        self._states = [next(taken) for _ in levels]
        self._counts, self._lists, *others = taken
        self.histogram = self._histograms[0] if self._histograms else self.flags
        return others

    def find(self, keys: Tensor, values: Tensor) -> None:
        """Finds what is sent of values (float32 [N]), compared by keys (int32 [N]), whose first digits are counted."""
        if not self.tables.room:
            return
        tables, constants, number, count = self.tables, self.constants, self.tables.number, self.tables.chunks.shape[1]
        span, levels, pooled = (keys, constants.chunks, constants.tensors), tables.digits, bool(self._pools)
        lists, sizes = (self._lists, self._counts), (self.room, number, count, self._listing)
        shift, last = 31 - levels[0], len(levels) - 1
        for level, bits in enumerate(levels):
            before, found = self._states[max(level - 1, 0)], self._states[level]
            histogram, pool = self._histograms[level], (self._pools or self._histograms)[level]
            if pooled or (level == 0 and tables.rows[-1] > number):
                self.share(level)
            if level == last:
                launch(
                    digits.count_chunks, count, *span, histogram, pool, before, found, *lists, *sizes, BITS=bits,
                    POOLED=pooled, BLOCK=_ITEMS,
                )  # fmt: skip
                break
            following = levels[level + 1]
            shift -= following
            if level == 0:
                launch(
                    digits.collect, count, *span, constants.shape, self.words, histogram, pool, found,
                    self._histograms[1], *lists, len(tables.described), *sizes, BITS_BEFORE=bits, BITS=following,
                    POOLED=pooled, BLOCK=BLOCK, ITEMS=_ITEMS,
                )  # fmt: skip
            else:
                launch(
                    digits.narrow, count, *span, histogram, pool, before, found, self._histograms[level + 1], *lists,
                    *sizes, BITS_BEFORE=bits, BITS=following, SHIFT=shift, POOLED=pooled, BLOCK=_ITEMS,
                )  # fmt: skip
        described = constants.chunks, constants.tensors, constants.shape, self._states[-1]
        launch(
            encode.write, count, keys, values.view(torch.int32), *described, *lists, self.words, self.entries,
            self.largest, tables.message.capacity, *sizes, POOLED=pooled, BLOCK=_ITEMS,
            SCALED=tables.message.values == FOUR_BITS,
        )  # fmt: skip

    def share(self, level: int) -> None:
        """Adds up histograms of a digit: those of a tensor, and what tensors take of their pool."""
        histogram, pool = self._histograms[level], (self._pools or self._histograms)[level]
        arrays = histogram, self.constants.tensors, self._states[max(level - 1, 0)], pool
        number, bits = self.tables.number, self.tables.digits[level]
        launch(digits.share, number, *arrays, number, BITS=bits, FIRST=level == 0, POOLED=bool(self._pools))

    def pack(self, notices: int, recorded: Recorded | None = None) -> None:
        """Writes the messages; ``notices``: bits for all ranks."""
        if not self.selected:
            raise RuntimeError("nothing was selected that could be packed")
        self.selected = False
        if recorded is None:
            self._pack(notices)
        else:
            recorded.run((notices, self.workspace.moves), lambda: self._pack(notices))

    def _pack(self, notices: int) -> None:
        tables = self.tables
        most = int(tables.described[:, 0].max())
        programs = max(1, -(-most // (32 * GROUPS)))
        arrays = self.entries, self.largest, self.flags, self.constants.shape, self.words, self.out, self._halves
        sizes = notices, tables.message.capacity, tables.heads, programs
        count = programs * len(tables.described)
        options = {"SELECTED": tables.room > 0, "GROUPS": GROUPS, "VALUES": tables.message.values}
        launch(encode.pack, count, *arrays, *sizes, **options)


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
        self.world = len(received) // max(1, len(sent))
        self.packer = Packer(tables, sent, workspace)
        self._selection, self._packing = recorded(memory.device), recorded(memory.device)
        self.constants = self.packer.constants
        #: Where lanes are counted from, and the share of an element that is there.
        self.origin, self.share = sent, 1.0
        self._tiles = self._by_kind(tables)
        narrow = np.where(tables.kinds > 0, tables.sizes, 0)
        #: float32, what narrow gradients cannot hold of the means.
        self._errors = torch.zeros(int(narrow.sum()), dtype=torch.float32, device=memory.device)
        self._error_places = 4 * (narrow.cumsum() - narrow)
        self._known: tuple[object, ...] | None = None  # the host's copy of addresses and epsilons
        #: float32 [2], the factor of the loss that gradients carry, and its reciprocal.
        self.scales = workspace.unscaled
        #: int32 [1], what is wrong with a window of which the host decides; 0 if nothing is.
        self.status = torch.zeros(1, dtype=torch.int32, device=memory.device)
        self._flags: Tensor | None = None  # int32 [T], where they are not those of almost every window
        self._silent: list[Tensor] = []  # dense lanes of which nothing is sent
        self._left: tuple[int, ...] = ()
        self._places = np.zeros(0, np.int64)  # where means are added up
        self._told = 0  # how often the device was told others: tables of its own, to which graphs point
        self.addresses = torch.empty(0, dtype=torch.int64)
        self._epsilons = torch.empty(0, dtype=torch.float32)
        self._launches: list[tuple[int, int, Tensor, int]] = []  # kinds of gradients and moments, and their chunks

    def _by_kind(self, tables: Tables) -> list[tuple[int, Tensor, int]]:
        """Kinds of gradients, their tiles, and how many these are."""
        tiles = [(kind, tables.tiles_of(kind)) for kind in sorted({*tables.kinds.tolist()})]
        return [(kind, device_constant(own, self.memory.device), own.shape[1]) for kind, own in tiles if own.shape[1]]

    # -- addresses -------------------------------------------------------------------------------------------------

    def locate(self, gradients: Sequence[Tensor], weighing: Weighing | None, flags: np.ndarray | None = None) -> None:
        """Tells the device what is new of this window.

        Args:
            gradients: Flat, one of each tensor; where they are.
            weighing: In what elements are compared.
            flags: uint8 [T] of ``TensorFlag``: only tensors that are fresh, and nothing else, are added and sent.
                None: all are.
        """
        grads = tuple(map(address_of, gradients))
        marked = None if flags is None else flags.tobytes()
        known: tuple[object, ...] = (grads, marked)
        if weighing is not None:
            moments = tuple(0 if moment is None else address_of(moment) for moment in weighing.moments)
            kinds = tuple(-1 if moment is None else KINDS.index(moment.dtype) for moment in weighing.moments)
            known = (grads, marked, moments, kinds, tuple(weighing.epsilons))
        if known == self._known:
            return
        tables = self.tables
        table, of = np.zeros((4, tables.number), np.int64), tables.tensors_of
        table[0] = np.array(grads, np.int64)[of] + tables.inside * _WIDTHS[tables.kinds]
        table[2] = self._lanes()
        table[3] = np.where(tables.kinds > 0, address_of(self._errors) + self._error_places, table[0])
        epsilons, moment_kinds = np.zeros(tables.number, np.float32), np.full(tables.number, -1)
        if weighing is not None:
            moment_kinds[:], epsilons[:] = np.array(kinds)[of], np.array(weighing.epsilons)[of]
            there = np.array(moments, np.int64)[of]
            table[1] = np.where(there != 0, there + tables.inside * _WIDTHS[moment_kinds], 0)
        taken = np.ones(tables.number, bool) if flags is None else (flags == FRESH.value)[of]
        self._tell(table, epsilons, moment_kinds, weighing is not None, taken)
        self._mark(flags, taken)
        self._known, self._places, self._left = known, table[SUMS.value], ()
        self._told += 1

    def leave(self, tensors: Sequence[int]) -> None:
        """Leaves the gradients of these tensors as they are, and the residual, until other gradients are located."""
        if self._left != (left := tuple(tensors)):
            places = np.where(np.isin(self.tables.tensors_of, left), 0, self._places)
            self.addresses[SUMS.value].copy_(device_constant(places, self.memory.device))
            self._left = left

    def _mark(self, flags: np.ndarray | None, taken: np.ndarray) -> None:
        """Says which rows send something, if that is not known: flags of tensors, and bool of rows."""
        if flags is None and self._flags is None:
            return
        tables, constants, device = self.tables, self.constants, self.memory.device
        tensors, described, self.packer.room = tables.of_some(taken)
        constants.tensors.copy_(device_constant(tensors, device))
        constants.shape.copy_(device_constant(described, device))
        self._flags = None if flags is None else device_constant((flags ^ FRESH.value).astype(np.int32), device)
        memory, lanes = self._lane_memory()
        ends = lanes + tables.sizes * _WIDTHS[tables.kinds]
        self._silent = [memory[lanes[row] : ends[row]] for row in np.flatnonzero(~taken & (lanes != -1)).tolist()]

    def _lane_memory(self) -> tuple[Tensor, np.ndarray]:
        """Memory with dense lanes, uint8, and where in it those of the rows begin; -1 for none."""
        return self.sent, self.tables.lanes

    def _lanes(self) -> np.ndarray:
        """int64 [T], bytes from the origin of lanes to each, -1 for none."""
        return self.tables.lanes

    def _tell(
        self, table: np.ndarray, epsilons: np.ndarray, moment_kinds: np.ndarray, weighed: bool, taken: np.ndarray
    ) -> None:
        """Copies addresses to the device, and groups launches by the kinds of gradients and moments."""
        device, kinds = self.memory.device, self.tables.kinds
        self.addresses, self._epsilons = device_constant(table, device), device_constant(epsilons, device)
        self._launches = []
        for kind in sorted({*kinds.tolist()}):
            for moment, members in grouped(moment_kinds, (kinds == kind) & taken, weighed):
                if members.all():
                    chunks, count = self.constants.chunks, self.constants.chunks.shape[1]
                else:
                    part = self.tables.chunks_of(np.flatnonzero(members).tolist())
                    chunks, count = device_constant(part, device), part.shape[1]
                self._launches.append((kind, moment, chunks, count))

    # -- from gradients to a message ---------------------------------------------------------------------------------

    def select(self, decay: float, weighing: Weighing | None) -> None:
        """Adds the gradients to the residual, and finds what is sent of the sum."""
        keys = self.memory.view(torch.int32) if weighing is None else weighing.keys
        key = self._told, decay, address_of(keys), address_of(self.scales), self.packer.workspace.moves
        self._selection.run(key, lambda: self._select(decay, keys))
        self.packer.selected = True

    def _select(self, decay: float, keys: Tensor) -> None:
        self.packer.take()
        self._compensate(decay, keys)
        self.packer.find(keys, self.memory)

    def _compensate(self, decay: float, keys: Tensor, *, known: bool = False) -> None:
        """Adds the gradients to the residual, and counts the first digit of keys, unless what is sent is known."""
        bits = self.tables.digits[0] if self.tables.room and not known else 0
        if self._flags is not None:
            self.packer.flags.copy_(self._flags)
        if self._silent:
            torch._foreach_zero_(self._silent)
        for kind, moment, chunks, count in self._launches:
            arrays = self.constants.tensors, self.addresses, self._epsilons, self.scales
            counted = self.packer.flags, self.packer.histogram, self.origin
            sizes = decay, self.share, self.tables.number, count
            options = {"GRAD": kind, "MOMENT": moment, "BITS": bits, "BLOCK": BLOCK}
            launch(accumulating.compensate, count, self.memory, keys, chunks, *arrays, *counted, *sizes, **options)

    def pack(self, notices: int) -> None:
        """Writes the message; ``notices``: bits for all ranks."""
        self.packer.pack(notices, self._packing)

    # -- from messages to means --------------------------------------------------------------------------------------

    def decode(self, decay: float, status: Tensor) -> None:
        """Writes the means into the gradients, and what is wrong with the messages into the status (int32 [1])."""
        constants, number = self.constants, self.tables.number
        received, words = self.received.view(torch.int32), len(self.sent) // 4
        for kind, tiles, count in self._tiles:
            arrays = self.memory, tiles, constants.tensors, self.addresses, constants.shape, self.scales, status
            factors, strides = (decay, 1.0 / self.world), (words, 4 * words, self.world, self.world)
            launch(
                decode.decode, count, received, self.sent, self.received, *arrays, *factors, *strides, number, number,
                count, KIND=kind, BITS=BITS, OWNED=False, VALUES=self.tables.message.values,
            )  # fmt: skip

    def rounding(self, start: int) -> list[tuple[int, int, Tensor]]:
        """What narrow gradients cannot hold of the means, with its place in a space where the buffer begins so far."""
        tables, narrow = self.tables, np.flatnonzero(self.tables.kinds > 0)
        begins = (start + tables.edges[narrow]).tolist()
        errors = self._errors.split(tables.sizes[narrow].tolist())
        written = ~np.isin(tables.tensors_of[narrow], self._left)
        rows = zip(written, begins, errors, strict=True)
        return [(begin, begin + len(error), error) for known, begin, error in rows if known]

    def entries(self) -> int:
        """How many entries its own message has (waits for the device)."""
        return int(self.constants.shape[0, ROOM.value])

    def headers(self) -> int:
        """Bytes of the headers of all messages."""
        return self.world * (self.tables.heads + 1)

    def parts(self, place: int) -> Iterator[tuple[np.ndarray, list[int]]]:
        """What the end of a window is told of this buffer, whose headers it puts at a place: tiles, and their row."""
        held = self.sent, self.constants.shape, self.constants.tensors, self.addresses, self.memory
        reported = self.world, len(self.sent), self.tables.heads, place
        row = [*map(address_of, held), 0, self.tables.number, 0, address_of(self.received), *reported]
        yield self.tables.tiles, row


# Bytes of an element by its kind; the last is of no kind.
_WIDTHS = np.array([*(kind.itemsize for kind in KINDS), 0])


def grouped(moments: np.ndarray, own: np.ndarray, weighed: bool) -> Iterator[tuple[int, np.ndarray]]:
    """Kinds of moments, and those of some rows that are launched together; without moments goes with any.

    Args:
        moments: int64 [T], kinds; -1 for none.
        own: bool [T], the rows.
        weighed: Keys are compared.
    """
    found = sorted({*moments[own].tolist()} - {-1}) or [0 if weighed else -1]
    for place, moment in enumerate(found):
        yield moment, own & ((moments == moment) | (moments == -1) & (place == 0))


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
        self._own: list[np.ndarray] = []  # tiles of the buffers
        self._tiles = self._buffers = self.verdicts = torch.empty(0, dtype=torch.float32)

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
        parts = [part for buffer, place in zip(buffers, places, strict=False) for part in buffer.parts(place)]
        known, own = tuple(tuple(row) for _, row in parts), [tiles for tiles, _ in parts]
        if len(own) != len(self._own) or any(tiles is not other for tiles, other in zip(own, self._own, strict=True)):
            self._own = own
            numbered = [np.vstack([tiles, np.full((1, tiles.shape[1]), i)]) for i, tiles in enumerate(own)]
            joined = np.ascontiguousarray(np.concatenate(numbered, axis=1), np.int32)
            self._tiles = device_constant(joined, self._device)
        if known != self._known:
            self._known = known
            self._buffers = device_constant(np.array([row for _, row in parts], np.int64), self._device)
            self.verdicts = torch.zeros(places[-1], dtype=torch.uint8, device=self._device)
        count, world = self._tiles.shape[1], buffers[0].world
        arrays = self._tiles, self._buffers, self._status, self.verdicts
        sizes = self._turn, 1.0 / world, world, count
        kinds = {buffer.tables.message.values for buffer in buffers if buffer.tables.room}
        values = kinds.pop() if len(kinds) == 1 else ANY_VALUES if kinds else FOUR_BITS
        launch(commit.commit, count + len(parts), *arrays, *sizes, BITS=BITS, VALUES=values)
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
    """Compiles and starts what a job with Adam does, so that no window compiles it.

    Raises what the toolchain raises where that is not possible.
    """
    fields, edges = (4, 8, 12, 24, 28), np.array([0, 1 << 13])
    runs = Runs(np.array([0, 8]), np.array([0, 1]), np.array([0]), np.array([13]))
    message = Message(6, 10, 1, fields, 128, 16, runs)
    tables = Tables(edges, np.array([6]), 0, np.array([0]), np.array([-1]), message)
    sent = torch.zeros(128, dtype=torch.uint8, device=device)
    memory = torch.zeros(1 << 13, dtype=torch.float32, device=device)
    kernels, windows = BufferKernels(tables, memory, sent, sent, 0, Workspace(device)), WindowKernels(device)
    gradient, keys = torch.ones_like(memory), torch.empty_like(memory, dtype=torch.int32)
    for weighing in (None, Weighing([gradient], [1e-8], keys)):
        kernels.locate([gradient], weighing)
        kernels.select(1.0, weighing)
    kernels.packer.share(0)  # which a tensor of so few chunks does not need
    kernels.pack(0)
    kernels.decode(1.0, windows.status)
    windows.commit([kernels])

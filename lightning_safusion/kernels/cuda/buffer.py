"""The launches of a buffer and of a window: from gradients to messages, and from messages to means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.kernels.cuda import accumulate as accumulating
from lightning_safusion.kernels.cuda import commit, decode, digits, encode
from lightning_safusion.kernels.cuda.elements import FRESH
from lightning_safusion.kernels.cuda.launch import address_of, launch
from lightning_safusion.kernels.cuda.located import Located, grouped
from lightning_safusion.kernels.cuda.rows import ROOM, SUMS, AddressRows, BufferRow
from lightning_safusion.kernels.cuda.tables import ANY_VALUES, FOUR_BITS, KINDS, Message, Runs, Tables
from lightning_safusion.kernels.cuda.workspace import Constants, Weighing, Workspace
from lightning_safusion.recent import Recent
from lightning_safusion.sparsify.selection.view import device_constant

__all__ = ["BufferKernels", "Packer", "Weighing", "WindowKernels", "Workspace", "probe"]

#: Elements that a program of the kernels holds at a time; those where gradients are added, which takes more registers;
#: entries, in groups of 32; and bits of a message.
BLOCK, ADDED, GROUPS, BITS = 1024, 512, 16, 256
_ITEMS, _WRITTEN = 512, 128  # candidates; and those of which entries are written: many programs wait for memory at once
_TURNS = 4  # sets of tensors, each of an optimizer, that take turns without being told to the device again
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
        #: int32 [T], [rows, bins]: what is written before :meth:`find`.
        self.flags = self.histogram = torch.empty(0, dtype=torch.int32)
        #: int32 [T], the least keys that the last window has sent: they tell which first digits are counted.
        self.limits = torch.zeros(tables.number, dtype=torch.int32, device=out.device)

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
        rest = [beyond, *[4 * number] * len(levels), number, 3 * count, 2 * self._listing, *more]
        taken = iter(self.workspace.take([*zeros, *rest], len(zeros)))
        self.flags, self.largest = next(taken), next(taken)
        self._pools = [next(taken) for _ in pool_sizes]
        self._histograms = [next(taken) for _ in histogram_sizes]
        behind = next(taken)
        self.entries = [*self._histograms, behind][0].as_strided((2 * message.capacity,), (1,))
        self._states = [next(taken) for _ in levels]
        self._counted, self._counts, self._lists, *others = taken
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
            if pooled or level == 0:
                self._share(level)
            if level == 0 and not pooled:
                known = histogram, self.limits, self._counted
                launch(digits.count_rest, count, *span, *known, number, count, BITS=bits, BLOCK=BLOCK)
            if level == last:
                launch(
                    digits.count_chunks, count, *span, histogram, pool, before, found, *lists, self.limits, *sizes,
                    BITS=bits, POOLED=pooled, BLOCK=_ITEMS,
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
            self.largest, tables.message.capacity, *sizes, POOLED=pooled, BLOCK=_WRITTEN,
            SCALED=tables.message.values == FOUR_BITS,
        )  # fmt: skip

    def _share(self, level: int) -> None:
        """Adds up histograms of a digit: those of a tensor, and what tensors take of their pool."""
        histogram, pool = self._histograms[level], (self._pools or self._histograms)[level]
        arrays = histogram, self.constants.tensors, self._states[max(level - 1, 0)], pool, self._counted
        number, bits = self.tables.number, self.tables.digits[level]
        launch(digits.share, number, *arrays, number, BITS=bits, FIRST=level == 0, POOLED=bool(self._pools))

    def pack(self, notices: int) -> None:
        """Writes the messages; ``notices``: bits for all ranks."""
        if not self.selected:
            raise RuntimeError("nothing was selected that could be packed")
        self.selected, tables = False, self.tables
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
        self.constants = self.packer.constants
        #: Where lanes are counted from, and the share of an element that is there.
        self.origin, self.share = sent, 1.0
        self._tiles = self._by_kind(tables)
        narrow = np.where(tables.kinds > 0, tables.sizes, 0)
        #: float32, what narrow gradients cannot hold of the means.
        self._errors = torch.zeros(int(narrow.sum()), dtype=torch.float32, device=memory.device)
        self._error_places = 4 * (narrow.cumsum() - narrow)
        self.located: Located  #: of this window
        self._known: tuple[object, ...] | None = None  # the host's copy of it
        self._recent = Recent[tuple[object, ...], Located](_TURNS)
        self._whole = True  # constants are those of a window in which all rows send something
        #: float32 [2], the factor of the loss that gradients carry, and its reciprocal.
        self.scales = workspace.unscaled
        #: int32 [1], what is wrong with a window of which the host decides; 0 if nothing is.
        self.status = torch.zeros(1, dtype=torch.int32, device=memory.device)

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
        grads, moments, kinds = tuple(map(address_of, gradients)), tuple[int, ...](), tuple[int, ...]()
        if weighing is not None:
            moments = tuple(0 if moment is None else address_of(moment) for moment in weighing.moments)
            kinds = tuple(-1 if moment is None else KINDS.index(moment.dtype) for moment in weighing.moments)
        epsilons = () if weighing is None else tuple(weighing.epsilons)
        known = grads, moments, kinds, epsilons, None if flags is None else flags.tobytes()
        if known != self._known:
            self._use(self._recent.get(known, lambda: self._described(grads, moments, kinds, epsilons, flags)))
            self._known = known

    def _described(
        self,
        grads: Sequence[int],
        moments: Sequence[int],
        moment_kinds: Sequence[int],
        epsilons: Sequence[float],
        flags: np.ndarray | None,
    ) -> Located:
        """Addresses, kinds and epsilons of tensors; of none if keys are not compared in other units."""
        tables, of = self.tables, self.tables.tensors_of
        kinds, own, places = np.full(tables.number, -1), np.zeros(tables.number), np.zeros(tables.number, np.int64)
        if moments:
            kinds, own, there = (np.array(each)[of] for each in (moment_kinds, epsilons, moments))
            places = np.where(there != 0, there + tables.inside * _WIDTHS[kinds], 0)
        whole = np.array(grads, np.int64)[of] + tables.inside * _WIDTHS[tables.kinds]
        sums = np.where(tables.kinds > 0, address_of(self._errors) + self._error_places, whole)
        table = np.stack(AddressRows(grads=whole, moments=places, lanes=self._lanes(), sums=sums))
        return self._told(table, own.astype(np.float32), kinds, bool(moments), flags)

    def leave(self, tensors: Sequence[int]) -> None:
        """Leaves the gradients of these tensors as they are, and the residual, until it is told of others."""
        located, left = self.located, tuple(tensors)
        if located.left != left:
            places = np.where(np.isin(self.tables.tensors_of, left), 0, located.places)
            located.addresses[SUMS.value].copy_(device_constant(places, self.memory.device))
            located.left = left

    def _use(self, located: Located) -> None:
        """Says which rows send something, if that is not known."""
        whole = located.flags is None
        if not whole or not self._whole:
            if located.constants is None:
                *arrays, room = self.tables.of_some(located.taken)
                tensors, shape = (device_constant(array, self.memory.device) for array in arrays)
                located.constants = tensors, shape, room
            tensors, shape, self.packer.room = located.constants
            self.constants.tensors.copy_(tensors)
            self.constants.shape.copy_(shape)
        self.located, self._whole = located, whole

    def _lane_memory(self) -> tuple[Tensor, np.ndarray]:
        """Memory with dense lanes, uint8, and where in it those of the rows begin; -1 for none."""
        return self.sent, self.tables.lanes

    def _lanes(self) -> np.ndarray:
        """int64 [T], bytes from the origin of lanes to each, -1 for none."""
        return self.tables.lanes

    def _told(
        self, table: np.ndarray, epsilons: np.ndarray, moment_kinds: np.ndarray, weighed: bool, flags: np.ndarray | None
    ) -> Located:
        """Copies addresses to the device, and groups launches by the kinds of gradients and moments."""
        tables, device, different = self.tables, self.memory.device, None
        kinds, taken = tables.kinds, np.ones(tables.number, bool)
        if flags is not None:
            taken = (flags == FRESH.value)[tables.tensors_of]
            different = device_constant((flags ^ FRESH.value).astype(np.int32), device)
        launches = []
        for kind in sorted({*kinds.tolist()}):
            for moment, members in grouped(moment_kinds, (kinds == kind) & taken, weighed):
                if members.all():
                    chunks, count = self.constants.chunks, self.constants.chunks.shape[1]
                else:
                    part = tables.chunks_of(np.flatnonzero(members).tolist())
                    chunks, count = device_constant(part, device), part.shape[1]
                launches.append((kind, moment, chunks, count))
        memory, lanes = self._lane_memory()
        ends = lanes + tables.sizes * _WIDTHS[kinds]
        silent = [memory[lanes[row] : ends[row]] for row in np.flatnonzero(~taken & (lanes != -1)).tolist()]
        arrays = device_constant(table, device), device_constant(epsilons, device)
        return Located(*arrays, launches, table[SUMS.value], taken, different, silent)

    # -- from gradients to a message ---------------------------------------------------------------------------------

    def select(self, decay: float, weighing: Weighing | None) -> None:
        """Adds the gradients to the residual, and finds what is sent of the sum."""
        keys = self.memory.view(torch.int32) if weighing is None else weighing.keys
        self.packer.take()
        self._compensate(decay, keys)
        self.packer.find(keys, self.memory)
        self.packer.selected = True

    def _compensate(self, decay: float, keys: Tensor, *, known: bool = False) -> None:
        """Adds the gradients to the residual, and counts the first digit of keys, unless what is sent is known."""
        bits = self.tables.digits[0] if self.tables.room and not known else 0
        located = self.located
        if located.flags is not None:
            self.packer.flags.copy_(located.flags)
        if located.silent:
            torch._foreach_zero_(located.silent)
        for kind, moment, chunks, count in located.launches:
            arrays = self.constants.tensors, located.addresses, located.epsilons, self.scales
            counted = self.packer.flags, self.packer.histogram, self.packer.limits, self.origin
            sizes = decay, self.share, self.tables.number, count
            options = {"GRAD": kind, "MOMENT": moment, "BITS": bits, "BLOCK": ADDED}
            launch(accumulating.compensate, count, self.memory, keys, chunks, *arrays, *counted, *sizes, **options)

    def pack(self, notices: int) -> None:
        """Writes the message; ``notices``: bits for all ranks."""
        self.packer.pack(notices)

    # -- from messages to means --------------------------------------------------------------------------------------

    def decode(self, decay: float, status: Tensor) -> None:
        """Writes the means into the gradients, and what is wrong with the messages into the status (int32 [1])."""
        constants, number = self.constants, self.tables.number
        received, words = self.received.view(torch.int32), len(self.sent) // 4
        for kind, tiles, count in self._tiles:
            arrays = self.memory, tiles, constants.tensors, self.located.addresses, constants.shape, self.scales, status
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
        written = ~np.isin(tables.tensors_of[narrow], self.located.left)
        rows = zip(written, begins, errors, strict=True)
        return [(begin, begin + len(error), error) for known, begin, error in rows if known]

    def entries(self) -> int:
        """How many entries its own message has (waits for the device)."""
        return int(self.constants.shape[0, ROOM.value])

    def headers(self) -> int:
        """Bytes of the headers of all messages."""
        return self.world * (self.tables.heads + 1)

    def parts(self, place: int) -> Iterator[tuple[np.ndarray, BufferRow]]:
        """What the end of a window is told of this buffer, whose headers it puts at a place: tiles, and their row."""
        yield (
            self.tables.tiles,
            BufferRow(
                own_message=address_of(self.sent),
                own_shapes=address_of(self.constants.shape),
                own_tensors=address_of(self.constants.tensors),
                own_addresses=address_of(self.located.addresses),
                own_memory=address_of(self.memory),
                owner_sums=0,
                own_number=self.tables.number,
                own_header=0,
                other_headers=address_of(self.received),
                header_ranks=self.world,
                header_stride=len(self.sent),
                header_heads=self.tables.heads,
                report_place=place,
            ),
        )


# Bytes of an element by its kind; the last is of no kind.
_WIDTHS = np.array([*(kind.itemsize for kind in KINDS), 0])


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
        self._recent = Recent[tuple[object, ...], tuple[Tensor, Tensor]](_TURNS)
        self._own: list[np.ndarray] = []  # tiles of the buffers
        self._tiles = self.verdicts = torch.empty(0, dtype=torch.float32)

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
    kernels.pack(0)
    kernels.decode(1.0, windows.status)
    windows.commit([kernels])

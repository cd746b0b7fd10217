"""The launches of a buffer: from gradients to a message, and from messages to means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.kernels.cuda import accumulate, decode, launch
from lightning_safusion.kernels.cuda.elements import FRESH
from lightning_safusion.kernels.cuda.packer import Constants, Packer, Workspace
from lightning_safusion.kernels.cuda.rows import ROOM, SUMS, AddressRows, BufferRow
from lightning_safusion.kernels.cuda.tables import KINDS, Message, Runs, Tables
from lightning_safusion.kernels.cuda.window import TURNS, WindowKernels
from lightning_safusion.recent import Recent
from lightning_safusion.sparsify.selection.view import device_constant

# Bytes of an element by its kind; the last is of no kind.
_WIDTHS = np.array([*(kind.itemsize for kind in KINDS), 0])


class Weighing(NamedTuple):
    """What the optimizer divides gradients by, where keys are compared."""

    moments: Sequence[Tensor | None]  #: second moments, flat; None for a tensor whose elements are their own keys
    epsilons: Sequence[float]  #: what is added to their roots
    keys: Tensor  #: int32 [N], is written


@dataclass(eq=False)
class Located:
    """What the device is told of the gradients of a window: tables, of one set of gradients and flags."""

    addresses: Tensor  #: int64 [4, T], of gradients, moments and lanes, and where means are added up
    epsilons: Tensor  #: float32 [T], of the moments
    #: Kinds of gradients and moments, their chunks, and how many these are.
    launches: list[tuple[int, int, Tensor, int]]
    places: np.ndarray  #: int64 [T], where means are added up: in host memory
    taken: np.ndarray  #: bool [T], the rows that send something
    #: int32 [T], by which tensors differ from those of almost every window; None where all are as these.
    flags: Tensor | None
    silent: list[Tensor]  #: dense lanes of which nothing is sent
    #: Addresses, epsilons and launches (kinds of moments, tiles, and how many) of the worker's own shard.
    shard: tuple[Tensor, Tensor, list[tuple[int, Tensor, int]]] | None = None
    #: The buffer's, of which a window in which all rows send something may change nothing; and its room.
    constants: tuple[Tensor, Tensor, int] | None = None
    left: tuple[int, ...] = ()  #: tensors whose gradients stay as they are


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


class BufferKernels:
    """Selects, packs and decodes one buffer.

    Args:
        tables: Its constants.
        memory: float32 [N], its span of the residual.
        sent: uint8, its own message.
        received: uint8, those of all ranks.
        workspace: Of the stream on which it selects.
    """

    #: Elements are in the message of their owner only.
    owned: ClassVar[bool] = False

    def __init__(self, tables: Tables, memory: Tensor, sent: Tensor, received: Tensor, workspace: Workspace) -> None:
        self.tables, self.memory, self.sent, self.received = tables, memory, sent, received
        self.world = len(received) // max(1, len(sent))
        self.packer = Packer(tables, sent, workspace)
        self.constants = self.packer.constants
        #: Where lanes are counted from, and the share of an element that is there.
        self.origin, self.share = sent, 1.0
        self._lane_memory, self._lanes = sent, tables.lanes  # and where in it the lanes of the rows begin; -1 for none
        self._headers, self._header_stride, self._header_ranks = received, len(sent), self.world
        self._decoding, self._tiles = self.constants, self._by_kind(tables)
        narrow = np.where(tables.kinds > 0, tables.sizes, 0)
        #: float32, what narrow gradients cannot hold of the means.
        self._errors = torch.zeros(int(narrow.sum()), dtype=torch.float32, device=memory.device)
        self._error_places = 4 * (narrow.cumsum() - narrow)
        self.located: Located  #: of this window
        self._known: tuple[object, ...] | None = None  # the host's copy of it
        self._recent = Recent[tuple[object, ...], Located](TURNS)
        self._whole = True  # constants are those of a window in which all rows send something
        #: float32 [2], the factor of the loss that gradients carry, and its reciprocal.
        self.scales = workspace.unscaled
        #: int32 [1], what is wrong with a window of which the host decides; 0 if nothing is.
        self.status = torch.zeros(1, dtype=torch.int32, device=memory.device)

    def _by_kind(self, tables: Tables) -> list[tuple[int, Tensor, int]]:
        """Kinds of gradients, their tiles, and how many these are."""
        tiles = [(kind, tables.tiles_of(kind)) for kind in sorted({*tables.kinds.tolist()})]
        return [(kind, self._told(own), own.shape[1]) for kind, own in tiles if own.shape[1]]

    def _told(self, array: np.ndarray) -> Tensor:
        return device_constant(array, self.memory.device)

    # -- addresses -------------------------------------------------------------------------------------------------

    def locate(self, gradients: Sequence[Tensor], weighing: Weighing | None, flags: np.ndarray | None = None) -> None:
        """Tells the device what is new of this window.

        Args:
            gradients: Flat, one of each tensor; where they are.
            weighing: In what elements are compared.
            flags: uint8 [T] of ``TensorFlag``: only tensors that are fresh, and nothing else, are added and sent.
                None: all are.
        """
        grads, moments, kinds = tuple(map(launch.address_of, gradients)), tuple[int, ...](), tuple[int, ...]()
        if weighing is not None:
            moments = tuple(0 if moment is None else launch.address_of(moment) for moment in weighing.moments)
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
        tables, of = self.tables, self.tables.pieces.tensors
        kinds, own, places = np.full(tables.number, -1), np.zeros(tables.number), np.zeros(tables.number, np.int64)
        if moments:
            kinds, own, there = (np.array(each)[of] for each in (moment_kinds, epsilons, moments))
            places = np.where(there != 0, there + tables.pieces.inside * _WIDTHS[kinds], 0)
        whole = np.array(grads, np.int64)[of] + tables.pieces.inside * _WIDTHS[tables.kinds]
        sums = np.where(tables.kinds > 0, launch.address_of(self._errors) + self._error_places, whole)
        lanes = self._lanes + (launch.address_of(self._lane_memory) - launch.address_of(self.origin))
        lanes = np.where(self._lanes != -1, lanes, -1)
        table = np.stack(AddressRows(grads=whole, moments=places, lanes=lanes, sums=sums))
        return self._grouped(table, own.astype(np.float32), kinds, bool(moments), flags)

    def _grouped(
        self, table: np.ndarray, epsilons: np.ndarray, moment_kinds: np.ndarray, weighed: bool, flags: np.ndarray | None
    ) -> Located:
        tables, kinds, different, taken = self.tables, self.tables.kinds, None, np.ones(self.tables.number, bool)
        if flags is not None:
            taken = (flags == FRESH.value)[tables.pieces.tensors]
            different = self._told((flags ^ FRESH.value).astype(np.int32))
        launches = []
        for kind in sorted({*kinds.tolist()}):
            for moment, members in grouped(moment_kinds, (kinds == kind) & taken, weighed):
                chunks = self.constants.chunks
                if not members.all():
                    chunks = self._told(tables.chunks_of(np.flatnonzero(members).tolist()))
                launches.append((kind, moment, chunks, chunks.shape[1]))
        lanes, ends = self._lanes, self._lanes + tables.sizes * _WIDTHS[kinds]
        silent = [self._lane_memory[lanes[row] : ends[row]] for row in np.flatnonzero(~taken & (lanes != -1)).tolist()]
        return Located(self._told(table), self._told(epsilons), launches, table[SUMS.value], taken, different, silent)

    def leave(self, tensors: Sequence[int]) -> None:
        """Leaves the gradients of these tensors as they are, and the residual, until it is told of others."""
        located, left = self.located, tuple(tensors)
        if located.left != left:
            places = np.where(np.isin(self.tables.pieces.tensors, left), 0, located.places)
            located.addresses[SUMS.value].copy_(self._told(places))
            located.left = left

    def _use(self, located: Located) -> None:
        whole = located.flags is None
        if not whole or not self._whole:
            if located.constants is None:
                table, described, room = self.tables.of_some(located.taken)
                located.constants = self._told(table), self._told(described), room
            tensors, shape, self.packer.room = located.constants
            self.constants.tensors.copy_(tensors)
            self.constants.shape.copy_(shape)
        self.located, self._whole = located, whole

    # -- from gradients to a message ---------------------------------------------------------------------------------

    def select(self, decay: float, weighing: Weighing | None) -> None:
        """Adds the gradients to the residual, and finds what is sent of the sum."""
        self.packer.take()
        self.packer.find(self._compensate(decay, weighing), self.memory)

    def _compensate(self, decay: float, weighing: Weighing | None) -> Tensor:
        """The keys (int32 [N]), after all gradients are added; counts their first digits if some are to be found."""
        packer, located = self.packer, self.located
        keys = self.memory.view(torch.int32) if weighing is None else weighing.keys
        if located.flags is not None:
            packer.flags.copy_(located.flags)
        if located.silent:
            torch._foreach_zero_(located.silent)
        bits = packer.digits[0] if packer.digits else 0
        for kind, moment, chunks, count in located.launches:
            arrays = self.constants.tensors, located.addresses, located.epsilons, self.scales
            counted = packer.flags, packer.histogram, packer.limits, self.origin
            sizes = decay, self.share, self.tables.number, count
            options = {"GRAD": kind, "MOMENT": moment, "BITS": bits, "BLOCK": launch.ADDED}
            launch.launch(accumulate.compensate, count, self.memory, keys, chunks, *arrays, *counted, *sizes, **options)
        return keys

    def pack(self, notices: int) -> None:
        """Writes the message; ``notices``: bits for all ranks."""
        self.packer.pack(notices)

    # -- from messages to means --------------------------------------------------------------------------------------

    def decode(self, decay: float, status: Tensor) -> None:
        """Writes the means into the gradients, and what is wrong with the messages into the status (int32 [1])."""
        constants, number, heads = self._decoding, self.tables.number, self.tables.pieces.heads
        words = len(self.received) // (4 * self.world)
        for kind, tiles, count in self._tiles:
            arrays = self.memory, tiles, constants.tensors, self.located.addresses, constants.shape, self.scales, status
            factors, strides = (decay, 1.0 / self.world), (words, self._header_stride, self._header_ranks, self.world)
            launch.launch(
                decode.decode, count, self.received.view(torch.int32), self.origin, self._headers, *arrays, *factors,
                *strides, heads, number, count, KIND=kind, BITS=launch.BITS, OWNED=self.owned,
                VALUES=self.tables.message.values,
            )  # fmt: skip

    def rounding(self, start: int) -> list[tuple[int, int, Tensor]]:
        """What narrow gradients cannot hold of the means, with its place in a space where the buffer begins so far."""
        tables, narrow = self.tables, np.flatnonzero(self.tables.kinds > 0)
        begins = (start + tables.edges[narrow]).tolist()
        errors = self._errors.split(tables.sizes[narrow].tolist())
        written = ~np.isin(tables.pieces.tensors[narrow], self.located.left)
        rows = zip(written, begins, errors, strict=True)
        return [(begin, begin + len(error), error) for known, begin, error in rows if known]

    def entries(self) -> int:
        """How many entries its own message has (waits for the device)."""
        return int(self.constants.shape[0, ROOM.value])

    def headers(self) -> int:
        """Bytes of the headers of all messages."""
        return self.world * (self.tables.pieces.heads + 1)

    def parts(self, place: int) -> Iterator[tuple[np.ndarray, BufferRow]]:
        """What the end of a window is told of this buffer, whose headers it puts at a place: tiles, and their row."""
        yield self.tables.tiles, self._with_headers(self._row(self.sent, self.constants), place)

    def _row(self, message: Tensor, constants: Constants) -> BufferRow:
        address_of = launch.address_of
        return BufferRow(
            own_message=address_of(message),
            own_shapes=address_of(constants.shape),
            own_tensors=address_of(constants.tensors),
            own_addresses=address_of(self.located.addresses),
            own_memory=address_of(self.memory),
            own_number=self.tables.number,
        )

    def _with_headers(self, row: BufferRow, place: int) -> BufferRow:
        return row._replace(
            other_headers=launch.address_of(self._headers),
            header_ranks=self._header_ranks,
            header_stride=self._header_stride,
            header_heads=self.tables.pieces.heads,
            report_place=place,
        )


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
    kernels, windows = BufferKernels(tables, memory, sent, sent, Workspace(device)), WindowKernels(device)
    gradient, keys = torch.ones_like(memory), torch.empty_like(memory, dtype=torch.int32)
    for weighing in (None, Weighing([gradient], [1e-8], keys)):
        kernels.locate([gradient], weighing)
        kernels.select(1.0, weighing)
    kernels.pack(0)
    kernels.decode(1.0, windows.status)
    windows.commit([kernels])

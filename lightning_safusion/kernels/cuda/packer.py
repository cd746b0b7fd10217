"""How the largest elements of a vector get into messages: the memory, the tables and the launches of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lightning_safusion.kernels.cuda import accumulate as accumulating
from lightning_safusion.kernels.cuda import digits, encode, launch, pack
from lightning_safusion.kernels.cuda.tables import FOUR_BITS, Tables
from lightning_safusion.sparsify.selection.view import device_constant

_GROUPS = 16  # of 32 entries, which a program packs
_ITEMS, _WRITTEN = 512, 128  # candidates; and those of which entries are written: many programs wait for memory at once


class Workspace:
    """Memory that the selections of all buffers of one stream use in turn."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.int32, device=device)
        #: float32 [2], the factor of a loss that is not scaled, and its reciprocal.
        self.unscaled = torch.ones(2, dtype=torch.float32, device=device)

    def take(self, sizes: Sequence[int], zeros: int) -> list[Tensor]:
        """int32 vectors that lie one behind the other, the first ``zeros`` of them filled with zeros at once.

        Each begins at a multiple of 16 bytes: kernels load four numbers at once, and are compiled anew where one does
        not.
        """
        ends = list(accumulate((-(-size // 4) * 4 for size in sizes), initial=0))
        if len(self._memory) < ends[-1]:
            self._memory = torch.empty(ends[-1], dtype=torch.int32, device=self._memory.device)
        self._memory[: ends[zeros]].zero_()
        return [self._memory[at : at + size] for at, size in zip(ends, sizes, strict=False)]

    def release(self) -> None:
        """Frees the memory. The host does not wait: the allocator keeps it for the stream on which it was taken, where
        what takes it next comes behind all that uses it now."""
        self._memory = self._memory.new_empty(0)


@dataclass(frozen=True, eq=False)
class Constants:
    """Tables of a buffer on its device."""

    tensors: Tensor
    shape: Tensor
    chunks: Tensor

    @classmethod
    def of(cls, tables: Tables, device: torch.device) -> Constants:
        """Copies them there."""
        return cls(*(device_constant(array, device) for array in (tables.tensors, tables.described, tables.chunks)))


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
        self.digits: tuple[int, ...] = ()  #: bits of those that :meth:`find` finds
        #: int32 [T], [rows, bins]: what is written before :meth:`find`.
        self.flags = self.histogram = torch.empty(0, dtype=torch.int32)
        #: int32 [T], the least keys that the last window has sent: they tell which first digits are counted.
        self.limits = torch.zeros(tables.number, dtype=torch.int32, device=out.device)

    def take(self, more: Sequence[int] = (), *, known: bool = False) -> list[Tensor]:
        """Takes memory for a selection; returns further int32 vectors of the lengths ``more``.

        ``known``: Nothing will be searched for.
        """
        tables, number = self.tables, self.tables.number
        self.digits = levels = () if known or not tables.room else tables.digits
        message, count = tables.message, tables.chunks.shape[1]
        histogram_sizes = [(number if level else int(tables.rows[-1])) << bits for level, bits in enumerate(levels)]
        listing = int(tables.lists[-1]) if levels else 0
        self._sizes = self.room, number, count, listing  # entries, tensors, chunks and slots for candidates
        pool_sizes = [1 << bits for bits in levels] if tables.pool else []
        zeros = [tables.pieces.heads, message.parts, *pool_sizes, *histogram_sizes]
        # entries are written when histograms have been read for the last time: they begin where these do
        beyond = max(0, 2 * message.capacity - sum(histogram_sizes))
        rest = [beyond, *[4 * number] * len(levels), number, 3 * count, 2 * listing, *more]
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
        if self.digits:
            self._limit(keys)
            tables, constants = self.tables, self.constants
            described = constants.chunks, constants.tensors, constants.shape, self._states[-1]
            launch.launch(
                encode.write, tables.chunks.shape[1], keys, values.view(torch.int32), *described, self._lists,
                self._counts, self.words, self.entries, self.largest, tables.message.capacity, *self._sizes,
                POOLED=bool(self._pools), BLOCK=_WRITTEN, SCALED=tables.message.values == FOUR_BITS,
            )  # fmt: skip
        self.selected = True

    def _limit(self, keys: Tensor) -> None:
        """Finds the least keys that are sent, digit by digit, and counts those above and at them."""
        tables, tensors, levels, pooled = self.tables, self.constants.tensors, self.digits, bool(self._pools)
        number, count, lists, sizes = tables.number, tables.chunks.shape[1], (self._lists, self._counts), self._sizes
        span, shift, last = (keys, self.constants.chunks, tensors), 31, len(levels) - 1
        for level, bits in enumerate(levels):
            before, found = self._states[max(level - 1, 0)], self._states[level]
            histogram, pool = self._histograms[level], (self._pools or self._histograms)[level]
            if pooled or level == 0:
                arrays = histogram, tensors, before, pool, self._counted
                launch.launch(accumulating.share, number, *arrays, number, BITS=bits, FIRST=level == 0, POOLED=pooled)
            if level == 0 and not pooled:
                known = histogram, self.limits, self._counted, number, count
                launch.launch(accumulating.count_rest, count, *span, *known, BITS=bits, BLOCK=launch.BLOCK)
            if level == last:
                launch.launch(
                    digits.count_chunks, count, *span, histogram, pool, before, found, *lists, self.limits, *sizes,
                    BITS=bits, POOLED=pooled, BLOCK=_ITEMS,
                )  # fmt: skip
                break
            after, following = self._histograms[level + 1], levels[level + 1]
            shift -= bits
            if level == 0:
                launch.launch(
                    digits.collect, count, *span, self.constants.shape, self.words, histogram, pool, found, after,
                    *lists, len(tables.described), *sizes, BITS_BEFORE=bits, BITS=following, POOLED=pooled,
                    BLOCK=launch.BLOCK, ITEMS=_ITEMS,
                )  # fmt: skip
            else:
                launch.launch(
                    digits.narrow, count, *span, histogram, pool, before, found, after, *lists, *sizes,
                    BITS_BEFORE=bits, BITS=following, SHIFT=shift - following, POOLED=pooled, BLOCK=_ITEMS,
                )  # fmt: skip

    def pack(self, notices: int) -> None:
        """Writes the messages; ``notices``: bits for all ranks."""
        if not self.selected:
            raise RuntimeError("nothing was selected that could be packed")
        self.selected, tables = False, self.tables
        most = int(tables.described[:, 0].max())
        programs = max(1, -(-most // (32 * _GROUPS)))
        arrays = self.entries, self.largest, self.flags, self.constants.shape, self.words, self.out, self._halves
        sizes = notices, tables.message.capacity, tables.pieces.heads, programs
        count = programs * len(tables.described)
        options = {"SELECTED": tables.room > 0, "GROUPS": _GROUPS, "VALUES": tables.message.values}
        launch.launch(pack.pack, count, *arrays, *sizes, **options)

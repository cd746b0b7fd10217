"""How a buffer is described to its kernels: tensors, the pieces that programs take, and the fields of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from lightning_safusion.kernels.cuda.rows import PLACES, MessageRow, TensorRows, TileRows
from lightning_safusion.kernels.fields import REGION_BITS

#: Kinds of gradients and second moments, in the order of their numbers in kernels.
KINDS = (torch.float32, torch.bfloat16, torch.float16)
#: Kinds of values in a message: numbers of the types above by their places, codes of four bits, or any of these.
FOUR_BITS, ANY_VALUES = 3, 4
#: Elements of the largest block of a chunk, which begins at a multiple of them in its tensor; and how many chunks a
#: buffer has, about: a few waves of a large device.
WIDTH, CHUNKS = 2048, 2048
#: Elements of a tile.
TILE = 8192
#: Chunks that count first digits in one histogram: more would wait for each other.
SHARING = 32
# Slots for candidates (elements whose first digit is the limit's or more) that a chunk has for each of its part of a
# quota, and for each of its elements: where they are too few, a chunk's elements are all read again.
_LISTED, _MORE = 1.2, 0.015
# Bits of the digits of a key. Short tensors have no room for wide histograms: an element less than so many bytes.
_WIDE_DIGITS, _SHORT_DIGITS = (11, 10, 10), (8, 8, 8, 7)
_FEW_ELEMENTS = 6400
_EXPONENT = 8


class Runs(NamedTuple):
    """Where tensors lie in a message; one without entries has no buckets, regions or parts, or none that is read."""

    #: int64 [T + 1], before each, and in all.
    buckets: np.ndarray
    regions: np.ndarray
    parts: np.ndarray  #: int64 [T], before each
    part_bits: np.ndarray  #: int64 [T], elements of a part, as a power of two


@dataclass(frozen=True)
class Message:
    """The fields of a message. Words have 32 bits, and are counted from its first."""

    capacity: int  #: most entries
    low_bits: int  #: of a position in its bucket
    parts: int  #: that share a scale
    fields: tuple[int, int, int, int, int]  #: words before ranks, high bits, low bits, values and scales
    nbytes: int  #: in all
    header: int  #: bytes of flags, notices and padding
    runs: Runs | None  #: where tensors lie in it; None if nothing is selected
    values: int = FOUR_BITS  #: their kind: a place in ``KINDS``, or ``FOUR_BITS``. Numbers have no parts.

    def described(self, start: int = 0, room: int = 0, entries: int = 0, parts: int = 0) -> np.ndarray:
        """int32 [16], as kernels read it: :class:`~lightning_safusion.kernels.cuda.rows.MessageRow`.

        Args:
            start: Words before the message, where several lie one behind the other.
            room: Entries that it has.
            entries, parts: Entries and parts of the messages before it.
        """
        ranks, high, low, codes, scales = (start + field for field in self.fields)
        row = MessageRow(
            capacity=self.capacity,
            low_bits=self.low_bits,
            region_count=0 if self.runs is None else int(self.runs.regions[-1]),
            part_count=self.parts,
            ranks=ranks,
            high=high,
            low=low,
            codes=codes,
            scales=scales,
            end=start + self.nbytes // 4,
            header_bytes=self.header,
            start=start,
            room=room,
            earlier_entries=entries,
            earlier_parts=parts,
            values_kind=self.values,
        )
        return np.array(row, np.int32)


class Cut(NamedTuple):
    """Parts of tensors in place of tensors, each in the message for, or of, the worker that owns it."""

    tensors: np.ndarray  #: int64 [M], of which tensor each is a part
    inside: np.ndarray  #: int64 [M], elements of that tensor before it
    owners: np.ndarray  #: int64 [M], the message of each
    messages: Sequence[Message]  #: the formats; every one has its own regions and parts
    starts: Sequence[int]  #: words before each message
    #: int64 [M], where each begins: in the shard of its owner; or, if the tables are of a shard, in the buffer.
    elsewhere: np.ndarray
    heads: int  #: tensors in the header of each message


@dataclass(frozen=True, eq=False)
class Tables:
    """A buffer's constants in host memory."""

    edges: np.ndarray  #: int64 [T + 1], where its tensors begin and end
    #: int64 [T], elements that each may send; 0 for one that is dense, or from which nothing is selected.
    quotas: np.ndarray
    pool: int  #: room for further elements, the largest of all tensors with a quota
    kinds: np.ndarray  #: int64 [T], of gradients
    lanes: np.ndarray  #: int64 [T], bytes of a message before the values of a dense tensor, -1 for others
    message: Message  #: its format; of several, what they have together
    cut: Cut | None = None  #: what the rows are if they are not tensors. T is their number, wherever it stands here.

    @property
    def number(self) -> int:
        """Tensors (T)."""
        return len(self.quotas)

    @property
    def numel(self) -> int:
        """Elements (N)."""
        return int(self.edges[-1])

    @cached_property
    def sizes(self) -> np.ndarray:
        """int64 [T], elements of each tensor."""
        return np.diff(self.edges)

    @cached_property
    def limited(self) -> np.ndarray:
        """int64 [T], quotas that are no more than the elements."""
        return np.minimum(self.quotas, self.sizes)

    @cached_property
    def room(self) -> int:
        """Entries of every message."""
        return min(int(self.limited.sum()) + self.pool, int(self.sizes[self.limited > 0].sum()))

    @cached_property
    def digits(self) -> tuple[int, ...]:
        """Bits of the digits of a key, the highest first."""
        return digits_of(self.numel, self.number)

    @cached_property
    def chunks(self) -> np.ndarray:
        """int32 [3, C]: tensor, first element, the one behind the last; none has elements of two tensors."""
        number = -(-self.sizes // self.width)
        tensor = np.repeat(np.arange(self.number), number)
        inside = np.arange(len(tensor)) - np.repeat(number.cumsum() - number, number)
        first = self.edges[tensor] + inside * self.width
        stop = np.minimum(first + self.width, self.edges[tensor + 1])
        return np.stack([tensor, first, stop]).astype(np.int32)

    @property
    def width(self) -> int:
        """Elements of a chunk, but of the last one of a tensor."""
        return -(-self.numel // (CHUNKS * WIDTH)) * WIDTH or WIDTH

    @cached_property
    def spans(self) -> np.ndarray:
        """int64 [T + 1], chunks before each tensor."""
        return np.searchsorted(self.chunks[0], np.arange(self.number + 1))

    def chunks_of(self, tensors: Sequence[int]) -> np.ndarray:
        """int32 [3, c], the chunks of some tensors."""
        return np.ascontiguousarray(self.chunks[:, np.isin(self.chunks[0], tensors)])

    @cached_property
    def pieces(self) -> Cut:
        """What the rows are: the cut, or whole tensors."""
        every, none = np.arange(self.number), np.zeros(self.number, np.int64)
        return self.cut or Cut(every, none, none, [self.message], [0], none, self.number)

    @cached_property
    def rows(self) -> np.ndarray:
        """int64 [T + 1], histograms of the first digit before each tensor."""
        return np.concatenate([[0], np.maximum(1, -(-np.diff(self.spans) // SHARING)).cumsum()])

    @cached_property
    def lists(self) -> np.ndarray:
        """int64 [T + 1], slots for candidates before each tensor, of which each of its chunks has as many."""
        if not listed(self.digits):
            return np.zeros(self.number + 1, np.int64)
        chunks, sizes = np.diff(self.spans), np.maximum(self.sizes, 1)
        shared = self.pool * sizes / max(1, sizes[self.limited > 0].sum())
        width = np.minimum(sizes, self.width)
        own = np.minimum(width, np.ceil(width * (_LISTED * (self.limited + shared) / sizes + _MORE)))
        return np.concatenate([[0], (np.where(self.limited > 0, own, 0) * chunks).cumsum()]).astype(np.int64)

    @cached_property
    def described(self) -> np.ndarray:
        """int32 [n, 16], the messages as kernels read them."""
        messages, rooms = self.pieces.messages, [self.room]
        if self.cut is not None:
            rooms = np.bincount(self.cut.owners, self.limited, len(messages)).astype(np.int64).tolist()
        entries = accumulate((message.capacity for message in messages), initial=0)
        parts = accumulate((message.parts for message in messages), initial=0)
        rows = zip(messages, self.pieces.starts, rooms, entries, parts, strict=False)
        return np.stack([message.described(*places) for message, *places in rows])

    @cached_property
    def region_starts(self) -> np.ndarray:
        """int32 [R], the first elements of the regions of a message."""
        if self.message.runs is None:
            return np.zeros(0, np.int32)
        before, first = self.message.runs.regions, self.edges[:-1]
        tensor = np.repeat(np.arange(self.number), np.diff(before))
        inside = np.arange(before[-1]) - before[tensor]
        return (first[tensor] + (inside << (self.message.low_bits + REGION_BITS))).astype(np.int32)

    @cached_property
    def tensors(self) -> np.ndarray:
        """int32 [15, T + 1], as kernels read it: :class:`~lightning_safusion.kernels.cuda.rows.TensorRows`."""
        number, runs, pieces = self.number, self.message.runs, self.pieces
        none = np.zeros(number, np.int64)
        own = Runs(_padded(none), _padded(none), none, none) if runs is None else runs
        ranked = np.diff(own.regions) if self.cut is None or runs is None else self.limited
        slots = np.zeros(number + 1, np.int64)
        for owner in range(len(self.described)):
            mine = np.flatnonzero(pieces.owners == owner)
            slots[mine] = self.limited[mine].cumsum() - self.limited[mine]
        rows = TensorRows(
            edges=self.edges,
            quotas=_padded(self.limited),
            spans=self.spans,
            buckets=own.buckets,
            regions=own.regions,
            parts=_padded(own.parts),
            part_bits=_padded(own.part_bits),
            slots=slots,
            kinds=_padded(self.kinds),
            shapes=_padded(pieces.owners * self.described.shape[1]),
            flags=_padded(pieces.tensors),
            elsewhere=_padded(pieces.elsewhere),
            rows=self.rows,
            lists=self.lists,
            ranked=_padded(ranked > 0),
        )
        return np.stack(rows).astype(np.int32)

    def of_some(self, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """``tensors``, ``described`` and ``room`` of a window in which only some rows (bool [T]) send something."""
        some = replace(self, quotas=np.where(taken, self.quotas, 0))
        tensors = some.tensors
        ranked = PLACES["ranked"]
        tensors[ranked] = self.tensors[ranked]  # regions without entries have ranks too
        return tensors, some.described, some.room

    @cached_property
    def tiles(self) -> np.ndarray:
        """int32 [8, n]: see :class:`~lightning_safusion.kernels.cuda.rows.TileRows`."""
        runs, dense = self.message.runs, self.lanes != -1
        low_bits = np.array([message.low_bits for message in self.pieces.messages])[self.pieces.owners]
        region = np.full(self.number, TILE) if runs is None else 1 << (low_bits + REGION_BITS)
        length = np.where(dense, TILE, np.minimum(region, TILE))
        taken = dense | (self.limited > 0)
        parts = []
        for tensor in np.flatnonzero(taken & (self.sizes > 0)).tolist():
            size, own, bits, whole = (int(of[tensor]) for of in (self.sizes, length, low_bits, region))
            offset = np.arange(0, size, own)
            zeros = offset * 0
            elements = np.minimum(own, size - offset)
            rows = TileRows(zeros + tensor, zeros - 1, zeros, elements, offset, zeros, zeros, zeros)
            if runs is not None and not dense[tensor]:
                inside = offset // whole
                elements = np.minimum(whole, size - inside * whole)
                rows = rows._replace(
                    tile_region=runs.regions[tensor] + inside,
                    tile_begin=offset - inside * whole,
                    tile_bucket=runs.buckets[tensor] + (inside << REGION_BITS),
                    tile_buckets=-(-elements >> bits),
                    tile_elements=elements,
                )
            parts.append(np.stack(rows))
        return np.concatenate([np.zeros((len(TileRows._fields), 0), np.int64), *parts], axis=1).astype(np.int32)

    def tiles_of(self, kind: int) -> np.ndarray:
        """int32 [8, m], the tiles of the tensors with gradients of one kind."""
        return np.ascontiguousarray(self.tiles[:, self.kinds[self.tiles[0]] == kind])


def digits_of(elements: float, tensors: float) -> tuple[int, ...]:
    """Bits of the digits of a key in a buffer of so many elements and tensors, or pieces of them."""
    return _WIDE_DIGITS if elements >= _FEW_ELEMENTS * tensors else _SHORT_DIGITS


def listed(digits: tuple[int, ...]) -> bool:
    """Whether candidates are listed: a first digit that is the exponent alone leaves too many of them."""
    return digits[0] > _EXPONENT


def _padded(row: np.ndarray) -> np.ndarray:
    """A number for each tensor, and a 0."""
    return np.append(row, 0)


class ShardTables(NamedTuple):
    """What kernels are told of a buffer that workers own in shards."""

    #: Its pieces, and the messages for all owners, one behind the other; that of this worker is a header only.
    first: Tables
    second: Tables  #: the same pieces in the messages of their owners, which all have the same size
    arriving: Tables | None  #: the pieces of its own shard, one behind the other, in a message that another has sent
    delivering: Tables | None  #: the same in the message that it delivers; None, as ``arriving``, if it owns nothing

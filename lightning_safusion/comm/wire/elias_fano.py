"""Positions by Elias and Fano: within half a bit of their entropy, in a size that no gradient changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.wire.codec import (
    Codec,
    Inbox,
    Reader,
    blocks_of,
    check_damage,
    check_order,
    marked,
    positions_to_write,
)
from lightning_safusion.comm.wire.values import FloatField, QuantizedField, Values, fill, packed, unpacked
from lightning_safusion.kernels import cpu as native
from lightning_safusion.kernels.cuda.tables import FOUR_BITS, KINDS, Message, Runs
from lightning_safusion.kernels.fields import NARROW_RANKS, REGION_BITS
from lightning_safusion.sparsify.base import Selection
from lightning_safusion.sparsify.selection.torch_view import find_marked
from lightning_safusion.sparsify.selection.view import device_constant

_MOST_BITS = 24  # of a position in its bucket


class _Tables(NamedTuple):
    """The buckets of a span on one device."""

    starts: Tensor  # int64 [T], first element of each tensor
    firsts: Tensor  # int64 [T], buckets before each tensor
    regions: Tensor  # int64 [R + 1], buckets before each region, and in all


class EliasFanoCodec(Codec):
    """Quotients in unary, remainders in binary (Elias, JACM 1974; Vigna, WSDM 2013, section 3).

    A bucket is 2^l elements of one tensor, a region 512 buckets of one tensor. With K entries, H buckets and R regions:

    ====== ==================== ===========================================================
    field  32-bit words         content
    ====== ==================== ===========================================================
    ranks  R + 1, or half       entries before each region, and in all
    high   ceil((K + H) / 32)   for each bucket a 1 for every entry, then a 0
    low    l ceil(K / 32) + 1   l bits for each entry: its place in its bucket
    values                      as they are in every format
    ====== ==================== ===========================================================

    The first of several bits is the lowest, each field fills a multiple of 16 bytes, and l takes the fewest bits. A
    rank has 16 bits if K < 65536, else 32. Ranks let both directions begin anywhere: entry e of bucket b is bit e + b
    of ``high``, and field e of ``low``.
    """

    layout = "eliasfano"

    def __init__(
        self, numel: int, capacity: int, values: Values, edges: Sequence[int], runs: Sequence[tuple[int, int]]
    ) -> None:
        super().__init__(numel, capacity, values, edges, runs)
        self._ends = np.array([stop for _, stop in runs], np.int64)
        self._starts = np.array([start for start, _ in runs], np.int64)
        narrow = self.capacity < NARROW_RANKS
        self._rank = np.dtype(np.uint16 if narrow else np.uint32)
        # torch writes as signed numbers what it reads as counts
        self._signed, self._counted = (torch.int16, torch.uint16) if narrow else (torch.int32, torch.int32)
        longest = (numel // max(1, capacity)).bit_length() + 2
        self.low = min(range(min(longest, _MOST_BITS) + 1), key=lambda low: sum(self._words(low)))
        self._buckets = _summed(self._blocks(self.low))
        self._regions = _summed(self._blocks(self.low + REGION_BITS))
        self._on_device: dict[torch.device, _Tables] = {}

    def _blocks(self, bits: int) -> np.ndarray:
        return -(-(self._ends - self._starts) >> bits)

    def _words(self, low: int) -> tuple[int, int, int]:
        buckets, regions = (int(self._blocks(bits).sum()) for bits in (low, low + REGION_BITS))
        ranks = blocks_of((regions + 1) * self._rank.itemsize, 4)
        return ranks, blocks_of(self.capacity + buckets, 32), low * blocks_of(self.capacity, 32) + 1

    @property
    def field_bytes(self) -> tuple[int, ...]:
        return tuple(blocks_of(size, 16) * 16 for size in (*(4 * n for n in self._words(self.low)), self.field.nbytes))

    @cached_property
    def _described(self) -> np.ndarray:
        """int64 [T, 4] for compiled kernels: where each tensor begins and ends, buckets and regions before it."""
        return np.stack([self._starts, self._ends, self._buckets[:-1], self._regions[:-1]], axis=1)

    @cached_property
    def _bucket_of_region(self) -> np.ndarray:
        """int64 [R + 1], buckets before each region, and in all."""
        own = np.arange(self._regions[-1]) - np.repeat(self._regions[:-1], np.diff(self._regions))
        firsts = np.repeat(self._buckets[:-1], np.diff(self._regions))
        return np.append(firsts + (own << REGION_BITS), self._buckets[-1])

    def message(self, starts: np.ndarray, stops: np.ndarray, nbytes: int, begin: int, header: int) -> Message | None:
        """The fields of a message, for kernels that write and read all of it; None unless they can.

        Args:
            starts, stops: int64 [T], where some tensors, those that may have entries among them, begin and end.
            nbytes: Of the whole message.
            begin: Bytes of it before these fields.
            header: Bytes of flags and notices in it.
        """
        field = self.field
        if isinstance(field, QuantizedField) and field.bits == 4:
            values, scales, length = FOUR_BITS, field.starts, field.code_bytes
        elif isinstance(field, FloatField):
            values, scales, length = KINDS.index(field.dtype), np.empty(0, np.int64), blocks_of(field.nbytes, 4) * 4
        else:
            return None
        ranks, high, low, codes = accumulate((begin, *self.field_bytes[:3]))
        words = (ranks // 4, high // 4, low // 4, codes // 4, (codes + length) // 4)
        runs = self._runs(starts, stops, scales)
        return Message(self.capacity, self.low, len(scales), words, nbytes, header, runs, values)

    def _runs(self, starts: np.ndarray, stops: np.ndarray, scales: np.ndarray) -> Runs:
        """Where tensors lie in a message; ``scales``: int64 [P], where the parts begin that share a scale."""
        run, parts = self._starts.searchsorted(starts), scales.searchsorted(starts)
        # the first part of a tensor is as long as its others, or has all of it
        ends = np.append(scales, self.numel)[np.minimum(parts + 1, len(scales))]
        lengths = np.maximum(np.minimum(ends, stops) - starts, 1)
        bits = np.array([(length - 1).bit_length() for length in lengths.tolist()], np.int64)
        buckets, regions = (np.append(own[run], own[-1]) for own in (self._buckets, self._regions))
        return Runs(buckets, regions, parts, bits)

    def _tables(self, device: torch.device) -> _Tables:
        if device not in self._on_device:
            arrays = self._starts, self._buckets[:-1].copy(), self._bucket_of_region
            self._on_device[device] = _Tables(*(device_constant(array, device) for array in arrays))
        return self._on_device[device]

    def write(self, selection: Selection, fields: Sequence[Tensor], echo: bool) -> Tensor:
        ranks, high, low, values = fields
        positions = positions_to_write(selection, padding=self.numel)
        if native.serves(positions):
            described = self.numel, self._described, self.low, self.capacity
            native.write_elias_fano(positions.numpy(), *described, self._arrays(fields))
            return self._write_values(selection, values, echo)
        tables, positions = self._tables(positions.device), positions.long()
        run = torch.searchsorted(tables.starts, positions, right=True).sub_(1).clamp_(min=0)
        inside = positions - tables.starts[run]
        # padding lies in a bucket behind the last, and its 1 in a bit behind the field
        bucket = torch.where(positions < self.numel, tables.firsts[run] + (inside >> self.low), tables.regions[-1])
        bits = torch.arange(len(positions), device=positions.device) + bucket
        places = 8 * high.numel()
        mask = torch.zeros(places + 1, dtype=torch.uint8, device=positions.device)
        mask.index_fill_(0, torch.where(positions < self.numel, bits, places), 1)
        high.copy_(packed(mask[:places], 1))
        fill(ranks.view(self._signed), torch.searchsorted(bucket, tables.regions))
        inside.masked_fill_(positions >= self.numel, 0)
        each = (inside[:, None] >> torch.arange(self.low, device=positions.device) & 1).to(torch.uint8).view(-1)
        fill(low, packed(torch.nn.functional.pad(each, (0, -len(each) % 8)), 1))
        return self._write_values(selection, values, echo)

    def _arrays(self, fields: Sequence[Tensor]) -> native.EliasFano:
        ranks, high, low = (field.numpy() for field in fields[:3])
        return native.EliasFano(ranks.view(self._rank), high.view(np.uint64), low.view(np.uint32))

    def outgoing(self, memory: Tensor) -> native.Outgoing | None:
        *fields, values, rest = self._fields(memory)
        rest.zero_()
        codes = self.field.codes(values)
        if codes is None or not self.values.few_bits:
            return None
        written = self.numel, self._described, self.low, self.capacity, self._arrays(fields)
        return native.Outgoing(*written, codes, values.numpy())

    def reader(self, message: Tensor) -> Reader:
        *fields, values, _ = self._fields(message)
        arrays = self._arrays(fields)
        ranks = self._checked(arrays.ranks[: len(self._bucket_of_region)].astype(np.int64))

        def between(start: int, stop: int) -> tuple[Tensor, Tensor]:
            first, last = max(self._region_of(start), 0), self._region_of(stop - 1) + 1
            if start >= stop or first >= last:
                nothing = torch.empty(0, dtype=torch.int64)
                return nothing, self.field.read(nothing, values)
            found = self._positions(arrays, ranks, first, last)
            low, high = found.searchsorted([start, stop]).tolist()
            positions = torch.from_numpy(found[low:high])
            return positions, self.field.read(positions, values, int(ranks[first]) + low)

        return between

    def _region_of(self, position: int) -> int:
        """The region of a position, or, if it is in none, the last before it; -1 if there is none."""
        run = int(self._starts.searchsorted(position, side="right")) - 1
        if run < 0:
            return -1
        inside = min(position, int(self._ends[run]) - 1) - int(self._starts[run])
        return int(self._regions[run]) + (inside >> self.low + REGION_BITS)

    def _positions(self, arrays: native.EliasFano, ranks: np.ndarray, first: int, last: int) -> np.ndarray:
        """int64, the positions in the regions from ``first`` to before ``last``."""
        counted, bounds = ranks[first : last + 1], self._bucket_of_region[first : last + 1]
        begin, end = int(counted[0] + bounds[0]), int(counted[-1] + bounds[-1])
        aligned = begin >> 3
        places = marked(arrays.high.view(np.uint8)[aligned : blocks_of(end, 8)]) + (aligned << 3)
        places = places[(places >= begin) & (places < end)]
        entries = np.arange(counted[0], counted[-1])
        check_damage(len(places) == len(entries), f"has {len(places)} of {len(entries)} entries")
        bucket = places - entries
        check_damage(
            np.array_equal(bucket.searchsorted(bounds), counted - counted[0]), "has entries behind its regions"
        )
        run = self._buckets.searchsorted(bucket, side="right") - 1
        found = self._starts[run] + (bucket - self._buckets[run] << self.low) + self._low_bits(arrays.low, entries)
        check_damage(bool((found < self._ends[run]).all()), "has entries between its tensors")
        check_order(found, 0, self.numel)
        return found

    def _low_bits(self, low: np.ndarray, entries: np.ndarray) -> np.ndarray:
        """int64 [K], the places of entries in their buckets."""
        words, bits = low.astype(np.uint64), entries.astype(np.uint64) * np.uint64(self.low)
        at, shift = (bits >> np.uint64(5)).astype(np.int64), bits & np.uint64(31)
        both = words[at] | words[np.minimum(at + 1, len(words) - 1)] << np.uint64(32)
        return (both >> shift & np.uint64((1 << self.low) - 1)).astype(np.int64)

    def _checked(self, ranks: np.ndarray) -> np.ndarray:
        """Ranks (int64 [..., R + 1]) as they are; raises ValueError if they do not ascend, or there is no room."""
        native.check_entries(int(ranks[..., -1].max()), self.capacity)
        check_damage(not ranks[..., 0].any() and bool((np.diff(ranks) >= 0).all()), "has fewer entries after more")
        return ranks

    def inbox(self, messages: Tensor) -> Inbox | None:
        *fields, values, _ = messages.split(self._split_sizes, dim=1)
        known, regions = [], len(self._bucket_of_region)
        for *own, field in zip(*fields, values, strict=True):
            arrays, codes = self._arrays(own), self.field.codes(field)
            if codes is None:
                return None
            arrays = arrays._replace(ranks=arrays.ranks[:regions])
            known.append(native.Message.elias_fano(arrays, self._described, self.low, self.capacity, codes))
        ranks = fields[0].numpy().view(self._rank)[:, :regions]

        together = native.Together(known)

        def read() -> native.Together[native.Message]:
            if not native.sound(together):
                self._checked(ranks.astype(np.int64))  # says what is wrong
            return together

        return read

    def decode_padded(self, message: Tensor) -> tuple[Tensor, Tensor]:
        ranks, high, low, field, _ = self._fields(message)
        tables = self._tables(message.device)
        bits, _ = find_marked(unpacked(high, 1).bool(), self.capacity)
        entries = torch.arange(self.capacity, device=message.device)
        bucket = bits - entries
        run = torch.searchsorted(tables.firsts, bucket, right=True).sub_(1).clamp_(min=0)
        each = unpacked(low, 1)[: self.capacity * self.low].view(self.capacity, self.low).long()
        inside = (each << torch.arange(self.low, device=message.device)).sum(1)
        indices = tables.starts[run] + (bucket - tables.firsts[run] << self.low) + inside
        count = ranks.view(self._counted)[len(tables.regions) - 1].long()
        return self._padded(indices.clamp_(0, max(self.numel - 1, 0)), field, count)


def _summed(numbers: np.ndarray) -> np.ndarray:
    """int64 [N + 1], the sums of the first 0, 1, ... of the numbers."""
    return np.concatenate([np.zeros(1, np.int64), numbers.cumsum()])

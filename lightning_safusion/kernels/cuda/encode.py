"""Kernels that give selected elements their places among the entries of a message: positions by Elias and Fano.

:func:`write` visits the elements that may be selected, :func:`place` positions that another compressor than Top-k has
chosen. Places come from sums of counts, never from the order in which programs run: every run writes the same bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_safusion.kernels.cuda.digits import candidates
from lightning_safusion.kernels.cuda.elements import MAGNITUDE, REGION, store_rank
from lightning_safusion.kernels.cuda.rows import (
    BUCKETS,
    EARLIER_ENTRIES,
    EARLIER_PARTS,
    EDGES,
    HIGH,
    LOW_BITS,
    PART_BITS,
    PARTS,
    QUOTAS,
    RANKED,
    REGION_COUNT,
    REGIONS,
    ROOM,
    SHAPES,
    SLOTS,
    SPANS,
)

_WIDE = tl.constexpr(512)  # tensors or chunks that are looked at together


@triton.jit
def _taken(
    found: tl.tensor, tensors: tl.tensor, at: tl.tensor, number: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of some tensors: how many keys are above the limit, how many at it are theirs, and how many are open to all."""
    every = at + tl.arange(0, _WIDE)
    quota = tl.load(tensors + QUOTAS * (number + 1) + every, mask=every < number, other=0)
    live = quota > 0
    above = tl.load(found + number + every, mask=live, other=0)
    pinned = tl.load(found + 2 * number + every, mask=live, other=1)
    equal = tl.load(found + 3 * number + every, mask=live, other=0)
    sure = tl.where(live, tl.maximum(quota - above, 0), 0)
    return above, sure, tl.where(pinned != 0, 0, equal - sure)


@triton.jit
def _pooled_start(
    found: tl.tensor, tensors: tl.tensor, tensor: tl.tensor, room: tl.tensor, number: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The first entry of a tensor that shares a pool, and how many keys at its limit it sends."""
    left = room
    for at in range(0, number, _WIDE):
        above, sure, _ = _taken(found, tensors, at, number)
        left -= tl.sum(above + sure, 0)
    slot, mine, opened = tensor * 0, tensor * 0, tensor * 0
    for at in range(0, number, _WIDE):
        above, sure, free = _taken(found, tensors, at, number)
        every = at + tl.arange(0, _WIDE)
        earlier = opened + tl.cumsum(free, 0) - free
        allowed = sure + tl.minimum(tl.maximum(left - earlier, 0), free)
        slot += tl.sum(tl.where(every < tensor, above + allowed, 0), 0)
        mine += tl.sum(tl.where(every == tensor, allowed, 0), 0)
        opened += tl.sum(free, 0)
    return slot, mine


@triton.jit
def _in_earlier_chunks(counts: tl.tensor, first: tl.tensor, chunk: tl.tensor) -> tl.tensor:
    """Sum of the counts of the chunks of a tensor that are before one."""
    total = chunk * 0
    for at in range(first, chunk, _WIDE):
        place = at + tl.arange(0, _WIDE)
        total += tl.sum(tl.load(counts + place, mask=place < chunk, other=0), 0)
    return total


@triton.jit
def _begin(
    found: tl.tensor,
    tensors: tl.tensor,
    counts: tl.tensor,
    tensor: tl.tensor,
    chunk: tl.tensor,
    room: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    POOLED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A chunk's first entry, its tensor's limit, keys at it in earlier chunks, and how many of those are sent."""
    quota = tl.load(tensors + QUOTAS * (number + 1) + tensor)
    limit, equal, mine = tensor * 0 + MAGNITUDE, tensor * 0, tensor * 0
    if POOLED:
        slot, mine = _pooled_start(found, tensors, tensor, room, number)
    else:
        slot = tl.load(tensors + SLOTS * (number + 1) + tensor)
    if quota > 0:
        limit = tl.load(found + tensor)
        first = tl.load(tensors + SPANS * (number + 1) + tensor)
        slot += _in_earlier_chunks(counts, first, chunk)
        equal = _in_earlier_chunks(counts + count, first, chunk)
        if not POOLED:
            mine = tl.maximum(quota - tl.load(found + number + tensor), 0)
        slot += tl.minimum(equal, mine)
    return slot, limit, equal, mine


@triton.jit
def _write_ranks(
    message: tl.tensor,
    shape: tl.tensor,
    region: tl.tensor,
    begun: tl.tensor,
    end: tl.tensor,
    bits: tl.tensor,
    slot: tl.tensor,
    kept: tl.tensor,
    local: tl.tensor,
) -> None:
    """Entries before each of some regions of a tensor, from ``begun`` to ``end``: ``slot``, and those kept before it.

    ``region`` is the tensor's first; a region has ``1 << bits`` elements.
    """
    for own in range(begun, end):
        earlier = slot + tl.sum((kept & (local < (own << bits))).to(tl.int32), 0)
        store_rank(message, shape, region + own, earlier, end > begun)


@triton.jit(
    do_not_specialize=["most", "room", "number", "count", "listing"],
    do_not_specialize_on_alignment=["keys", "values"],
)
def write(
    keys: tl.tensor,
    values: tl.tensor,
    chunks: tl.tensor,
    tensors: tl.tensor,
    shape: tl.tensor,
    found: tl.tensor,
    lists: tl.tensor,
    counts: tl.tensor,
    message: tl.tensor,
    entries: tl.tensor,
    largest: tl.tensor,
    most: tl.tensor,
    room: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    listing: tl.tensor,
    POOLED: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Sets the high bits of all entries, writes the ranks, and leaves the rest of the entries to :func:`pack`.

    ``entries`` is int32 [2, most]: the part and the low bits in one number, and the value; ``largest`` int32 [P] gets
    the largest magnitude of each part; both have those of all messages. ``lists`` (int32 [2, listing]) and ``counts``:
    see :func:`~lightning_safusion.kernels.cuda.digits.collect`. A program for each chunk.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(chunks + chunk)
    start, stop = tl.load(chunks + count + chunk), tl.load(chunks + 2 * count + chunk)
    row = tensors + tensor
    slot, limit, equal, mine = _begin(found, tensors, counts, tensor, chunk, room, number, count, POOLED)
    shape += tl.load(row + SHAPES * (number + 1))
    entries += tl.load(shape + EARLIER_ENTRIES)
    largest += tl.load(shape + EARLIER_PARTS)
    origin, low_bits = tl.load(row + EDGES * (number + 1)), tl.load(shape + LOW_BITS)
    high = message + tl.load(shape + HIGH)
    bucket, part = tl.load(row + BUCKETS * (number + 1)), tl.load(row + PARTS * (number + 1))
    region, part_bits = tl.load(row + REGIONS * (number + 1)), tl.load(row + PART_BITS * (number + 1))
    source, items, listed, places = candidates(
        keys, chunks, tensors, lists, counts, tensor, chunk, number, count, listing
    )
    # of a tensor from which nothing is selected only the ranks are written
    items = tl.where(tl.load(row + QUOTAS * (number + 1)) > 0, items, 0)
    bits = low_bits + REGION
    begun, regions = (start - origin + (1 << bits) - 1) >> bits, (stop - origin + (1 << bits) - 1) >> bits
    regions = tl.where(tl.load(row + RANKED * (number + 1)) != 0, regions, begun)
    lanes, in_list = tl.arange(0, BLOCK), tl.where(listed, items, 0)
    for at in range(0, items, BLOCK):
        item = at + lanes
        inside = item < items
        key = tl.load(source + item, mask=inside, other=0) & MAGNITUDE
        place = tl.where(listed, tl.load(places + item, mask=item < in_list, other=0), start + item)
        local = place - origin
        tied, larger = inside & (key == limit), inside & (key > limit)
        both = tl.cumsum((tied.to(tl.int32) << 16) | larger.to(tl.int32), 0)
        order, before = equal + (both >> 16), tl.minimum(equal, mine)
        kept = larger | (tied & (order <= mine))
        entry = slot + (both & 0xFFFF) + tl.minimum(order, mine) - before - 1
        upto = tl.minimum((tl.max(tl.where(inside, local, 0), 0) >> bits) + 1, regions)
        _write_ranks(message, shape, region, begun, upto, bits, slot, kept, local)
        begun = tl.maximum(begun, upto)
        unary = entry + bucket + (local >> low_bits)
        tl.atomic_or(high + (unary >> 5), 1 << (unary & 31), mask=kept, sem="relaxed")
        raw = tl.load(values + place, mask=kept, other=0)
        own = part + (local >> part_bits)
        tl.store(entries + entry, (own << low_bits) | (local & ((1 << low_bits) - 1)), mask=kept)
        tl.store(entries + most + entry, raw, mask=kept)
        if SCALED:
            tl.atomic_max(largest + own, raw & MAGNITUDE, mask=kept, sem="relaxed")
        last = tl.max(both, 0)
        equal += last >> 16
        slot += (last & 0xFFFF) + tl.minimum(equal, mine) - before
    _write_ranks(message, shape, region, begun, regions, bits, slot, lanes < 0, lanes)


@triton.jit
def _first_above(table: tl.tensor, number: tl.tensor, limits: tl.tensor, steps: tl.tensor) -> tl.tensor:
    """Places of the first of ascending numbers that are larger than limits; ``steps``: halvings of ``number``."""
    low, high = limits * 0 - 1, limits * 0 + number
    for _ in range(steps):
        middle = (low + high) >> 1
        apart = high - low > 1
        above = tl.load(table + middle, mask=apart, other=0) > limits
        high = tl.where(apart & above, middle, high)
        low = tl.where(apart & (above == 0), middle, low)
    return high


@triton.jit(do_not_specialize=["most", "number", "steps"])
def place(
    positions: tl.tensor,
    values: tl.tensor,
    tensors: tl.tensor,
    shape: tl.tensor,
    regions: tl.tensor,
    message: tl.tensor,
    entries: tl.tensor,
    largest: tl.tensor,
    most: tl.tensor,
    number: tl.tensor,
    steps: tl.tensor,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """What :func:`write` leaves, of elements that are known.

    ``positions`` (int64) ascend, ``values`` are the bits of float32 numbers; as many of both are sent as ``shape`` says
    (``ROOM``). ``regions`` are the first elements of regions (int32); the high bits are zeros. ``steps``: halvings of
    the longest table that is searched. A program for each ``BLOCK`` of entries and of regions.
    """
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    room, low_bits = tl.load(shape + ROOM), tl.load(shape + LOW_BITS)
    valid = own < room
    position = tl.load(positions + own, mask=valid, other=0).to(tl.int32)
    raw = tl.load(values + own, mask=valid, other=0)
    rows = tensors + _first_above(tensors + EDGES * (number + 1), number + 1, position, steps) - 1
    local = position - tl.load(rows + EDGES * (number + 1), mask=valid, other=0)
    part_bits = tl.load(rows + PART_BITS * (number + 1), mask=valid, other=0)
    part = tl.load(rows + PARTS * (number + 1), mask=valid, other=0) + (local >> part_bits)
    tl.store(entries + own, (part << low_bits) | (local & ((1 << low_bits) - 1)), mask=valid)
    tl.store(entries + most + own, raw, mask=valid)
    if SCALED:
        tl.atomic_max(largest + part, raw & MAGNITUDE, mask=valid, sem="relaxed")
    unary = own + tl.load(rows + BUCKETS * (number + 1), mask=valid, other=0) + (local >> low_bits)
    tl.atomic_or(message + tl.load(shape + HIGH) + (unary >> 5), 1 << (unary & 31), mask=valid, sem="relaxed")
    ranked = own < tl.load(shape + REGION_COUNT)
    first = tl.load(regions + own, mask=ranked, other=0)
    store_rank(message, shape, own, _first_above(positions, room, first - 1, steps), ranked)

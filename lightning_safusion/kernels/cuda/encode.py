"""Kernels that write a message: positions by Elias and Fano, values in four bits or as numbers.

:func:`write` visits the elements and gives every selected one its place among the entries; :func:`pack` visits the
entries, and owns whole words of the fields in which an entry has less than one. Places come from sums of counts, never
from the order in which programs run: every run writes the same bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_safusion.kernels.cuda.digits import candidates
from lightning_safusion.kernels.cuda.elements import (
    DESCRIPTION,
    FOUR_BITS,
    FRESH,
    INFINITE,
    MAGNITUDE,
    REGION,
    as_bfloat16,
    as_float16,
    store_rank,
    wide_ranks,
)
from lightning_safusion.kernels.cuda.rows import (
    BUCKETS,
    CAPACITY,
    CODES,
    EARLIER_ENTRIES,
    EARLIER_PARTS,
    EDGES,
    END,
    HEADER_BYTES,
    HIGH,
    LOW,
    LOW_BITS,
    PART_BITS,
    PART_COUNT,
    PARTS,
    QUOTAS,
    RANKED,
    RANKS,
    REGION_COUNT,
    REGIONS,
    ROOM,
    SCALES,
    SHAPES,
    SLOTS,
    SPANS,
    START,
)

_WIDE = tl.constexpr(512)  # tensors or chunks that are looked at together
_MOST_BFLOAT16 = tl.constexpr(0x7F7F0000)  # bits of the largest bfloat16 as a float32


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
def _scale(bits: tl.tensor) -> tl.tensor:
    """The scale of a part from its largest magnitude, both as bits of a float32: rounded to bfloat16."""
    coarse = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(bits > INFINITE, 0x7FC00000, coarse)


@triton.jit
def _zero_words(message: tl.tensor, start: tl.tensor, stop: tl.tensor, wanted: tl.tensor) -> None:
    """Zeros in fewer than 64 words, or halves of them: ``message`` is int32 or int16."""
    place = start + tl.arange(0, 64)
    zeros = tl.zeros([64], message.dtype.element_ty)
    tl.store(message + place, zeros, mask=place < tl.where(wanted, stop, start))


@triton.jit
def _write_header(
    message: tl.tensor,
    flags: tl.tensor,
    notices: tl.tensor,
    number: tl.tensor,
    bytes: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """The flags of all tensors, the notices, and zeros: the first bytes of a message (uint8).

    ``flags`` say where they differ from those of a gradient that is fresh and finite.
    """
    for at in range(program * SIZE, bytes, programs * SIZE):
        place = at + tl.arange(0, SIZE)
        flag = FRESH ^ tl.load(flags + place, mask=place < number, other=0)
        byte = tl.where(place < number, flag, tl.where(place == number, notices, 0))
        tl.store(message + place, byte.to(tl.uint8), mask=place < bytes)


@triton.jit
def _store_codes(
    message: tl.tensor,
    raw: tl.tensor,
    largest: tl.tensor,
    program: tl.tensor,
    valid: tl.tensor,
    codes: tl.tensor,
    scale_words: tl.tensor,
    GROUPS: tl.constexpr,
) -> None:
    """Four bits for each of ``GROUPS`` times 32 values, eight in a word; ``largest``: of the parts that they are in."""
    scale = _scale(largest)
    # the power of two nearest to the share of the scale: a float's bits are its logarithm, with a linear mantissa
    octave = 7 + (((raw & MAGNITUDE) - scale + 0x400000) >> 23)
    level = tl.where((scale > 0) & (scale < INFINITE), tl.maximum(tl.minimum(octave, 7), 0), 0)
    code = tl.where(valid, level | (((raw >> 31) & 1) << 3), 0)
    words = tl.sum(tl.reshape(code, [GROUPS * 4, 8]) << (4 * tl.arange(0, 8))[None, :], 1)
    place = codes + program * GROUPS * 4 + tl.arange(0, GROUPS * 4)
    tl.store(message + place, words, mask=place < scale_words)


@triton.jit
def _store_numbers(
    message: tl.tensor,
    halves: tl.tensor,
    raw: tl.tensor,
    entry: tl.tensor,
    codes: tl.tensor,
    capacity: tl.tensor,
    VALUES: tl.constexpr,
) -> None:
    """Values (bits of float32) as they are, or in 16 bits, where finite ones that are too large become the largest.

    Two of 16 bits fill a word: behind an odd number of them there is one more.
    """
    if VALUES == 0:
        tl.store(message + codes + entry, raw, mask=entry < capacity)
    else:
        value = raw.to(tl.float32, bitcast=True)
        if VALUES == 1:
            magnitude = raw & MAGNITUDE
            cut = (magnitude > _MOST_BFLOAT16) & (magnitude < INFINITE)
            coded, _value = as_bfloat16(
                tl.where(cut, (raw ^ magnitude) | _MOST_BFLOAT16, raw).to(tl.float32, bitcast=True)
            )
        else:
            narrow, _value = as_float16(value)
            coded = tl.where((raw & MAGNITUDE) == INFINITE, value.to(tl.float16), narrow).to(tl.int16, bitcast=True)
        tl.store(halves + 2 * codes + entry, coded, mask=entry < capacity + (capacity & 1))


@triton.jit(do_not_specialize=["notices", "most", "number", "programs"])
def pack(
    entries: tl.tensor,
    largest: tl.tensor,
    flags: tl.tensor,
    shape: tl.tensor,
    message: tl.tensor,
    header: tl.tensor,
    scales: tl.tensor,
    notices: tl.tensor,
    most: tl.tensor,
    number: tl.tensor,
    programs: tl.tensor,
    SELECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """Writes low bits, values, scales, the number of entries, header and padding.

    A program for ``GROUPS`` times 32 entries of a message; ``programs``: of each message. ``message``, ``header`` and
    ``scales`` are the memory of all messages as int32, uint8 and int16; ``entries`` and ``largest``: see :func:`write`;
    ``number``: tensors in the header.
    """
    SIZE: tl.constexpr = GROUPS * 32
    program = tl.program_id(0) % programs
    shape += tl.program_id(0) // programs * DESCRIPTION
    header += 4 * tl.load(shape + START).to(tl.int64)
    _write_header(header, flags, notices, number, tl.load(shape + HEADER_BYTES), program, programs, SIZE)
    if SELECTED:
        room, low_bits, parts = tl.load(shape + ROOM), tl.load(shape + LOW_BITS), tl.load(shape + PART_COUNT)
        entries += tl.load(shape + EARLIER_ENTRIES)
        largest += tl.load(shape + EARLIER_PARTS)
        capacity = tl.load(shape + CAPACITY)
        if program == 0:
            store_rank(message, shape, tl.load(shape + REGION_COUNT), room, capacity > 0)
        low, codes, scale_words = tl.load(shape + LOW), tl.load(shape + CODES), tl.load(shape + SCALES)
        entry = program * SIZE + tl.arange(0, SIZE)
        valid = entry < room
        own = tl.load(entries + entry, mask=valid, other=0)
        raw = tl.load(entries + most + entry, mask=valid, other=0)
        if VALUES == FOUR_BITS:
            most_of_parts = tl.load(largest + (own >> low_bits), mask=valid, other=0)
            _store_codes(message, raw, most_of_parts, program, valid, codes, scale_words, GROUPS)
        else:
            _store_numbers(message, scales, raw, entry, codes, capacity, VALUES)
        fields = tl.reshape(own & ((1 << low_bits) - 1), [GROUPS, 32])
        group = low + (program * GROUPS + tl.arange(0, GROUPS)) * low_bits
        for word in range(0, low_bits):
            shift = tl.arange(0, 32)[None, :] * low_bits - 32 * word
            left = tl.where((shift >= 0) & (shift < 32), fields << (shift & 31), 0)
            right = tl.where((shift < 0) & (shift > -32), fields >> (-shift & 31), 0)
            tl.store(message + group + word, tl.sum(left | right, 1), mask=group + word < codes)
        for at in range(program * SIZE, parts, programs * SIZE):
            part = at + tl.arange(0, SIZE)
            coarse = _scale(tl.load(largest + part, mask=part < parts, other=0)) >> 16
            tl.store(scales + 2 * scale_words + part, coarse.to(tl.int16), mask=part < parts)
        _pad(message, scales, shape, parts, program)


@triton.jit
def _pad(message: tl.tensor, scales: tl.tensor, shape: tl.tensor, parts: tl.tensor, program: tl.tensor) -> None:
    """The first program zeroes what rounds fields up."""
    capacity, low_bits = tl.load(shape + CAPACITY), tl.load(shape + LOW_BITS)
    first = program == 0
    ranks = tl.load(shape + REGION_COUNT) + (capacity > 0).to(tl.int32)
    behind = 2 * tl.load(shape + RANKS) + (ranks << wide_ranks(shape))
    _zero_words(scales, behind, 2 * tl.load(shape + HIGH), first)
    used = tl.load(shape + LOW) + ((capacity + 31) >> 5) * low_bits
    _zero_words(message, used, tl.load(shape + CODES), first)
    scale_words = tl.load(shape + SCALES)
    if first & ((parts & 1) != 0):
        tl.store(scales + 2 * scale_words + parts, tl.zeros([], tl.int16))
    _zero_words(message, scale_words + ((parts + 1) >> 1), tl.load(shape + END), first)

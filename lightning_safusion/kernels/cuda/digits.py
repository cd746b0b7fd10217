"""Kernels that find the limits of an exact selection, digit by digit, and count what is above and at them.

A limit is the least key that is selected from a tensor: that of its own quota, or, where tensors share a pool, the
lesser of its own and that of the pool. With quotas q, room K for all, and n(v) keys of a tensor that are v or more, the
pool's is the largest v with ``sum(max(q, n(v))) >= K``. Both have the same digits at first; from the first digit on
where its own is the lesser a tensor is *pinned*: it follows its own, and takes exactly its quota.

Every program works out the latest digit by itself from the histogram that the launch before has left. Integers are
added in any order, so that every run has the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_safusion.kernels.cuda.elements import DESCRIPTION, MAGNITUDE
from lightning_safusion.kernels.cuda.rows import HIGH, LISTS, LOW, QUOTAS, ROWS, SPANS


@triton.jit
def _resolve(
    histogram: tl.tensor,
    pool: tl.tensor,
    tensors: tl.tensor,
    states: tl.tensor,
    tensor: tl.tensor,
    room: tl.tensor,
    number: tl.tensor,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    POOLED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The limit as far as it is known, how many keys are above it, whether the tensor is pinned, and keys at it.

    Keys whose first digit is 0 are not counted: all are that or more.
    """
    BINS: tl.constexpr = 1 << BITS
    bins = tl.arange(0, BINS)
    row = tensor
    if FIRST:
        row = tl.load(tensors + ROWS * (number + 1) + tensor)
    own = tl.load(histogram + row * BINS + bins)
    prefix, above, pinned = tensor * 0, tensor * 0, tensor * 0
    if not FIRST:
        prefix, above = tl.load(states + tensor), tl.load(states + number + tensor)
        pinned = tl.load(states + 2 * number + tensor)
    at_least = tl.cumsum(own, 0, reverse=True) + above
    quota = tl.load(tensors + QUOTAS * (number + 1) + tensor)
    digit = tl.maximum(tl.sum((at_least >= quota).to(tl.int32), 0) - 1, 0)
    if POOLED:
        common = tl.maximum(tl.sum((tl.load(pool + bins) >= room).to(tl.int32), 0) - 1, 0)
        pinned = ((pinned != 0) | (digit < common)).to(tl.int32)
        digit = tl.where(pinned != 0, digit, common)
    above += tl.sum(tl.where(bins > digit, own, 0), 0)
    return (prefix << BITS) | digit, above, pinned, tl.sum(tl.where(bins == digit, own, 0), 0)


@triton.jit
def _add_digits(histogram: tl.tensor, digits: tl.tensor, hit: tl.tensor, BINS: tl.constexpr) -> None:
    """Counts the digits of a block. Where all are one number they are added once: ties would wait for each other."""
    least, most = tl.min(tl.where(hit, digits, BINS), 0), tl.max(tl.where(hit, digits, -1), 0)
    if least == most:
        tl.atomic_add(histogram + most, tl.sum(hit.to(tl.int32), 0), sem="relaxed")
    else:
        tl.atomic_add(histogram + digits, 1, mask=hit, sem="relaxed")


@triton.jit
def _tell(
    found: tl.tensor,
    tensors: tl.tensor,
    tensor: tl.tensor,
    chunk: tl.tensor,
    prefix: tl.tensor,
    above: tl.tensor,
    pinned: tl.tensor,
    number: tl.tensor,
) -> tl.tensor:
    """The first program of a tensor writes what is known of its limit; whether this is that one."""
    leads = tl.load(tensors + SPANS * (number + 1) + tensor) == chunk
    tl.store(found + tensor, prefix, mask=leads)
    tl.store(found + number + tensor, above, mask=leads)
    tl.store(found + 2 * number + tensor, pinned, mask=leads)
    return leads


@triton.jit
def _own_slots(
    tensors: tl.tensor, tensor: tl.tensor, chunk: tl.tensor, number: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The first slot of a chunk for candidates, and how many it has; 0 of a tensor from which nothing is selected."""
    lists, spans = tensors + LISTS * (number + 1) + tensor, tensors + SPANS * (number + 1) + tensor
    first, span = tl.load(lists), tl.load(spans)
    slots = (tl.load(lists + 1) - first) // (tl.load(spans + 1) - span)
    return first + (chunk - span) * slots, slots


@triton.jit
def _listed_or_all(
    keys: tl.tensor,
    lists: tl.tensor,
    length: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    first: tl.tensor,
    slots: tl.tensor,
    most: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """What :func:`candidates` finds of a chunk from ``start`` to ``stop`` that has so many, and so many slots."""
    listed = length <= slots
    # as a number: of two pointers AMD's compiler in Triton 3.6 must know the same
    source, items = (keys + start).to(tl.int64), stop - start
    if listed:
        source, items = (lists + most + first).to(tl.int64), length
    return source.to(tl.pointer_type(tl.int32)), items, listed, lists + first


@triton.jit
def candidates(
    keys: tl.tensor,
    chunks: tl.tensor,
    tensors: tl.tensor,
    lists: tl.tensor,
    counts: tl.tensor,
    tensor: tl.tensor,
    chunk: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    most: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Where the keys of a chunk's candidates are, how many, whether they are listed, and their places if so.

    Where there were too few slots all elements of the chunk are candidates. ``lists``, ``counts``, ``most``: see
    :func:`collect`.
    """
    start, stop = tl.load(chunks + count + chunk), tl.load(chunks + 2 * count + chunk)
    length = tl.load(counts + 2 * count + chunk)
    first, slots = _own_slots(tensors, tensor, chunk, number)
    source, items, listed, places = _listed_or_all(keys, lists, length, start, stop, first, slots, most)
    return source, items, listed, places


@triton.jit
def _count_digits(
    source: tl.tensor,
    items: tl.tensor,
    prefix: tl.tensor,
    histogram: tl.tensor,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Counts the digit of ``BITS`` bits from ``SHIFT`` on of the keys that agree with a prefix."""
    BINS: tl.constexpr = 1 << BITS
    for at in range(0, items, BLOCK):
        item = at + tl.arange(0, BLOCK)
        inside = item < items
        key = tl.load(source + item, mask=inside, other=0) & MAGNITUDE
        hit = inside & ((key >> (SHIFT + BITS)) == prefix)
        _add_digits(histogram, (key >> SHIFT) & (BINS - 1), hit, BINS)


@triton.jit
def _ranks(hit: tl.tensor, SIZE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """How many are hit before each of bool [SIZE], and in all.

    Counts of four rows of 32, a quarter of the block apart, share a number: threads exchange a quarter of the sums.
    """
    ROWS_OF_32: tl.constexpr = SIZE // 32
    ones = tl.reshape(hit.to(tl.int32), [4, ROWS_OF_32 // 4, 32])
    fields = 8 * tl.arange(0, 4)
    packed = tl.sum(ones << fields[:, None, None], 0)
    upto = (tl.cumsum(packed, 1)[None, :, :] >> fields[:, None, None]) & 0xFF
    rows = tl.reshape((tl.sum(packed, 1)[None, :] >> fields[:, None]) & 0xFF, [ROWS_OF_32])
    before = tl.reshape(tl.cumsum(rows, 0) - rows, [4, ROWS_OF_32 // 4])
    return tl.reshape(before[:, :, None] + upto - ones, [SIZE]), tl.sum(rows, 0)


@triton.jit(do_not_specialize=["messages", "room", "number", "count", "most"], do_not_specialize_on_alignment=["keys"])
def collect(
    keys: tl.tensor,
    chunks: tl.tensor,
    tensors: tl.tensor,
    shape: tl.tensor,
    message: tl.tensor,
    before: tl.tensor,
    pool: tl.tensor,
    found: tl.tensor,
    after: tl.tensor,
    lists: tl.tensor,
    counts: tl.tensor,
    messages: tl.tensor,
    room: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    most: tl.tensor,
    BITS_BEFORE: tl.constexpr,
    BITS: tl.constexpr,
    POOLED: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEMS: tl.constexpr,
) -> None:
    """Lists candidates, elements whose first digit is the limit's or more, counts their next, clears the high bits.

    A program for each chunk.

    Args:
        found: int32 [3, T]: limits so far, keys above them, pinned.
        lists: int32 [2, most], places and keys of candidates. Each chunk has its own slots, and there they are in the
            order of places; launches that follow read them.
        counts: int32 [3, count], gets in its last row how many candidates there are, whether there are slots or not.
        messages: That ``shape`` describes.
        ITEMS: Candidates whose digits are counted together.
    """
    chunk = tl.program_id(0)
    for _ in range(messages):
        high, end = tl.load(shape + HIGH), tl.load(shape + LOW)
        for at in range(high + chunk * BLOCK, end, count * BLOCK):
            word = at + tl.arange(0, BLOCK)
            tl.store(message + word, tl.zeros([BLOCK], tl.int32), mask=word < end)
        shape += DESCRIPTION
    tensor = tl.load(chunks + chunk)
    if tl.load(tensors + QUOTAS * (number + 1) + tensor) > 0:
        start, stop = tl.load(chunks + count + chunk), tl.load(chunks + 2 * count + chunk)
        prefix, above, pinned, _ = _resolve(
            before, pool, tensors, found, tensor, room, number, BITS_BEFORE, True, POOLED
        )
        _leads = _tell(found, tensors, tensor, chunk, prefix, above, pinned, number)
        first, slots = _own_slots(tensors, tensor, chunk, number)
        floor, length = prefix << (31 - BITS_BEFORE), start * 0
        for at in range(start, stop, BLOCK):
            offsets = at + tl.arange(0, BLOCK)
            inside = offsets < stop
            key = tl.load(keys + offsets, mask=inside, other=0)
            hit = inside & ((key & MAGNITUDE) >= floor)
            ranks, total = _ranks(hit, BLOCK)
            own = length + ranks
            kept = hit & (own < slots)
            tl.store(lists + first + own, offsets, mask=kept)
            tl.store(lists + most + first + own, key, mask=kept)
            length += total
        tl.store(counts + 2 * count + chunk, length)
        tl.debug_barrier()  # others of its threads have written what it reads
        source, items, _listed, _places = _listed_or_all(keys, lists, length, start, stop, first, slots, most)
        _count_digits(source, items, prefix, after + (tensor << BITS), BITS, 31 - BITS_BEFORE - BITS, ITEMS)


@triton.jit(do_not_specialize=["room", "number", "count", "most"], do_not_specialize_on_alignment=["keys"])
def narrow(
    keys: tl.tensor,
    chunks: tl.tensor,
    tensors: tl.tensor,
    before: tl.tensor,
    pool: tl.tensor,
    states: tl.tensor,
    found: tl.tensor,
    after: tl.tensor,
    lists: tl.tensor,
    counts: tl.tensor,
    room: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    most: tl.tensor,
    BITS_BEFORE: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    POOLED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Counts the next digit (``BITS`` bits from ``SHIFT`` on) of the candidates that agree with those found so far.

    ``states`` and ``found`` are int32 [3, T]; ``lists``, ``counts`` and ``most``: see :func:`collect`. A
    program for each chunk.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(chunks + chunk)
    if tl.load(tensors + QUOTAS * (number + 1) + tensor) > 0:
        prefix, above, pinned, _ = _resolve(
            before, pool, tensors, states, tensor, room, number, BITS_BEFORE, False, POOLED
        )
        _leads = _tell(found, tensors, tensor, chunk, prefix, above, pinned, number)
        source, items, _listed, _places = candidates(
            keys, chunks, tensors, lists, counts, tensor, chunk, number, count, most
        )
        _count_digits(source, items, prefix, after + (tensor << BITS), BITS, SHIFT, BLOCK)


@triton.jit(do_not_specialize=["room", "number", "count", "most"], do_not_specialize_on_alignment=["keys"])
def count_chunks(
    keys: tl.tensor,
    chunks: tl.tensor,
    tensors: tl.tensor,
    before: tl.tensor,
    pool: tl.tensor,
    states: tl.tensor,
    found: tl.tensor,
    lists: tl.tensor,
    counts: tl.tensor,
    limits: tl.tensor,
    room: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    most: tl.tensor,
    BITS: tl.constexpr,
    POOLED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Writes the limits, and how many keys of each chunk are above and at them.

    ``found`` is int32 [4, T]: limits, keys above them, pinned, keys at them; ``counts`` (int32 [3, count]) gets its
    first two rows. ``limits`` (int32 [T]) are kept for the next window; those of a pool stay 0, as a tensor may follow
    the limit of others.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(chunks + chunk)
    if tl.load(tensors + QUOTAS * (number + 1) + tensor) > 0:
        limit, above, pinned, equal = _resolve(before, pool, tensors, states, tensor, room, number, BITS, False, POOLED)
        leads = _tell(found, tensors, tensor, chunk, limit, above, pinned, number)
        tl.store(found + 3 * number + tensor, equal, mask=leads)
        if not POOLED:
            tl.store(limits + tensor, limit, mask=leads)
        source, items, _listed, _places = candidates(
            keys, chunks, tensors, lists, counts, tensor, chunk, number, count, most
        )
        larger, tied = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        for at in range(0, items, BLOCK):
            item = at + tl.arange(0, BLOCK)
            inside = item < items
            key = tl.load(source + item, mask=inside, other=0) & MAGNITUDE
            larger += (inside & (key > limit)).to(tl.int32)
            tied += (inside & (key == limit)).to(tl.int32)
        tl.store(counts + chunk, tl.sum(larger, 0))
        tl.store(counts + count + chunk, tl.sum(tied, 0))

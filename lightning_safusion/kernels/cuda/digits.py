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

from lightning_safusion.kernels.cuda.elements import DESCRIPTION, HIGH, LOW, MAGNITUDE, QUOTAS, SPANS


@triton.jit(do_not_specialize=["number"])
def share(
    histogram: tl.tensor,
    tensors: tl.tensor,
    states: tl.tensor,
    pool: tl.tensor,
    number: tl.tensor,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
) -> None:
    """Adds to the pool (int32 [2^BITS]) what a tensor takes if the limit of all has this digit. A program a tensor."""
    tensor = tl.program_id(0)
    BINS: tl.constexpr = 1 << BITS
    quota = tl.load(tensors + QUOTAS * (number + 1) + tensor)
    if quota > 0:
        bins = tl.arange(0, BINS)
        at_least = tl.cumsum(tl.load(histogram + tensor * BINS + bins), 0, reverse=True)
        if not FIRST:
            at_least += tl.load(states + number + tensor)
            if tl.load(states + 2 * number + tensor) != 0:
                at_least = tl.zeros([BINS], tl.int32)
        tl.atomic_add(pool + bins, tl.maximum(quota, at_least), sem="relaxed")


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
    """The limit as far as it is known, how many keys are above it, whether the tensor is pinned, and keys at it."""
    BINS: tl.constexpr = 1 << BITS
    bins = tl.arange(0, BINS)
    own = tl.load(histogram + tensor * BINS + bins)
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


@triton.jit(do_not_specialize=["messages", "room", "number", "count"], do_not_specialize_on_alignment=["keys"])
def narrow(
    keys: tl.tensor,
    chunks: tl.tensor,
    tensors: tl.tensor,
    shape: tl.tensor,
    message: tl.tensor,
    before: tl.tensor,
    pool: tl.tensor,
    states: tl.tensor,
    found: tl.tensor,
    after: tl.tensor,
    messages: tl.tensor,
    room: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    BITS_BEFORE: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    FIRST: tl.constexpr,
    POOLED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Counts the next digit (``BITS`` bits from ``SHIFT`` on) of the keys that agree with those found so far.

    ``states`` and ``found`` are int32 [3, T]: limits so far, keys above them, pinned. The first launch also clears the
    high bits of the messages. A program for each chunk.
    """
    chunk = tl.program_id(0)
    BINS: tl.constexpr = 1 << BITS
    if FIRST:
        for _ in range(messages):
            high, end = tl.load(shape + HIGH), tl.load(shape + LOW)
            for at in range(high + chunk * BLOCK, end, count * BLOCK):
                place = at + tl.arange(0, BLOCK)
                tl.store(message + place, tl.zeros([BLOCK], tl.int32), mask=place < end)
            shape += DESCRIPTION
    tensor = tl.load(chunks + chunk)
    if tl.load(tensors + QUOTAS * (number + 1) + tensor) > 0:
        start, stop = tl.load(chunks + count + chunk), tl.load(chunks + 2 * count + chunk)
        prefix, above, pinned, _ = _resolve(
            before, pool, tensors, states, tensor, room, number, BITS_BEFORE, FIRST, POOLED
        )
        leads = tl.load(tensors + SPANS * (number + 1) + tensor) == chunk
        tl.store(found + tensor, prefix, mask=leads)
        tl.store(found + number + tensor, above, mask=leads)
        tl.store(found + 2 * number + tensor, pinned, mask=leads)
        for at in range(start, stop, BLOCK):
            offsets = at + tl.arange(0, BLOCK)
            inside = offsets < stop
            key = tl.load(keys + offsets, mask=inside, other=0) & MAGNITUDE
            hit = inside & ((key >> (SHIFT + BITS)) == prefix)
            _add_digits(after + tensor * BINS, (key >> SHIFT) & (BINS - 1), hit, BINS)


@triton.jit(do_not_specialize=["room", "number", "count"], do_not_specialize_on_alignment=["keys"])
def count_chunks(
    keys: tl.tensor,
    chunks: tl.tensor,
    tensors: tl.tensor,
    before: tl.tensor,
    pool: tl.tensor,
    states: tl.tensor,
    found: tl.tensor,
    counts: tl.tensor,
    room: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    BITS: tl.constexpr,
    POOLED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Writes the limits, and how many keys of each chunk are above and at them.

    ``found`` is int32 [4, T]: limits, keys above them, pinned, keys at them; ``counts`` int32 [2, count].
    """
    chunk = tl.program_id(0)
    tensor = tl.load(chunks + chunk)
    if tl.load(tensors + QUOTAS * (number + 1) + tensor) > 0:
        start, stop = tl.load(chunks + count + chunk), tl.load(chunks + 2 * count + chunk)
        limit, above, pinned, equal = _resolve(before, pool, tensors, states, tensor, room, number, BITS, False, POOLED)
        leads = tl.load(tensors + SPANS * (number + 1) + tensor) == chunk
        tl.store(found + tensor, limit, mask=leads)
        tl.store(found + number + tensor, above, mask=leads)
        tl.store(found + 2 * number + tensor, pinned, mask=leads)
        tl.store(found + 3 * number + tensor, equal, mask=leads)
        larger, tied = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        for at in range(start, stop, BLOCK):
            offsets = at + tl.arange(0, BLOCK)
            inside = offsets < stop
            key = tl.load(keys + offsets, mask=inside, other=0) & MAGNITUDE
            larger += (inside & (key > limit)).to(tl.int32)
            tied += (inside & (key == limit)).to(tl.int32)
        tl.store(counts + chunk, tl.sum(larger, 0))
        tl.store(counts + count + chunk, tl.sum(tied, 0))

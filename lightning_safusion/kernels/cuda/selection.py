"""Kernels of the exact selection from all segments of a buffer.

Radix selection over the 31 magnitude bits of a float32 (11 + 10 + 10), as in sparsify/selection/torch_view.py, in five
kernels that read the span four times:

1. :func:`survey` counts the first digit of the elements above the threshold of their segment.
2. :func:`narrow`, twice, counts the next digit of the elements that agree with the digits found so far. Every program
   works out the digit before by itself, from the histogram that the last kernel left: no kernel between, and no program
   waits for another.
3. :func:`mark` knows the limit of its segment, writes one bit per element, and counts them for its chunk.
4. :func:`write` reads bits and counts instead of the span, and writes positions and values in ascending order.

A segment with fewer elements above its threshold than its quota has its limit after the first kernel: the programs of
the two passes between end at once.

Sizes are not specialized: every buffer has its own, and none of them may cost a compilation.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIRST_BINS = 2048
NEXT_BINS = 1024

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _keys(bits: tl.tensor, offsets: tl.tensor, inside: tl.tensor) -> tl.tensor:
    return tl.load(bits + offsets, mask=inside, other=0) & _MAGNITUDE


@triton.jit
def _floor(thresholds: tl.tensor, active: tl.tensor, segment: tl.tensor, LIMITED: tl.constexpr) -> tl.tensor:
    """What the key of a selected element exceeds."""
    floor = tl.full([], -1, tl.int32)
    if LIMITED:
        threshold = tl.load(thresholds + tl.load(active + segment))
        floor = threshold.to(tl.int32, bitcast=True) & _MAGNITUDE
        floor = tl.where(threshold < 0, -1, floor)
        floor = tl.where(threshold != threshold, _MAGNITUDE, floor)
    return floor


@triton.jit
def _digit(histogram: tl.tensor, rank: tl.tensor, BINS: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The digit of the ``rank``-th largest key, its rank among the keys with that digit, and the number of keys."""
    bins = tl.arange(0, BINS)
    counts = tl.load(histogram + bins)
    at_least = tl.cumsum(counts, 0, reverse=True)
    digit = tl.maximum(tl.sum((at_least >= rank).to(tl.int32), 0) - 1, 0)
    above = tl.sum(tl.where(bins > digit, counts, 0), 0)
    return digit, rank - above, tl.sum(counts, 0)


@triton.jit
def _first_limit(
    histogram: tl.tensor, largest: tl.tensor, rank: tl.tensor, floor: tl.tensor, BINS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Whether the limit is known after the first pass, with it, or the digit; the rank left, and the number taken.

    ``ties`` elements that equal the limit are taken too.
    """
    digit, left, total = _digit(histogram, rank, BINS)
    known = total < rank
    # nothing exceeds the threshold: the first of the largest elements is sent
    key = tl.where(known, tl.where(total > 0, floor, largest), digit)
    ties = tl.where(known, tl.where(total > 0, 0, 1), left)
    return known, key, ties, tl.where(known, tl.maximum(total, 1), rank)


@triton.jit(do_not_specialize=["chunks"])
def survey(
    bits: tl.tensor,
    table: tl.tensor,
    active: tl.tensor,
    thresholds: tl.tensor,
    histograms: tl.tensor,
    largest: tl.tensor,
    chunks: tl.tensor,
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Adds the chunk to the histogram (int32 [A, BINS]) and the largest key (int32 [A]) of its segment."""
    chunk = tl.program_id(0)
    segment = tl.load(table + chunk)
    start, stop = tl.load(table + chunks + chunk), tl.load(table + 2 * chunks + chunk)
    floor = _floor(thresholds, active, segment, LIMITED)
    counts = tl.zeros([BINS], tl.int32)
    most = tl.zeros([BLOCK], tl.int32)
    for at in range(start, stop, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        inside = offsets < stop
        keys = _keys(bits, offsets, inside)
        counts += tl.histogram(keys >> 20, BINS, mask=inside & (keys > floor))
        if LIMITED:
            most = tl.maximum(most, keys)
    bins = tl.arange(0, BINS)
    tl.atomic_add(histograms + segment * BINS + bins, counts, mask=counts > 0, sem="relaxed")
    if LIMITED:
        tl.atomic_max(largest + segment, tl.max(most, 0), sem="relaxed")


@triton.jit(do_not_specialize=["chunks", "segments"])
def narrow(
    bits: tl.tensor,
    table: tl.tensor,
    active: tl.tensor,
    thresholds: tl.tensor,
    quotas: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    largest: tl.tensor,
    states: tl.tensor,
    chunks: tl.tensor,
    segments: tl.tensor,
    LEVEL: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS_BEFORE: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Adds the elements of the chunk that agree with the digits found so far to the histogram of the next digit.

    ``states`` is int32 [2, 4, A]: after each level whether the limit is known, the limit or the digits so far, the rank
    left, and the number of elements taken.
    """
    chunk = tl.program_id(0)
    segment = tl.load(table + chunk)
    start, stop = tl.load(table + chunks + chunk), tl.load(table + 2 * chunks + chunk)
    if LEVEL == 1:
        floor = _floor(thresholds, active, segment, LIMITED)
        rank = tl.load(quotas + segment)
        histogram = before + segment * BINS_BEFORE
        known, key, left, taken = _first_limit(histogram, tl.load(largest + segment), rank, floor, BINS_BEFORE)
    else:
        known = tl.load(states + segment) != 0
        key = tl.load(states + segments + segment)
        left = tl.load(states + 2 * segments + segment)
        taken = tl.load(states + 3 * segments + segment)
        if not known:
            digit, left, _ = _digit(before + segment * BINS_BEFORE, left, BINS_BEFORE)
            key = (key << 10) | digit
    state = states + (LEVEL - 1) * 4 * segments + segment
    first = (chunk == 0) | (tl.load(table + tl.maximum(chunk - 1, 0)) != segment)
    tl.store(state, known.to(tl.int32), mask=first)
    tl.store(state + segments, key, mask=first)
    tl.store(state + 2 * segments, left, mask=first)
    tl.store(state + 3 * segments, taken, mask=first)
    if not known:
        counts = tl.zeros([BINS], tl.int32)
        for at in range(start, stop, BLOCK):
            offsets = at + tl.arange(0, BLOCK)
            inside = offsets < stop
            keys = _keys(bits, offsets, inside)
            digits = (keys >> (20 - 10 * LEVEL)) & (BINS - 1)
            counts += tl.histogram(digits, BINS, mask=inside & ((keys >> (30 - 10 * LEVEL)) == key))
        bins = tl.arange(0, BINS)
        tl.atomic_add(after + segment * BINS + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _limit(
    histograms: tl.tensor, states: tl.tensor, segment: tl.tensor, segments: tl.tensor, BINS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The limit of a segment after all passes, and how many elements equal to it are taken."""
    state = states + 4 * segments + segment
    known = tl.load(state) != 0
    key = tl.load(state + segments)
    left = tl.load(state + 2 * segments)
    if not known:
        digit, left, _ = _digit(histograms + segment * BINS, left, BINS)
        key = (key << 10) | digit
    return key, left


@triton.jit(do_not_specialize=["segments"])
def limits(histograms: tl.tensor, states: tl.tensor, out: tl.tensor, segments: tl.tensor, BINS: tl.constexpr) -> None:
    """Writes the limit of every segment (int32 [A])."""
    segment = tl.program_id(0)
    key, _ = _limit(histograms, states, segment, segments, BINS)
    tl.store(out + segment, key)


@triton.jit
def _packed(flags: tl.tensor, WORDS: tl.constexpr) -> tl.tensor:
    """int32 [WORDS], one bit per flag (bool [32 * WORDS])."""
    rows = tl.reshape(flags.to(tl.int32), [WORDS, 32])
    return tl.sum(rows << tl.arange(0, 32)[None, :], 1)


@triton.jit
def _unpacked(words: tl.tensor, WORDS: tl.constexpr) -> tl.tensor:
    """int32 [32 * WORDS] of zeros and ones."""
    return tl.reshape((words[:, None] >> tl.arange(0, 32)[None, :]) & 1, [32 * WORDS])


@triton.jit(do_not_specialize=["chunks", "segments", "blocks"])
def mark(
    bits: tl.tensor,
    table: tl.tensor,
    histograms: tl.tensor,
    states: tl.tensor,
    words: tl.tensor,
    counts: tl.tensor,
    chunks: tl.tensor,
    segments: tl.tensor,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Compares the chunk with the limit of its segment.

    ``words`` is int32 [2, blocks, BLOCK / 32], a bit for every element above the limit and for every one that equals
    it; ``counts`` is int32 [2, C], how many they are.
    """
    WORDS: tl.constexpr = BLOCK // 32
    chunk = tl.program_id(0)
    segment = tl.load(table + chunk)
    start, stop = tl.load(table + chunks + chunk), tl.load(table + 2 * chunks + chunk)
    block = tl.load(table + 3 * chunks + chunk)
    limit, ties = _limit(histograms, states, segment, segments, BINS)
    larger, equal = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for at in range(start, stop, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        inside = offsets < stop
        keys = _keys(bits, offsets, inside)
        above = inside & (keys > limit)
        tied = inside & (keys == limit) & (ties > 0)
        place = words + block * WORDS + tl.arange(0, WORDS)
        tl.store(place, _packed(above, WORDS))
        tl.store(place + blocks * WORDS, _packed(tied, WORDS))
        larger += above.to(tl.int32)
        equal += tied.to(tl.int32)
        block += 1
    tl.store(counts + chunk, tl.sum(larger, 0))
    tl.store(counts + chunks + chunk, tl.sum(equal, 0))
    first = (chunk == 0) | (tl.load(table + tl.maximum(chunk - 1, 0)) != segment)
    tl.store(states + 2 * segments + segment, ties, mask=first)  # in place of the rank left after level 1


@triton.jit(do_not_specialize=["chunks", "segments", "blocks", "capacity"])
def write(
    bits: tl.tensor,
    table: tl.tensor,
    spans: tl.tensor,
    states: tl.tensor,
    words: tl.tensor,
    counts: tl.tensor,
    indices: tl.tensor,
    values: tl.tensor,
    total: tl.tensor,
    chunks: tl.tensor,
    segments: tl.tensor,
    blocks: tl.tensor,
    capacity: tl.tensor,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SEGMENTS: tl.constexpr,
) -> None:
    """Writes the positions (int64) and the bits of the values (int32) of the chunk, and its share of the padding."""
    WORDS: tl.constexpr = BLOCK // 32
    chunk = tl.program_id(0)
    segment = tl.load(table + chunk)
    start, stop = tl.load(table + chunks + chunk), tl.load(table + 2 * chunks + chunk)
    block = tl.load(table + 3 * chunks + chunk)
    ties = tl.load(states + 2 * segments + segment)

    others = tl.arange(0, SEGMENTS)
    taken = tl.load(states + 7 * segments + others, mask=others < segments, other=0)
    slot = tl.sum(tl.where(others < segment, taken, 0), 0)
    first = tl.load(spans + segment)
    earlier = first + tl.arange(0, CHUNKS)
    slot += tl.sum(tl.load(counts + earlier, mask=earlier < chunk, other=0), 0)
    tied_before = tl.sum(tl.load(counts + chunks + earlier, mask=earlier < chunk, other=0), 0)
    slot += tl.minimum(tied_before, ties)

    for at in range(start, stop, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        place = words + block * WORDS + tl.arange(0, WORDS)
        above = _unpacked(tl.load(place), WORDS)
        tied = _unpacked(tl.load(place + blocks * WORDS), WORDS)
        order = tied_before + tl.cumsum(tied, 0)
        kept = above | (tied & (order <= ties).to(tl.int32))
        slots = slot + tl.cumsum(kept, 0) - 1
        tl.store(indices + slots, offsets.to(tl.int64), mask=kept != 0)
        tl.store(values + slots, tl.load(bits + offsets, mask=kept != 0, other=0), mask=kept != 0)
        slot += tl.sum(kept, 0)
        tied_before += tl.sum(tied, 0)
        block += 1

    valid = tl.sum(taken, 0)
    tl.store(total, valid.to(tl.int64), mask=chunk == 0)
    zeros = tl.zeros([BLOCK], tl.int32)
    for at in range(valid + chunk * BLOCK, capacity, chunks * BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        tl.store(indices + offsets, zeros.to(tl.int64), mask=offsets < capacity)
        tl.store(values + offsets, zeros, mask=offsets < capacity)

"""Kernels of the wire formats: one launch writes every byte of a message.

Sizes are not specialized: every buffer has its own, and none of them may cost a compilation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_safusion.kernels.cuda.elements import as_bfloat16


@triton.jit
def _valid_entries(count: tl.tensor, known: tl.tensor, KNOWN: tl.constexpr) -> tl.tensor:
    return known if KNOWN else tl.load(count).to(tl.int32)


@triton.jit
def _write_values(
    values: tl.tensor,
    field: tl.tensor,
    sent: tl.tensor,
    valid: tl.tensor,
    entries: tl.tensor,
    capacity: tl.tensor,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Writes values in the dtype of the field, int16 for bfloat16, and into ``sent`` what they have become.

    Padding is 0. Finite values above ``LIMIT`` saturate; 0 stands for float32, which needs neither.
    """
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + places, mask=places < valid, other=0.0)
    if LIMIT > 0:
        finite = tl.abs(value) < float("inf")
        value = tl.where(finite & (value > LIMIT), LIMIT, value)
        value = tl.where(finite & (value < -LIMIT), -LIMIT, value)
    if field.dtype.element_ty == tl.int16:
        coded, decoded = as_bfloat16(value)
    else:
        coded = value.to(field.dtype.element_ty)
        decoded = coded.to(tl.float32)
    tl.store(field + places, coded, mask=places < capacity)
    if LIMIT > 0:
        tl.store(sent + places, decoded, mask=places < entries)


@triton.jit
def _first_at_least(indices: tl.tensor, valid: tl.tensor, targets: tl.tensor, steps: tl.tensor) -> tl.tensor:
    """int32, number of the ascending ``indices`` that are below each of the ``targets``, by bisection."""
    low = tl.zeros_like(targets).to(tl.int32)
    high = low + valid
    for _ in range(steps):
        open_ = low < high
        middle = (low + high) // 2
        below = tl.load(indices + middle, mask=open_, other=0) < targets
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_, tl.where(below, high, middle), high)
    return low


@triton.jit(do_not_specialize=["known", "entries", "capacity"])
def encode_coo(
    indices: tl.tensor,
    values: tl.tensor,
    count: tl.tensor,
    header: tl.tensor,
    positions: tl.tensor,
    field: tl.tensor,
    sent: tl.tensor,
    known: tl.tensor,
    entries: tl.tensor,
    capacity: tl.tensor,
    KNOWN: tl.constexpr,
    LIMIT: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Writes the header (int32 [1]), the positions (int32 [capacity]) and the values ([capacity])."""
    valid = _valid_entries(count, known, KNOWN)
    program = tl.program_id(0)
    tl.store(header, valid, mask=program == 0)
    places = program * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + places, mask=places < valid, other=0)
    tl.store(positions + places, index.to(tl.int32), mask=places < capacity)
    _write_values(values, field, sent, valid, entries, capacity, LIMIT, BLOCK)
    if TAIL:  # 16-bit values come last, and one more of them rounds the message up
        tl.store(field + capacity, (valid * 0).to(field.dtype.element_ty), mask=program == 0)


@triton.jit(do_not_specialize=["known", "entries", "capacity", "regions", "steps"])
def encode_block16(
    indices: tl.tensor,
    values: tl.tensor,
    count: tl.tensor,
    header: tl.tensor,
    field: tl.tensor,
    positions: tl.tensor,
    sent: tl.tensor,
    known: tl.tensor,
    entries: tl.tensor,
    capacity: tl.tensor,
    regions: tl.tensor,
    steps: tl.tensor,
    KNOWN: tl.constexpr,
    LIMIT: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Writes the entries of every region (int32 [regions]), the values and the offsets (int16 [capacity])."""
    valid = _valid_entries(count, known, KNOWN)
    program = tl.program_id(0)
    places = program * BLOCK + tl.arange(0, BLOCK)
    if program * BLOCK < regions:
        edges = places.to(tl.int64) << 16
        stop = _first_at_least(indices, valid, edges + 65536, steps)
        number = stop - _first_at_least(indices, valid, edges, steps)
        tl.store(header + places, number, mask=places < regions)
    index = tl.load(indices + places, mask=places < valid, other=0)
    tl.store(positions + places, index.to(tl.int16), mask=places < capacity)  # keeps the low 16 bits
    _write_values(values, field, sent, valid, entries, capacity, LIMIT, BLOCK)
    if TAIL:  # offsets come last
        tl.store(positions + capacity, (valid * 0).to(tl.int16), mask=program == 0)


@triton.jit(do_not_specialize=["known", "entries", "capacity", "length", "steps"])
def encode_bitmap(
    indices: tl.tensor,
    values: tl.tensor,
    count: tl.tensor,
    words: tl.tensor,
    field: tl.tensor,
    sent: tl.tensor,
    known: tl.tensor,
    entries: tl.tensor,
    capacity: tl.tensor,
    length: tl.tensor,
    steps: tl.tensor,
    KNOWN: tl.constexpr,
    LIMIT: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Writes a bit for every element (int32 [length]), and the values."""
    valid = _valid_entries(count, known, KNOWN)
    program = tl.program_id(0)
    places = program * BLOCK + tl.arange(0, BLOCK)
    if program * BLOCK < length:
        edges = places.to(tl.int64) * 32
        first = _first_at_least(indices, valid, edges, steps)
        bits = tl.zeros([BLOCK], tl.int32)
        for ahead in range(32):  # as many as a word can hold
            index = tl.load(indices + first + ahead, mask=first + ahead < valid, other=-1)
            mine = (index >= edges) & (index < edges + 32)
            bits |= tl.where(mine, 1 << (index & 31).to(tl.int32), 0)
        tl.store(words + places, bits, mask=places < length)
    _write_values(values, field, sent, valid, entries, capacity, LIMIT, BLOCK)
    if TAIL:
        tl.store(field + capacity, (valid * 0).to(field.dtype.element_ty), mask=program == 0)


@triton.jit(do_not_specialize=["regions", "capacity"])
def decode_block16(
    header: tl.tensor,
    positions: tl.tensor,
    indices: tl.tensor,
    regions: tl.tensor,
    capacity: tl.tensor,
    REGIONS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Writes the positions (int64 [capacity]) of the entries of a region; padding is the start of the last one."""
    region = tl.program_id(0)
    others = tl.arange(0, REGIONS)
    counts = tl.load(header + others, mask=others < regions, other=0)
    first = tl.sum(tl.where(others < region, counts, 0), 0)
    stop = first + tl.sum(tl.where(others == region, counts, 0), 0)
    base = region.to(tl.int64) << 16
    for at in range(first, stop, BLOCK):
        places = at + tl.arange(0, BLOCK)
        offsets = tl.load(positions + places, mask=places < stop, other=0).to(tl.int64) & 0xFFFF
        tl.store(indices + places, base + offsets, mask=places < stop)
    padding = (tl.zeros([BLOCK], tl.int64) + (regions - 1)) << 16
    for at in range(tl.sum(counts, 0) + region * BLOCK, capacity, regions * BLOCK):
        places = at + tl.arange(0, BLOCK)
        tl.store(indices + places, padding, mask=places < capacity)


@triton.jit(do_not_specialize=["length", "width"])
def count_bits(words: tl.tensor, counts: tl.tensor, length: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Writes the number of set bits in ``width`` words."""
    program = tl.program_id(0)
    number = tl.zeros([BLOCK], tl.int32)
    for at in range(program * width, program * width + width, BLOCK):
        places = at + tl.arange(0, BLOCK)
        word = tl.load(words + places, mask=places < length, other=0)
        number += tl.sum((word[:, None] >> tl.arange(0, 32)[None, :]) & 1, 1)
    tl.store(counts + program, tl.sum(number, 0))


@triton.jit(do_not_specialize=["length", "width", "programs", "capacity"])
def decode_bitmap(
    words: tl.tensor,
    counts: tl.tensor,
    indices: tl.tensor,
    length: tl.tensor,
    width: tl.tensor,
    programs: tl.tensor,
    capacity: tl.tensor,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Writes the positions (int64 [capacity]) of the bits set in ``width`` words; padding is 0."""
    program = tl.program_id(0)
    others = tl.arange(0, PROGRAMS)
    every = tl.load(counts + others, mask=others < programs, other=0)
    slot = tl.sum(tl.where(others < program, every, 0), 0)
    for at in range(program * width, program * width + width, BLOCK):
        places = at + tl.arange(0, BLOCK)
        word = tl.load(words + places, mask=places < length, other=0)
        bits = tl.reshape((word[:, None] >> tl.arange(0, 32)[None, :]) & 1, [32 * BLOCK])
        slots = slot + tl.cumsum(bits, 0) - 1
        elements = tl.reshape(places.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :], [32 * BLOCK])
        tl.store(indices + slots, elements, mask=(bits != 0) & (slots < capacity))
        slot += tl.sum(bits, 0)
    zeros = tl.zeros([BLOCK], tl.int64)
    for at in range(tl.sum(every, 0) + program * BLOCK, capacity, programs * BLOCK):
        places = at + tl.arange(0, BLOCK)
        tl.store(indices + places, zeros, mask=places < capacity)

"""The kernel that writes what an entry of a message has beside its high bits: values in four bits or as numbers.

A program owns whole words of the fields in which an entry has less than one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_safusion.kernels.cuda.elements import (
    DESCRIPTION,
    FOUR_BITS,
    FRESH,
    INFINITE,
    MAGNITUDE,
    as_bfloat16,
    as_float16,
    store_rank,
    wide_ranks,
)
from lightning_safusion.kernels.cuda.rows import (
    CAPACITY,
    CODES,
    EARLIER_ENTRIES,
    EARLIER_PARTS,
    END,
    HEADER_BYTES,
    HIGH,
    LOW,
    LOW_BITS,
    PART_COUNT,
    RANKS,
    REGION_COUNT,
    ROOM,
    SCALES,
    START,
)

_MOST_BFLOAT16 = tl.constexpr(0x7F7F0000)  # bits of the largest bfloat16 as a float32


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

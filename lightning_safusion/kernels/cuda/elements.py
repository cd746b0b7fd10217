"""What the kernels of a buffer share: numbers of several widths, and where the parts of a buffer are described.

Every buffer has tables on its device (:mod:`tables`): of its tensors, of the pieces that programs take, and of the
fields of its messages. Kernels read sizes from them, so that no size costs a compilation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_safusion.kernels.cuda import tables
from lightning_safusion.kernels.cuda.launch import VERSION
from lightning_safusion.kernels.cuda.rows import CAPACITY, RANKS, MessageRow
from lightning_safusion.kernels.fields import NARROW_RANKS, REGION_BITS, Notice, TensorFlag

#: The bits of a float32 without its sign order magnitudes as integers; from the second number on it is not finite.
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)

#: Bits of a tensor's flag in the header of a message, and of the notices of its sender.
FRESH, BAD = tl.constexpr(TensorFlag.FRESH.value), tl.constexpr(TensorFlag.BAD.value)
FAILED = tl.constexpr(Notice.FAILED.value)

#: Numbers in the description of a message.
DESCRIPTION = tl.constexpr(len(MessageRow._fields))
_NARROW_RANKS = tl.constexpr(NARROW_RANKS)
#: Buckets of a region, as a power of two.
REGION = tl.constexpr(REGION_BITS)
#: Kinds of values beside those of numbers.
FOUR_BITS, ANY_VALUES = tl.constexpr(tables.FOUR_BITS), tl.constexpr(tables.ANY_VALUES)


@triton.jit
def wide_ranks(shape: tl.tensor) -> tl.tensor:
    """1 if the ranks of a message have 32 bits, 0 if they have 16; ``shape`` describes it."""
    return (tl.load(shape + CAPACITY) >= _NARROW_RANKS).to(tl.int32)


@triton.jit
def load_rank(message: tl.tensor, shape: tl.tensor, region: tl.tensor) -> tl.tensor:
    """Entries of a message (int32) before a region."""
    wide = wide_ranks(shape)
    word = tl.load(message + tl.load(shape + RANKS) + (region >> (1 - wide)))
    return tl.where(wide != 0, word, (word >> ((region & 1) << 4)) & 0xFFFF)


@triton.jit
def store_rank(message: tl.tensor, shape: tl.tensor, region: tl.tensor, entries: tl.tensor, inside: tl.tensor) -> None:
    """Writes what :func:`load_rank` reads.

    In halves of words, as other programs may write the other half: of 16 bits the same half twice.
    """
    wide = wide_ranks(shape)
    half = (message + tl.load(shape + RANKS)).to(tl.pointer_type(tl.int16)) + (region << wide)
    tl.store(half, entries.to(tl.int16), mask=inside)
    tl.store(half + wide, (entries >> (wide << 4)).to(tl.int16), mask=inside)


@triton.jit
def as_bfloat16(value: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The bits (int16) of float32 numbers in bfloat16, rounded to nearest even, and the same as float32.

    In integers, so that every chip, old ones without the instruction too, writes the bits that PyTorch writes.
    """
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(value != value, 0x7FC0, rounded)
    return rounded.to(tl.int16), (rounded << 16).to(tl.float32, bitcast=True)


@triton.jit
def as_float16(value: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """float32 numbers cut to the range of float16, in float16, and the same as float32."""
    cut = tl.where(value > 65504.0, 65504.0, tl.where(value < -65504.0, -65504.0, value))
    narrow = cut.to(tl.float16)
    return narrow, narrow.to(tl.float32)


@triton.jit
def load_float(
    address: tl.tensor, offsets: tl.tensor, inside: tl.tensor, KIND: tl.constexpr, OTHER: tl.constexpr = 0
) -> tl.tensor:
    """Numbers at an address as float32, ``OTHER`` (0 or 1) outside. ``KIND`` 0: float32, 1: bfloat16, 2: float16."""
    if KIND == 0:
        found = tl.load(address.to(tl.pointer_type(tl.float32)) + offsets, mask=inside, other=OTHER)
    elif KIND == 1:
        narrow = tl.load(address.to(tl.pointer_type(tl.int16)) + offsets, mask=inside, other=OTHER * 0x3F80)
        found = (narrow.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        found = tl.load(address.to(tl.pointer_type(tl.float16)) + offsets, mask=inside, other=OTHER).to(tl.float32)
    return found


@triton.jit
def load_kind(address: tl.tensor, offsets: tl.tensor, inside: tl.tensor, kind: tl.tensor) -> tl.tensor:
    """:func:`load_float` of a kind that is known on the device only."""
    found = tl.zeros_like(offsets).to(tl.float32)
    if kind == 0:
        found = load_float(address, offsets, inside, 0)
    if kind == 1:
        found = load_float(address, offsets, inside, 1)
    if kind == 2:
        found = load_float(address, offsets, inside, 2)
    return found


@triton.jit
def store_float(
    address: tl.tensor, offsets: tl.tensor, value: tl.tensor, inside: tl.tensor, KIND: tl.constexpr
) -> tl.tensor:
    """Writes float32 numbers as :func:`load_float` reads them; returns what they have become."""
    held = value
    if KIND == 0:
        tl.store(address.to(tl.pointer_type(tl.float32)) + offsets, value, mask=inside)
    elif KIND == 1:
        bits, held = as_bfloat16(value)
        tl.store(address.to(tl.pointer_type(tl.int16)) + offsets, bits, mask=inside)
    else:
        narrow, held = as_float16(value)
        tl.store(address.to(tl.pointer_type(tl.float16)) + offsets, narrow, mask=inside)
    return held


@triton.jit
def round_float(value: tl.tensor, kind: tl.tensor) -> tl.tensor:
    """float32 numbers as a kind that is known on the device only holds them."""
    _bits, coarse = as_bfloat16(value)
    _narrow, half = as_float16(value)
    return tl.where(kind == 1, coarse, tl.where(kind == 2, half, value))


#: Before Triton 3.6 its quotients and roots take subnormal numbers for 0 on NVIDIA's devices: there an instruction is
#: named instead. (What is not a JITFunction is interpreted.)
FLUSHES = tl.constexpr(VERSION < (3, 6) and torch.version.hip is None and isinstance(store_float, triton.JITFunction))


@triton.jit
def quotient(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """x / y of float32 blocks, rounded to nearest, subnormal numbers too."""
    if FLUSHES:
        found = tl.inline_asm_elementwise("div.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1)
    else:
        found = tl.div_rn(x, y)
    return found


@triton.jit
def root(x: tl.tensor) -> tl.tensor:
    """The square root of a float32 block, rounded to nearest, of subnormal numbers too."""
    if FLUSHES:
        found = tl.inline_asm_elementwise("sqrt.rn.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        found = tl.sqrt_rn(x)
    return found


@triton.jit
def magnitudes(value: tl.tensor) -> tl.tensor:
    """int32, the bits of float32 numbers without their signs."""
    return value.to(tl.int32, bitcast=True) & MAGNITUDE

"""The kernels that add gradients to the residual and count the digits of keys: in one pass, but for few of them."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_safusion.kernels.cuda.elements import (
    BAD,
    INFINITE,
    MAGNITUDE,
    load_float,
    magnitudes,
    quotient,
    root,
    store_float,
)
from lightning_safusion.kernels.cuda.rows import EDGES, FLAGS, GRADS, LANES, MOMENTS, QUOTAS, ROWS


@triton.jit
def keys_of(
    x: tl.tensor, moments: tl.tensor, epsilon: tl.tensor, offsets: tl.tensor, inside: tl.tensor, MOMENT: tl.constexpr
) -> tl.tensor:
    """How far the optimizer would move elements, with every operation rounded as on the CPU; without moments x."""
    roots = tl.zeros_like(x) + 1.0
    if moments != 0:
        # zeros behind the end stay zeros without an epsilon too: their digits are known
        roots = root(load_float(moments, offsets, inside, MOMENT, 1)) + epsilon
    return quotient(x, roots)


# How far below its last limit, in steps of a float32, the first digits of a tensor are counted: a quarter of an octave.
_MARGIN = tl.constexpr(1 << 21)


@triton.jit
def uncounted_digits(limits: tl.tensor, tensor: tl.tensor, bits: tl.tensor) -> tl.tensor:
    """Keys with this first digit or a lesser one are not counted at first: the limit of the last window was above.

    Few keys are left: a device adds to its memory at a small part of the rate at which it reads. Where they are fewer
    than a quota, :func:`count_rest` counts the others. Digit 0 is never
    counted, since all keys are that or more.
    """
    floor = tl.maximum(tl.load(limits + tensor) - _MARGIN, 0) >> (31 - bits)
    return tl.maximum(floor - 1, 0)


@triton.jit
def own_histogram(
    histogram: tl.tensor,
    tensors: tl.tensor,
    tensor: tl.tensor,
    program: tl.tensor,
    number: tl.tensor,
    bits: tl.tensor,
) -> tl.tensor:
    """That of a tensor's histograms in which a program counts first digits."""
    row = tl.load(tensors + ROWS * (number + 1) + tensor)
    copies = tl.load(tensors + ROWS * (number + 1) + tensor + 1) - row
    return histogram + ((row + program % copies) << bits)


@triton.jit(do_not_specialize=["number", "count"], do_not_specialize_on_alignment=["memory", "keys", "message"])
def compensate(
    memory: tl.tensor,
    keys: tl.tensor,
    chunks: tl.tensor,
    tensors: tl.tensor,
    addresses: tl.tensor,
    epsilons: tl.tensor,
    scales: tl.tensor,
    flags: tl.tensor,
    histogram: tl.tensor,
    limits: tl.tensor,
    message: tl.tensor,
    decay: tl.tensor,
    share: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Residual times decay plus gradient, product and sum rounded apart; elements that are not finite add nothing.

    Writes the flag of a tensor that has such elements, into its dense lane a ``share`` of its elements, the keys (int32
    [N], only with ``MOMENT`` of 0 or more, the kind of the moments), and counts in ``histogram`` (int32 [rows, 2^BITS])
    the first digits of the keys that are above :func:`uncounted_digits`. ``limits``: int32 [T], of the last window.
    ``GRAD`` is the kind of the gradients. One program for each chunk (int32 [3, count]: tensor, first, end).
    """
    chunk = tl.program_id(0)
    tensor = tl.load(chunks + chunk)
    start, stop = tl.load(chunks + count + chunk), tl.load(chunks + 2 * count + chunk)
    first = tl.load(tensors + EDGES * (number + 1) + tensor)
    grads = tl.load(addresses + GRADS * number + tensor)
    moments = tl.load(addresses + MOMENTS * number + tensor)
    lane = tl.load(addresses + LANES * number + tensor)
    epsilon, unscale = tl.load(epsilons + tensor), tl.load(scales + 1)
    uncounted = tl.where(
        tl.load(tensors + QUOTAS * (number + 1) + tensor) > 0, uncounted_digits(limits, tensor, BITS), 1 << BITS
    )
    histogram = own_histogram(histogram, tensors, tensor, chunk, number, BITS)
    bad = tl.zeros([BLOCK], tl.int32)
    for at in range(start, stop, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        inside = offsets < stop
        g = load_float(grads, offsets - first, inside, GRAD)
        r = tl.load(memory + offsets, mask=inside, other=0.0)
        finite = magnitudes(g) < INFINITE
        x = tl.where(finite, decay * r + g * unscale, r)
        tl.store(memory + offsets, x, mask=inside)
        bad |= tl.where(finite, 0, 1)  # Triton 3.2 cannot interpret "not" of a mask
        if lane != -1:
            # named: old versions of Triton allow no call in a branch in a loop that returns something, but for this
            _held = store_float((message + lane).to(tl.int64), offsets - first, x * share, inside, GRAD)
        compared = x
        if MOMENT >= 0:
            compared = keys_of(x, moments, epsilon, offsets - first, inside, MOMENT)
            tl.store(keys + offsets, magnitudes(compared), mask=inside)
        if BITS > 0:
            # in memory: before Triton 3.8 its histograms count by votes, for several times the instructions
            digits = magnitudes(compared) >> (31 - BITS)
            tl.atomic_add(histogram + digits, 1, mask=digits > uncounted, sem="relaxed")
    flags += tl.load(tensors + FLAGS * (number + 1) + tensor)
    tl.atomic_or(flags, BAD, mask=tl.max(bad, 0) > 0, sem="relaxed")


_COPIES = tl.constexpr(2)  # histograms that are added up together


@triton.jit(do_not_specialize=["number", "count"], do_not_specialize_on_alignment=["keys"])
def count_rest(
    keys: tl.tensor,
    chunks: tl.tensor,
    tensors: tl.tensor,
    histogram: tl.tensor,
    limits: tl.tensor,
    counted: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Counts the first digits that were not counted, where those that were (``counted``, int32 [T]) are fewer than the
    quota: the limit has fallen far. A program for each chunk."""
    chunk = tl.program_id(0)
    tensor = tl.load(chunks + chunk)
    uncounted = uncounted_digits(limits, tensor, BITS)
    if (uncounted > 0) & (tl.load(counted + tensor) < tl.load(tensors + QUOTAS * (number + 1) + tensor)):
        start, stop = tl.load(chunks + count + chunk), tl.load(chunks + 2 * count + chunk)
        histogram += tl.load(tensors + ROWS * (number + 1) + tensor) << BITS
        for at in range(start, stop, BLOCK):
            offsets = at + tl.arange(0, BLOCK)
            digits = (tl.load(keys + offsets, mask=offsets < stop, other=0) & MAGNITUDE) >> (31 - BITS)
            tl.atomic_add(histogram + digits, 1, mask=(digits > 0) & (digits <= uncounted), sem="relaxed")


@triton.jit(do_not_specialize=["number"])
def share(
    histogram: tl.tensor,
    tensors: tl.tensor,
    states: tl.tensor,
    pool: tl.tensor,
    counted: tl.tensor,
    number: tl.tensor,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    POOLED: tl.constexpr,
) -> None:
    """Adds to the pool (int32 [2^BITS]) what a tensor takes if the limit of all has this digit. A program a tensor.

    The first launch adds up the histograms of a tensor, into the first of them, and says how many keys they have.
    """
    tensor = tl.program_id(0)
    BINS: tl.constexpr = 1 << BITS
    quota = tl.load(tensors + QUOTAS * (number + 1) + tensor)
    if quota > 0:
        bins = tl.arange(0, BINS)
        if FIRST:
            row = tl.load(tensors + ROWS * (number + 1) + tensor)
            copies = tl.load(tensors + ROWS * (number + 1) + tensor + 1) - row
            own = tl.zeros([BINS], tl.int32)
            for at in range(0, copies, _COPIES):
                copy = at + tl.arange(0, _COPIES)
                places = histogram + (row + copy)[:, None] * BINS + bins[None, :]
                own += tl.sum(tl.load(places, mask=(copy < copies)[:, None], other=0), 0)
            tl.debug_barrier()
            tl.store(histogram + row * BINS + bins, own)
            tl.store(counted + tensor, tl.sum(own, 0))
        else:
            own = tl.load(histogram + tensor * BINS + bins)
        if POOLED:
            at_least = tl.cumsum(own, 0, reverse=True)
            if not FIRST:
                at_least += tl.load(states + number + tensor)
                if tl.load(states + 2 * number + tensor) != 0:
                    at_least = tl.zeros([BINS], tl.int32)
            tl.atomic_add(pool + bins, tl.maximum(quota, at_least), sem="relaxed")

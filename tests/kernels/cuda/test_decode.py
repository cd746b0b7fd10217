"""The kernels that read messages against the compiled kernels of the CPU, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from lab.gpu.buffers import DECAY, DEVICE, Case, Rank, gather
from lightning_safusion.kernels.cuda.window import WindowKernels
from tests.kernels.cuda.buffers import ORDERS, cases, in_order

EXAMPLES = 5


def sent(case: Case, seed: int, bad: Sequence[int] = (), ranks: Sequence[Rank] = ()) -> list[Rank]:
    """Ranks that have exchanged their messages, which the CPU has written; of the last one some gradients are bad."""
    ranks = ranks or [Rank.of(case, number, seed) for number in range(case.world_size)]
    for rank in ranks:
        accumulated, keys = rank.expected()
        message = rank.message(accumulated, keys, bad if rank is ranks[-1] else ())
        rank.memory.copy_(accumulated)
        rank.kernels.sent.copy_(message)
        rank.kernels.locate(rank.grads, None)
    gather(ranks)
    return list(ranks)


def decoded(rank: Rank) -> tuple[int, Tensor, WindowKernels]:
    """The status, the means, and the window."""
    window = WindowKernels(DEVICE)
    rank.kernels.decode(DECAY, window.status)
    return int(window.status), torch.cat([grad.cpu().float() for grad in rank.grads]), window


def check(rank: Rank, order: int | None = None) -> None:
    """Means, residual and headers are those of the CPU."""
    mean = rank.mean()
    remaining = rank.left(mean)
    with in_order(order):
        status, means, window = decoded(rank)
        window.commit([rank.kernels])
    assert status == 0
    assert same(means, rank.held(mean))
    assert same(rank.memory.cpu(), remaining)
    assert int(window.status) == 0
    good, (headers,) = window.read(window.verdicts.cpu(), [rank.kernels])
    assert good == 0
    assert torch.equal(headers, rank.exchange.headers)


def same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


@settings(max_examples=EXAMPLES)
@given(cases(), st.integers(1, 4), st.integers(0, 1000), ORDERS)
def test_means_and_residuals_are_those_of_the_cpu(case: Case, workers: int, seed: int, order: int | None) -> None:
    ranks = sent(replace(case, world_size=workers), seed)
    check(ranks[seed % workers], order)


@pytest.mark.slow
@pytest.mark.parametrize(("density", "sizes"), [(0.3, (5000, 700, 2000)), (0.02, (40_000,))])
def test_so_they_are_with_several_tiles_in_a_region_and_blocks_of_bits(density: float, sizes: tuple[int, ...]) -> None:
    check(sent(Case(sizes, density), 1)[0])


def test_what_is_sent_of_negative_zeros_leaves_positive_ones() -> None:
    ranks = [Rank.of(Case((300, 40)), number, 3) for number in range(2)]
    for rank in ranks:
        rank.memory.fill_(-0.0)
        for grad in rank.grads:
            grad.fill_(-0.0)
    rank = sent(Case((300, 40)), 3, ranks=ranks)[0]
    remaining = rank.left(rank.mean())
    _, _, window = decoded(rank)
    window.commit([rank.kernels])
    assert same(rank.memory.cpu(), remaining)
    assert 0 < int(rank.memory.signbit().sum()) < 340


def test_one_launch_ends_a_window_of_several_buffers() -> None:
    cases_ = [Case((300, 30)), Case((40,), dense=frozenset({0}), kinds=(1,)), Case((1200,), density=0.01)]
    buffers = [sent(case, 3)[1] for case in cases_]
    window = WindowKernels(DEVICE)
    expected = [rank.left(rank.mean()) for rank in buffers]
    for rank in buffers:
        rank.kernels.decode(DECAY, window.status)
    window.commit([rank.kernels for rank in buffers])
    for rank, remaining in zip(buffers, expected, strict=True):
        assert same(rank.memory.cpu(), remaining)
    good, headers = window.read(window.verdicts.cpu(), [rank.kernels for rank in buffers])
    assert good == 0
    assert [tuple(header.shape) for header in headers] == [(2, 3), (2, 2), (2, 2)]


def test_a_tensor_that_is_not_finite_poisons_itself_alone_and_leaves_its_residual() -> None:
    case = Case((600, 300, 60, 200), kinds=(1, 2, 0, 0), dense=frozenset({2}))
    ranks = [Rank.of(case, number, 8) for number in range(2)]
    before = ranks[1].memory.clone()
    ranks[1].grads[0][[5, 500]] = torch.inf
    ranks[1].grads[2][3] = torch.nan
    ranks[1].grads[3][7] = -torch.inf
    sent(case, 8, [0, 2, 3], ranks)
    accumulated = ranks[1].memory.clone()
    for rank in ranks:
        own = rank.memory.clone()
        status, _, window = decoded(rank)
        assert status & 4
        assert [bool(grad.isfinite().all()) for grad in rank.grads] == [False, True, False, False]
        assert rank.grads[0].isfinite().sum() == 599
        window.commit([rank.kernels])
        if rank is ranks[0]:
            assert torch.equal(rank.memory, own)
    good = slice(600, 900)
    assert torch.equal(ranks[1].memory[good], accumulated[good])
    accumulated[good] = before[good]
    torch.testing.assert_close(
        torch.where(before == accumulated, before, ranks[1].memory), before, rtol=1e-5, atol=1e-6
    )


def test_a_sum_that_overflows_is_not_committed() -> None:
    case = Case((600,), kinds=(0,), dense=frozenset({0}))
    ranks = [Rank.of(case, number, 8) for number in range(2)]
    for rank in ranks:
        rank.memory.fill_(3e38)
        rank.grads[0].fill_(1e38)
        rank.run()
    gather(ranks)
    before = ranks[0].memory.clone()
    status, _, window = decoded(ranks[0])
    assert status & 2
    window.commit([ranks[0].kernels])
    assert torch.equal(ranks[0].memory, before)
    assert int(window.status) == 0
    window.commit([ranks[0].kernels])
    assert int(window.status) == 0  # of the window after that, in the place of the first


def test_headers_are_judged() -> None:
    rank = sent(Case((200, 40)), 2)[0]
    whole, before = rank.kernels.received.clone(), rank.memory.clone()
    # bits of the first and the second tensor, of the rank, and a notice to end, which is no fault
    for place, byte, expected in ((0, 0, 4), (1, 0, 4), (0, 5, 4), (2, 1, 4), (2, 2, 0)):
        rank.kernels.received.copy_(whole)
        rank.kernels.received.view(2, -1)[1, place] = byte
        status, _, window = decoded(rank)
        assert status == expected
        if expected:
            window.commit([rank.kernels])
            assert torch.equal(rank.memory, before)
            assert int(window.verdicts.cpu()[:4].view(torch.int32)) == expected


def fields(rank: Rank) -> Sequence[int]:
    return rank.kernels.tables.message.fields


@cache
def exchanged(density: float) -> tuple[Rank, Tensor]:
    """One rank, and what it has received."""
    rank = sent(Case((700, 1100), density=density), 5)[0]
    return rank, rank.kernels.received.clone()


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.integers(0, 2**32 - 1), st.sampled_from([0.1, 0.01]))
def test_damaged_messages_do_no_harm(place: int, word: int, density: float) -> None:
    rank, whole = exchanged(density)
    guard = rank.memory.clone()
    words = rank.kernels.received.copy_(whole).view(torch.int32).view(2, -1)
    first = fields(rank)[0]
    words[1, first + place % (words.shape[1] - first)] = int(np.uint32(word).view(np.int32))
    decoded(rank)
    assert torch.equal(rank.memory, guard)


def test_damage_is_noticed() -> None:
    rank, whole = exchanged(0.1)
    ranks, high, low = 0, 1, 2

    def status_with(field: int, half: int, change: int) -> int:
        halves = rank.kernels.received.copy_(whole).view(torch.int16).view(2, -1)
        halves[1, 2 * fields(rank)[field] + half] ^= change
        return decoded(rank)[0]

    assert status_with(ranks, 0, 1) & 1  # entries before the first region
    assert status_with(ranks, 1, 1 << 12) & 1  # more entries than there is room for
    assert status_with(ranks, 1, 1) & 1  # another number of entries than there are bits
    assert status_with(ranks, 2, -(2**15)) & 1
    assert status_with(high, 0, 1 << 3) & 1  # a bit more or less
    assert status_with(low, 0, 0) == 0


def test_an_entry_behind_its_region_is_noticed() -> None:
    rank = sent(Case((20_000,), density=0.02, world_size=1), 5)[0]
    tables = rank.kernels.tables
    high, end = fields(rank)[1], tables.room + int(tables.message.runs.buckets[-1]) - 1
    words = rank.kernels.received.view(torch.int32)[high:]
    last = max(place for place in range(end) if int(words[place // 32]) >> place % 32 & 1)
    for place in (last, end):  # its bit changes places with the end of the last bucket
        words[place // 32] ^= int(np.uint32(1 << place % 32).view(np.int32))
    assert decoded(rank)[0] & 1


def test_a_position_that_comes_twice_is_noticed() -> None:
    """One of two values would be added, on each device another."""
    rank = sent(Case((9000,), density=0.03, world_size=1), 5)[0]
    tables = rank.kernels.tables
    _, high, low = fields(rank)[:3]
    words, low_bits = rank.kernels.received.view(torch.int32), tables.message.low_bits
    marked = [place for place in range(32 * (low - high)) if int(words[high + place // 32]) >> place % 32 & 1]
    entry = next(e for e in range(1, len(marked)) if marked[e] == marked[e - 1] + 1)
    bits = rank.kernels.received[4 * low :]
    for bit in range(entry * low_bits, (entry + 1) * low_bits):
        before = int(bits[(bit - low_bits) >> 3]) >> ((bit - low_bits) & 7) & 1
        bits[bit >> 3] = int(bits[bit >> 3]) & ~(1 << (bit & 7)) | before << (bit & 7)
    assert decoded(rank)[0] & 1

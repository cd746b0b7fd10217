"""Lists of candidates, which the later passes of a selection visit: chunks with too many beside chunks with few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from lab.gpu.buffers import Case, Rank
from lightning_safusion.kernels.cuda import tables as tables_module
from tests.kernels.cuda.buffers import ORDERS, check, in_order

# Chunks have 2,048 elements: seven, none, one and seven of them.
SIZES = (14_000, 0, 1, 13_100)


def overflown(rank: Rank) -> list[bool]:
    """By chunk of a tensor from which something is selected: whether it has more candidates than slots."""
    packer, tables = rank.kernels.packer, rank.kernels.tables
    slots = np.diff(tables.lists) // np.maximum(np.diff(tables.spans), 1)
    counts = packer._counts.view(3, -1)[2].tolist()
    live = tables.limited > 0
    return [
        length > slots[tensor] for tensor, length in zip(tables.chunks[0].tolist(), counts, strict=True) if live[tensor]
    ]


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "as drawn": lambda memory: memory,
    "cluster": lambda memory: memory[2048:4096].mul_(50),  # nearly all that is large is in the second chunk
    "equal": lambda memory: memory.fill_(-0.25),
    "zero": lambda memory: memory.zero_(),
    # fewer elements than the quota are not zero
    "few": lambda memory: memory.masked_fill_(torch.arange(len(memory), device=memory.device) % 997 != 3, 0.0),
    "not finite": lambda memory: memory.index_copy_(
        0, torch.tensor([5, 2100, 9000], device=memory.device), memory.new_tensor([torch.nan, torch.inf, -torch.nan])
    ),
}


def made(case: Case, seed: int, change: str, moments: list[int] | None = None) -> Rank:
    """A rank whose gradients add nothing to a residual that is changed."""
    rank = Rank.of(case, 0, seed, moments)
    for grad in rank.grads:
        grad.zero_()
    CHANGES[change](rank.memory)
    return rank


@pytest.mark.parametrize("pooled", [False, True])
def test_a_tensor_with_listed_chunks_and_one_that_has_too_few_slots(pooled: bool) -> None:
    rank = made(Case(SIZES, 0.02, pooled), 3, "cluster")
    assert rank.kernels.tables.digits == (11, 10, 10)
    check(rank)
    assert overflown(rank)[:7] == [False, True, *[False] * 5]


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.sampled_from(sorted(CHANGES)),
    st.sampled_from([0.02, 0.1, 0.24]),
    st.booleans(),
    st.sampled_from([None, [0] * 4, [1] * 4]),
    st.integers(1, 4),
    ORDERS,
)
def test_messages_are_those_of_the_cpu(
    change: str, density: float, pooled: bool, moments: list[int] | None, sharing: int, order: int | None
) -> None:
    """Whatever the keys are, with several histograms of a tensor, and programs in any order."""
    with pytest.MonkeyPatch.context() as patched, in_order(order):
        patched.setattr(tables_module, "SHARING", sharing)
        # a scale that is not a number has other bits on the CPU
        wire = "fp32" if change == "not finite" else "q4"
        rank = made(Case(SIZES, density, pooled, wire=wire), 5, change, moments)
        assert int(rank.kernels.tables.rows[-1]) >= 2 + 2 * -(-7 // sharing)
        check(rank)


def test_slots_follow_the_quotas_of_tensors() -> None:
    tables = Rank.of(Case(SIZES, 0.02), 0, 1).kernels.tables
    other = replace(tables, quotas=tables.quotas * np.array([5, 1, 1, 0]))
    few, many = np.diff(tables.lists), np.diff(other.lists)
    assert many[0] > 2 * few[0] > 0
    assert few[1] == many[1] == many[3] == 0 < few[3]
    assert few.sum() < 0.06 * tables.numel  # 8 bytes each


def test_short_digits_list_nothing() -> None:
    rank = Rank.of(Case((300,) * 5), 0, 1)
    assert rank.kernels.tables.digits == (8, 8, 8, 7)
    assert not rank.kernels.tables.lists.any()
    check(rank)
    assert all(overflown(rank))


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "moments"), [((9000,), [0]), ((300, 40, 600), None)])
@settings(max_examples=6)
@given(st.lists(st.sampled_from([0.0, 1e-3, 0.5, 0.95, 3.0, 1e4]), min_size=2, max_size=3), st.integers(0, 99))
def test_limits_of_the_last_window_change_no_message(
    sizes: tuple[int, ...], moments: list[int] | None, factors: list[float], seed: int
) -> None:
    """However far limits fall or rise from one window to the next: those that counted too few keys count the others."""
    rank = made(Case(sizes, 0.02), seed, "as drawn", moments)
    for factor in [1.0, *factors]:
        rank.memory.mul_(factor)
        _, keys = rank.expected()
        check(rank)
        limits = np.sort(np.abs(keys[: sizes[0]].cpu().numpy()))[::-1][rank.case.segments.quotas[0] - 1]
        assert rank.kernels.packer.limits.view(torch.float32)[0] == limits


def test_first_digits_are_counted_near_the_limit_of_the_last_window_only() -> None:
    rank = made(Case((9000,), 0.02), 4, "as drawn")
    counted = []
    for factor in (1.0, 1.0, 0.01):
        rank.memory.mul_(factor)
        check(rank)
        counted.append(int(rank.kernels.packer._counted))
    first, near, fallen = counted
    assert first > 8900
    assert 0.02 * 9000 <= near < 0.1 * 9000
    assert fallen == 0  # the others were counted when that was seen

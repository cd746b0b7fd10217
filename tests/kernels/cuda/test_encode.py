"""The kernels that write a message against the compiled kernels of the CPU, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from lab.gpu.buffers import DECAY, DEVICE, Case, Rank
from lightning_safusion.kernels.cuda import buffer, window
from lightning_safusion.kernels.cuda import tables as tables_module
from lightning_safusion.kernels.cuda.buffer import BufferKernels
from lightning_safusion.kernels.cuda.window import WindowKernels
from tests.kernels.cuda.buffers import ORDERS, cases, check, in_order

EXAMPLES = 5  # a fifth of a second each in the interpreter


@settings(max_examples=EXAMPLES)
@given(cases(), st.integers(0, 1000), ORDERS)
def test_messages_are_those_of_the_cpu(case: Case, seed: int, order: int | None) -> None:
    with in_order(order):
        check(Rank.of(case, 0, seed), notices=seed % 3 * 2)


@settings(max_examples=EXAMPLES)
@given(cases(), st.integers(0, 1000), st.data())
def test_elements_are_compared_by_how_far_the_optimizer_would_move_them(
    case: Case, seed: int, data: st.DataObject
) -> None:
    kinds = st.sampled_from([0] if case.pooled else [0, 1, 2, -1])
    moments = data.draw(st.lists(kinds, min_size=len(case.sizes), max_size=len(case.sizes)))
    with in_order(data.draw(ORDERS)):
        check(Rank.of(case, 0, seed, moments))


def test_large_numbers_whose_scale_is_not_finite_have_no_level() -> None:
    check(Rank.of(Case((400, 900), values="huge"), 0, 3))
    rank = Rank.of(Case((400, 900)), 0, 3)
    rank.memory[[3, 500, 501]] = torch.tensor([torch.inf, 3.4e38, -torch.inf], device=rank.memory.device)
    check(rank)


def test_a_gradient_that_is_not_finite_is_flagged_and_its_finite_elements_are_added() -> None:
    rank = Rank.of(Case((1100, 300, 5, 50), dense=frozenset({1}), kinds=(0, 1, 2, 2)), 0, 2)
    rank.grads[0][[1050, 4]] = torch.inf
    rank.grads[1][7] = torch.nan
    rank.grads[3][8] = -torch.inf
    check(rank, bad=[0, 1, 3])


@pytest.mark.parametrize("pooled", [False, True])
def test_several_chunks_and_blocks_and_ties_that_end_in_the_first(
    monkeypatch: pytest.MonkeyPatch, pooled: bool
) -> None:
    monkeypatch.setattr(tables_module, "CHUNKS", 2)
    rank = Rank.of(Case((9000, 4100), density=0.02, pooled=pooled, values="zeros" if pooled else "ties"), 0, 7)
    assert rank.kernels.tables.chunks.shape[1] < 13_100 // 2048
    assert rank.kernels.tables.digits == (11, 10, 10)
    with in_order(1):
        check(rank)


def test_a_quota_of_zero_leaves_a_tensor_out() -> None:
    rank = Rank.of(Case((600, 600, 50)), 0, 4)
    own = rank.kernels
    tables = replace(own.tables, quotas=own.tables.quotas * np.array([1, 0, 1]))
    rank.kernels = BufferKernels(tables, rank.memory, own.sent, own.received, own.packer.workspace)
    positions, _ = rank.exchange.codec.decode(rank.run().cpu()[rank.exchange._selection])
    assert len(positions) == 65
    assert not ((positions >= 600) & (positions < 1200)).any()


def test_optimizers_that_take_turns_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their windows are those of kernels that are told everything each time."""
    told: list[object] = []
    upload, masks = buffer.device_constant, (np.array([1, 0, 1], np.uint8), np.array([0, 1, 0], np.uint8))
    uploads, results = [], []
    for turns in (2, 1):
        for module in (buffer, window):
            monkeypatch.setattr(module, "device_constant", lambda *given: (told.append(given), upload(*given))[1])
            monkeypatch.setattr(module, "TURNS", turns)
        rank, windows = Rank.of(Case((200, 40, 60), dense=frozenset({1})), 0, 4), WindowKernels(DEVICE)
        kernels, grads = rank.kernels, [grad.clone() for grad in rank.grads]
        for flags in (*masks, *masks):
            told.clear()
            torch._foreach_copy_(rank.grads, grads)
            kernels.locate(rank.grads, None, flags)
            kernels.select(DECAY, None)
            kernels.pack(0)
            kernels.received.copy_(kernels.sent.repeat(2))
            kernels.leave(np.flatnonzero(flags == 0).tolist())
            kernels.decode(DECAY, windows.status)
            windows.commit([kernels])
            uploads.append(len(told))
            results.append(torch.cat([*rank.grads, rank.memory, kernels.sent]))
    assert uploads[2:4] == [0, 0]
    assert min(uploads[4:]) > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results[:4], results[4:], strict=True))


def test_keys_without_an_epsilon_are_counted_behind_no_end() -> None:
    check(replace(Rank.of(Case((700, 90, 1100)), 0, 5, [0, 1, 2]), epsilon=0.0))

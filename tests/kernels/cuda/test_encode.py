"""The kernels that write a message against the compiled kernels of the CPU, byte for byte.

Covers: the accumulated residual and the keys bit for bit; gradients of three widths; moments of three widths, and
    tensors without; proportional and pooled quotas; dense lanes; ties, zeros, subnormal and huge numbers, NaN; tensors
    of one element, sizes around words, blocks, parts, regions and tiles; a quota of 0; short digits; several chunks;
    programs in any order; what the device is told.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from lightning_safusion.kernels.cuda import tables as tables_module
from lightning_safusion.kernels.cuda.workspace import Weighing
from lightning_safusion.sparsify.selection.units import Moment, SpanUnits
from tests.kernels.cuda.buffers import DECAY, DEVICE, ORDERS, Case, Rank, WindowKernels, cases, in_order, oracle

EXAMPLES = 5  # a fifth of a second each in the interpreter


def check(rank: Rank, notices: int = 0) -> None:
    """The kernels write what the CPU writes."""
    accumulated, keys = rank.expected()
    expected = rank.message(accumulated, keys, notices=notices).clone()
    written = rank.run(notices).cpu()
    assert torch.equal(rank.memory.cpu().view(torch.int32), accumulated.view(torch.int32))
    assert np.flatnonzero(written.numpy() != expected.numpy()).tolist() == []


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


@pytest.mark.parametrize("pooled", [False, True])
def test_the_selection_is_the_exact_one(pooled: bool) -> None:
    case = Case((700, 3, 1, 400, 90), pooled=pooled, dense=frozenset({1}), values="ties")
    rank = Rank.of(case, 0, 5)
    _, keys = rank.expected()
    rank.run()
    codec, segments = rank.exchange.codec, case.segments
    assert codec is not None
    assert segments is not None
    positions, _ = codec.decode(rank.kernels.sent.cpu()[rank.exchange._selection])
    assert positions.tolist() == oracle(keys.numpy(), segments).tolist()


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
    accumulated, keys = rank.expected()
    expected = rank.message(accumulated, keys, bad=[0, 1, 3]).clone()
    assert torch.equal(rank.run().cpu(), expected)
    assert torch.equal(rank.memory.cpu(), accumulated)


@pytest.mark.parametrize("pooled", [False, True])
def test_several_chunks_and_blocks_and_ties_that_end_in_the_first(
    monkeypatch: pytest.MonkeyPatch, pooled: bool
) -> None:
    monkeypatch.setattr(tables_module, "CHUNKS", 2)
    rank = Rank.of(Case((9000, 4100), density=0.02, pooled=pooled, values="zeros" if pooled else "ties"), 0, 7)
    assert rank.kernels.tables.chunks.shape[1] < 13_100 // 2048
    check(rank)


def test_short_tensors_have_short_digits_and_long_ones_wide_digits() -> None:
    short, long = Rank.of(Case((300,) * 5), 0, 1), Rank.of(Case((7000,), density=0.05), 0, 1)
    assert short.kernels.tables.digits == (8, 8, 8, 7)
    assert long.kernels.tables.digits == (11, 10, 10)
    check(short)
    check(long)
    check(Rank.of(Case((7000,), density=0.05, pooled=True, values="ties"), 0, 1))


def test_a_quota_of_zero_leaves_a_tensor_out() -> None:
    case = Case((600, 600, 50))
    rank = Rank.of(case, 0, 4)
    tables, segments = rank.kernels.tables, case.segments
    assert segments is not None
    tables.quotas.setflags(write=True)
    tables.quotas[1] = 0
    other = type(tables)(tables.edges, tables.quotas, 0, tables.kinds, tables.lanes, tables.message)
    rank.kernels = type(rank.kernels)(
        other, rank.memory, rank.kernels.sent, rank.kernels.received, 0, rank.kernels.packer.workspace
    )
    rank.run()
    codec = rank.exchange.codec
    assert codec is not None
    positions, _ = codec.decode(rank.kernels.sent.cpu()[rank.exchange._selection])
    accumulated, _ = rank.expected()
    assert len(positions) == 65
    assert not ((positions >= 600) & (positions < 1200)).any()


def test_the_same_addresses_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_safusion.kernels.cuda import buffer

    rank = Rank.of(Case((600, 60)), 0, 4)
    rank.kernels.locate(rank.grads, None)
    told: list[object] = []
    monkeypatch.setattr(buffer, "device_constant", lambda array, device: told.append(array))
    rank.kernels.locate(rank.grads, None)
    assert not told
    rank.kernels.locate([grad.clone() for grad in rank.grads], None)
    assert len(told) == 2


def test_optimizers_that_take_turns_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their windows are those of kernels that are told everything each time."""
    from lightning_safusion.kernels.cuda import buffer

    told: list[object] = []
    upload, masks = buffer.device_constant, (np.array([1, 0, 1], np.uint8), np.array([0, 1, 0], np.uint8))
    monkeypatch.setattr(buffer, "device_constant", lambda *given: (told.append(given), upload(*given))[1])
    uploads, results = [], []
    for turns in (2, 1):
        monkeypatch.setattr(buffer, "_TURNS", turns)
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


def test_programs_in_any_order_write_the_same_bytes() -> None:
    written = []
    for order in (None, 1):
        with in_order(order):
            written.append(Rank.of(Case((4500, 40, 900), pooled=True, values="ties"), 0, 9).run().clone())
    assert torch.equal(written[0], written[1])


def test_memory_that_was_freed_is_taken_anew() -> None:
    rank = Rank.of(Case((500, 40)), 0, 9)
    workspace = rank.kernels.packer.workspace
    before = rank.memory.clone()
    written = rank.run().clone()
    workspace.release()
    rank.memory.copy_(before)
    assert torch.equal(rank.run(), written)


def test_keys_without_an_epsilon_are_counted_behind_no_end() -> None:
    rank = Rank.of(Case((700, 90, 1100)), 0, 5, [0, 1, 2])
    own = rank.moments or []
    rank.kernels.sent.fill_(0)
    weighing = Weighing(own, [0.0] * 3, torch.empty_like(rank.memory).view(torch.int32))
    accumulated = rank.expected()[0]
    moments = [Moment(moment.cpu().float(), 0.0) for moment in own if moment is not None]
    keys = SpanUnits(moments, rank.case.edges.tolist(), torch.empty_like(accumulated)).weigh(accumulated)
    expected = rank.message(accumulated, keys).clone()
    rank.kernels.locate(rank.grads, weighing)
    rank.kernels.select(DECAY, weighing)
    rank.kernels.pack(0)
    assert np.flatnonzero(rank.kernels.sent.cpu().numpy() != expected.numpy()).tolist() == []

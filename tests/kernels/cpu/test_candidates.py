"""Lists of elements that compiled kernels have found: counted, narrowed, replaced, and cut to quotas and to a room."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import span_segments
from lightning_safusion.sparsify.selection.native import NativeView
from lightning_safusion.sparsify.selection.select import segmented_view
from lightning_safusion.sparsify.selection.survey import Foresight, History, SpanSurvey
from lightning_safusion.sparsify.selection.view import NumpyView
from tests.sparsify.oracle import needs_kernels

pytestmark = needs_kernels
MAGNITUDE = 0x7FFFFFFF


@pytest.mark.parametrize("spread", [1, 3, 1000])
@pytest.mark.parametrize("above", [-1.0, 0.0, 0.3, 0.9])
def test_lists_are_cut_to_their_largest_and_of_equals_the_first(spread: int, above: float) -> None:
    rng = np.random.default_rng(spread)
    counts, quotas = np.array([0, 1, 7, 5000, 300, 40, 3]), np.array([3, 1, 7, 400, 299, 0, 1])
    places = np.arange(counts.sum(), dtype=np.int32) * 3
    x = rng.integers(-spread, spread + 1, counts.sum()).astype(np.float32) / 3
    limit = np.float32(above * spread / 3)
    floors = np.full(len(counts), -1 if above < 0 else limit.view(np.int32), np.int32)
    kept, bits = native.Lists(places.copy(), x.view(np.int32).copy(), counts).largest(floors, quotas)
    expected, stop = [], 0
    for count, quota in zip(counts, quotas, strict=True):
        mine = np.abs(x[stop : stop + count])
        order = np.argsort(-mine, kind="stable")[: min(quota, (mine > limit).sum())]
        expected += (np.sort(order) + stop).tolist()
        stop += count
    assert kept.tolist() == places[expected].tolist()
    assert np.array_equal(bits, x.view(np.int32)[expected])


def test_what_is_above_other_floors_is_counted_and_kept() -> None:
    counts, floors = np.array([0, 5, 3000, 1]), np.array([3, 0, 2, 9], np.int32)
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 5, counts.sum()).astype(np.int32) | rng.integers(0, 2, counts.sum()).astype(np.int32) << 31
    places = np.arange(len(bits), dtype=np.int32) + 7
    mask = (bits & MAGNITUDE) > floors.repeat(counts)
    kept, signed, numbers = native.Lists(places.copy(), bits.copy(), counts).above(floors)
    assert kept.tolist() == places[mask].tolist()
    assert signed.tolist() == bits[mask].tolist()
    expected = [int(part.sum()) for part in np.split(mask, counts.cumsum()[:-1])]
    assert numbers.tolist() == expected
    known, told = np.array([1, 0, 1, 9], np.int32), np.array([11, 12, 13, 14])
    numbers = native.Lists(places, bits, counts).number_above(floors, known, told)
    assert numbers.tolist() == [expected[0], 12, expected[2], 14]


@pytest.mark.parametrize("spread", [1, 7, 100_000])
def test_the_kth_largest_of_runs(spread: int) -> None:
    rng = np.random.default_rng(spread)
    sizes = np.array([1, 2, 511, 512, 513, 5000, 16_384])
    starts = np.append(3, 3 + sizes.cumsum()[:-1])
    bits = rng.integers(-spread, spread + 1, 3 + sizes.sum()).astype(np.float32).view(np.int32)
    for share in (0.0, 0.01, 0.5, 1.0):
        ranks = np.maximum((share * sizes).astype(np.int64), 1)
        expected = [
            np.sort(bits[start : start + size] & MAGNITUDE)[size - rank]
            for start, size, rank in zip(starts, sizes, ranks, strict=True)
        ]
        assert native.kth_largest(bits, starts, sizes, ranks).tolist() == expected
        low = native.kth_largest(bits, starts, sizes, ranks, exact=False)
        assert (low <= expected).all()
        for start, size, rank, floor in zip(starts, sizes, ranks, low, strict=True):
            found = int(((bits[start : start + size] & MAGNITUDE) >= floor).sum())
            assert found >= rank
            assert spread < 100 or found <= 1.5 * rank + 12


def test_quotas_may_take_the_places_of_larger_elements() -> None:
    bits = np.array([9, 8, 5, 5, 5], np.float32).view(np.int32)
    lists = native.Lists(np.arange(5, dtype=np.int32), bits, np.array([2, 1, 2]))
    assert lists.share(np.array([0, 1, 1]), 3)[1].sum() > 3  # the caller sees that, and selects in two passes
    assert lists.share(np.array([0, 0, 1]), 4)[1].tolist() == [2, 1, 1]


def test_some_lists_are_replaced_by_longer_ones() -> None:
    def lists(counts: list[int], first: int) -> native.Lists:
        places = np.arange(first, first + sum(counts), dtype=np.int32)
        return native.Lists(places, -places, np.array(counts))

    marked = np.array([False, True, False, True])
    replaced = lists([2, 1, 3, 0], 10).replaced(marked, lists([3, 1], 90))
    assert replaced.counts.tolist() == [2, 3, 3, 1]
    assert replaced.places.tolist() == [10, 11, 90, 91, 92, 13, 14, 15, 93]
    assert replaced.bits.tolist() == (-replaced.places).tolist()
    with pytest.raises(ValueError, match="no shorter"):
        lists([2, 1, 3, 1], 10).replaced(marked, lists([3, 0], 90))


def test_spans_that_positions_of_32_bits_cannot_address_are_left_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    x, segments = torch.randn(100), span_segments(100, 3)
    history = History(segments)
    assert type(segmented_view(x, segments, SpanSurvey(x, history))) is NativeView
    assert Foresight(history, [0, 100]).wanted() is not None
    monkeypatch.setattr(native, "MOST_ELEMENTS", 100)
    assert Foresight(history, [0, 100]).wanted() is None
    assert type(segmented_view(x, segments)) is NumpyView

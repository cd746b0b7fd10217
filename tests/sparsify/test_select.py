"""Backends of selection on special inputs, and against each other; `test_selection_properties.py` has the others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify import Threshold, TopK
from lightning_safusion.sparsify.base import Selection, span_segments
from lightning_safusion.sparsify.selection.native import NativeView
from lightning_safusion.sparsify.selection.select import SegmentedView, segmented_view
from lightning_safusion.sparsify.selection.survey import History, SpanSurvey, common_floor
from lightning_safusion.sparsify.selection.torch_view import TorchView
from lightning_safusion.sparsify.selection.view import NumpyView
from tests.cuda import Launches
from tests.sparsify.oracle import BACKENDS, best, check, cut, exact_pooled, exact_take, exact_top, needs_kernels


def test_kth_largest_of_rank_zero_is_infinite_and_beats_the_quota() -> None:
    x, segments = torch.randn(60_000), cut([20_000, 40_000], [100, 100])
    for backend in (NumpyView, TorchView):
        kth = backend(x, segments).kth_largest(np.array([0, 30_000]))
        assert kth[0] == math.inf
        assert kth[1] == x[20_000:].abs().sort(descending=True).values[29_999]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("quota", [1, 400, 30_000])
def test_samples_that_are_not_like_the_rest_change_no_result(backend: type[SegmentedView], quota: int) -> None:
    """Every sampled position is large, so that the sampled floor is far too high."""
    x = torch.where(torch.arange(40_000) % 17 == 0, 100.0, 1.0) * torch.arange(1, 40_001) / 40_000
    view = backend(x, span_segments(40_000, quota))
    check(view.top(), x, best(x, 0, 40_000, quota))
    check(view.take(torch.tensor([1.0])), x, exact_take(x, view.segments, [1.0]))


def test_accelerator_selections_have_a_fixed_shape() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    selection = TorchView(x, cut([400, 600], [40, 60])).take(torch.tensor([2.0, 3.0]))
    assert len(selection.indices) == len(selection.values) == 100
    assert isinstance(selection.count, Tensor)
    assert 2 < int(selection.count) < 100


def test_wrong_input_is_refused_by_name() -> None:
    segments = span_segments(10, 2)
    with pytest.raises(TypeError, match="float64"):
        segmented_view(torch.zeros(10, dtype=torch.float64), segments)
    with pytest.raises(TypeError, match=r"strides \(2,\)"):
        segmented_view(torch.zeros(20)[::2], segments)
    with pytest.raises(ValueError, match="segments of 10 elements do not fit a span of 11"):
        segmented_view(torch.zeros(11), segments)


@needs_kernels
def test_an_element_that_was_not_found_is_never_smaller_than_one_that_was_pooled() -> None:
    """A floor of its own that lets many through must not make up for a common one that lets too few."""
    x = torch.cat([torch.linspace(0.1, 2, 1000), torch.linspace(0, 0.9, 40_000)])
    segments = cut([1000, 40_000], [5, 10], pool=1195)
    history = History(segments)
    # 1000 and some 200 elements, 1210 are wanted
    history.floors = np.array([0.0, 0.895, 0.895], np.float32).view(np.int32)
    once = segmented_view(x, segments, SpanSurvey(x, history)).top_pooled()
    assert once is not None
    check(once, x, exact_pooled(x, segments))


@needs_kernels
def test_of_equals_that_were_not_all_found_the_first_are_pooled() -> None:
    """The floor of the first segment is what the last elements of the pool have: those there are not above it."""
    x = torch.tensor([2.0, 0.5, 0.1]).repeat_interleave(torch.tensor([100, 1000, 38_900]))
    x = torch.cat([x, torch.tensor([2.0, 0.5, 0.1]).repeat_interleave(torch.tensor([50, 500, 450]))])
    segments = cut([40_000, 1000], [5, 10], pool=385)
    history = History(segments)
    history.floors = np.array([0.5, 0.3, 0.5], np.float32).view(np.int32)
    check(TopK().select(x, segments, 0, SpanSurvey(x, history)), x, exact_pooled(x, segments))


@needs_kernels
def test_pooled_quotas_look_deeper_where_samples_tell_too_little() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0.5, 1, 12_000).astype(np.float32)
    sampled = np.arange(0, 12_000, 11)
    x[sampled] = 0.1
    x[sampled[:300]] = 10
    segments = cut([6_006, 5_994], [5, 10], pool=1985)
    floor = common_floor([x[:6_006].view(np.int32), x[6_006:].view(np.int32)], segments.capacity)
    assert (x.view(np.int32) > floor).sum() < segments.capacity
    span = torch.from_numpy(x)
    once = NativeView(span, segments).top_pooled()
    assert once is not None
    check(once, span, exact_pooled(span, segments))


@needs_kernels
@pytest.mark.parametrize(("pool", "seed"), [(0, 0), (700, 1)])
def test_floors_of_the_last_selection_change_no_result(pool: int, seed: int) -> None:
    """Gradients that shrink and grow, vanish, become NaN, all alike, or move to another tensor."""
    rng = np.random.default_rng(seed)
    sizes = [40_000, 3, 0, 700, 17_000, 700, 90_000]
    segments = cut(sizes, [400, 1, 0, 7, 0, 20, 900], pool)
    learned = [(sparsifier, History(segments)) for sparsifier in (TopK(), Threshold(1.0))]
    x = np.zeros(sum(sizes), np.float32)
    for scale in [1, 1, 1.1, 3, 1e-3, 0, 1, 1e30, 1e-30, "ties", "nan", 1, "shift", "sparse", 1, 1]:
        noise = rng.standard_t(3, len(x)).astype(np.float32)
        if scale == "ties":
            x = np.round(noise)
        elif scale == "nan":
            x[rng.integers(len(x), size=30)] = np.nan
        elif scale == "shift":
            x = noise * np.repeat(rng.random(len(sizes)).astype(np.float32), sizes)
        elif scale == "sparse":
            x = np.where(rng.random(len(x)) < 0.003, noise, 0).astype(np.float32)
        else:
            x = (0.3 * np.nan_to_num(x) + noise) * np.float32(scale)
        span = torch.from_numpy(x)
        for sparsifier, history in learned:
            with native.unused():
                expected = sparsifier.select(span, segments, 0)
            check(sparsifier.select(span, segments, 0, SpanSurvey(span, history)), span, expected.indices.tolist())
    assert learned[0][1].used


@needs_kernels
def test_counts_beyond_enough_need_no_other_look(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    view = NativeView(x, span_segments(100_000, 1000))
    assert int(view.count_above(torch.tensor([2.0]))) == int((x.abs() > 2).sum())
    monkeypatch.setattr(NativeView, "_read", None)  # which would be called
    assert int(view.count_above(torch.tensor([1.0]), enough=torch.tensor([1333.0]))) > 1333
    assert int(view.count_above(torch.tensor([2.5]), enough=torch.tensor([1333.0]))) == int((x.abs() > 2.5).sum())


def test_a_merge_adds_nothing_up() -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(1))
    view, numbers = TorchView(x, cut([300, 200], [3, 2], 10)), Launches()
    indices = torch.zeros(400, dtype=torch.int64)  # padding, all of it one place
    indices[:6] = torch.tensor([1, 7, 30, 310, 350, 400])
    others = Selection(indices, x[indices], torch.tensor(6))
    with numbers:
        merged = view.merge(view.top(), others, 10)
    # where algorithms are deterministic, additions to one place are made one after the other
    assert not any("index_add" in name or "scatter_add" in name or "index_put" in name for name in numbers.names)
    expected = sorted({*view.top().indices.tolist(), 1, 7, 30, 310, 350, 400})
    assert merged.indices[: int(merged.count)].tolist() == expected


def test_merge_is_the_same_on_both_backends() -> None:
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(4)).bfloat16().float()  # ties everywhere
    segments = cut([10_000, 40_000], [5, 5])
    for room in (0, 10, 300, 5000):
        others = TorchView(x, span_segments(50_000, 1000)).top()
        a, b = (view(x, segments) for view in (NumpyView, TorchView))
        merged = [view.merge(view.top(), others, room) for view in (a, b)]
        check(merged[1], x, merged[0].indices.tolist())
        assert len(merged[0].indices) <= 10 + room == len(merged[1].indices)


def test_a_threshold_fills_a_pool_beside_the_largest_of_every_segment() -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(5))
    both = Threshold(1.0).select(x, cut([1000, 4000], [3, 3], pool=44), 0)
    assert both.count == 50
    assert set(exact_top(x, cut([1000, 4000], [3, 3]))) <= set(both.indices.tolist())
    assert Threshold(1.0).select(x, cut([5000], [0], pool=7), 0).count == 0

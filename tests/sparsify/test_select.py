"""Both selection backends against a brute-force definition, and against each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify import TopK
from lightning_safusion.sparsify.base import Segments, Selection, span_segments
from lightning_safusion.sparsify.selection.native import NativeView
from lightning_safusion.sparsify.selection.reference import NumpyView
from lightning_safusion.sparsify.selection.select import SegmentedView, ThresholdSparsifier, pooled, segmented_view
from lightning_safusion.sparsify.selection.survey import History, SpanSurvey, common_floor
from lightning_safusion.sparsify.selection.torch_view import TorchView

needs_kernels = pytest.mark.skipif(not native.usable(), reason="the package was installed without a C compiler")
BACKENDS = [
    pytest.param(NumpyView, id="numpy"),
    pytest.param(NativeView, id="native", marks=needs_kernels),
    pytest.param(TorchView, id="torch"),
]


def cut(sizes: Sequence[int], quotas: Sequence[int], pool: int = 0) -> Segments:
    edges = np.cumsum([0, *sizes], dtype=np.int64)
    return Segments(edges, np.array(quotas, np.int64), tuple(range(len(sizes))), tuple((s,) for s in sizes), pool)


def bits_of(x: Tensor) -> np.ndarray:
    return x.numpy().view(np.int32) & 0x7FFFFFFF


def best(x: Tensor, start: int, stop: int, k: int) -> list[int]:
    """The k largest of a piece, first ones among equals, ascending."""
    bits = bits_of(x)[start:stop].astype(np.int64)
    return sorted((np.argsort(-bits, kind="stable")[:k] + start).tolist())


def exact_top(x: Tensor, segments: Segments) -> list[int]:
    pieces = zip(segments.edges[:-1].tolist(), segments.edges[1:].tolist(), segments.quotas.tolist(), strict=True)
    return [index for start, stop, quota in pieces for index in best(x, start, stop, quota)]


def exact_take(x: Tensor, segments: Segments, thresholds: Sequence[float], inclusive: bool = False) -> list[int]:
    result = []
    for s, (quota, threshold) in enumerate(zip(segments.quotas.tolist(), thresholds, strict=True)):
        start, stop = int(segments.edges[s]), int(segments.edges[s + 1])
        magnitude = x[start:stop].abs()
        found = int((magnitude >= threshold).sum() if inclusive else (magnitude > threshold).sum())
        result += best(x, start, stop, min(max(found, 1), quota, stop - start))
    return result


def check(selection: Selection, x: Tensor, expected: Sequence[int]) -> None:
    assert int(selection.count) == len(expected)
    assert (selection.values[len(expected) :] == 0).all()  # padding
    assert ((selection.indices >= 0) & (selection.indices < len(x))).all()
    assert selection.indices[: len(expected)].tolist() == list(expected)
    chosen = x[selection.indices[: len(expected)]]
    assert torch.equal(selection.values[: len(expected)].view(torch.int32), chosen.view(torch.int32))


def random_case(seed: int) -> tuple[Tensor, Segments]:
    """Segments of all sizes (empty, single, beyond a block), quotas from 0 to all, values with ties and zeros."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 1, 2, 7, 300, 5000, 17_000, 70_000, 140_000], size=rng.integers(1, 9))
    quotas = [int(rng.choice([0, min(1, s), s // 100, s // 3, s])) for s in sizes]
    x = torch.from_numpy(rng.standard_normal(int(sizes.sum())).astype(np.float32))
    kind = seed % 5
    if kind == 1:
        x = x.bfloat16().float()
    elif kind == 2:
        x[torch.from_numpy(rng.random(len(x)) < 0.995)] = 0
    elif kind == 3:
        x = -(x.abs() ** 5)
    elif kind == 4:
        x = (x * 2).round()
    return x, cut(sizes.tolist(), quotas)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(20))
def test_top_is_the_exact_top_k_of_every_segment(backend: type[SegmentedView], seed: int) -> None:
    x, segments = random_case(seed)
    check(backend(x, segments).top(), x, exact_top(x, segments))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inclusive", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_take_cuts_to_the_quota_and_sends_at_least_one(
    backend: type[SegmentedView], inclusive: bool, seed: int
) -> None:
    x, segments = random_case(seed)
    rng = np.random.default_rng(100 + seed)
    choices = [0.0, 0.5, 1.0, 2.0, 3.0, 1e9, math.inf, math.nan, -1.0]
    thresholds = torch.tensor(rng.choice(choices, size=len(segments)), dtype=torch.float32)
    selection = backend(x, segments).take(thresholds, inclusive=inclusive)
    check(selection, x, exact_take(x, segments, thresholds.tolist(), inclusive))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(10))
def test_kth_largest_and_counts_agree_with_a_sort(backend: type[SegmentedView], seed: int) -> None:
    x, segments = random_case(seed)
    view = backend(x, segments)
    kth = view.kth_largest(segments.quotas)
    assert torch.equal(kth, view.kth_largest(torch.tensor(segments.quotas)))
    thresholds = torch.full((len(segments),), 0.7)
    counts = view.count_above(thresholds)
    thresholds[::2] = 1.5  # counted again in part only
    recounted = view.count_above(thresholds)
    for s, quota in enumerate(segments.quotas.tolist()):
        magnitude = x[segments.edges[s] : segments.edges[s + 1]].abs().sort(descending=True).values
        if quota:
            assert kth[s] == magnitude[quota - 1]
            assert counts[s] == (magnitude > 0.7).sum()
            assert recounted[s] == (magnitude > thresholds[s]).sum()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(5))
def test_counts_stay_true_while_a_few_thresholds_move(backend: type[SegmentedView], seed: int) -> None:
    x, segments = random_case(seed)
    view, rng = backend(x, segments), np.random.default_rng(seed)
    thresholds = torch.ones(len(segments))
    for _ in range(12):
        thresholds[rng.integers(len(segments), size=rng.integers(1, 3))] = float(rng.choice([0.0, 0.4, 0.9, 1.7, 3.0]))
        counts = view.count_above(thresholds)
        for s, quota in enumerate(segments.quotas.tolist()):
            if quota:
                magnitude = x[segments.edges[s] : segments.edges[s + 1]].abs()
                assert counts[s] == (magnitude > thresholds[s]).sum()
    check(view.take(thresholds), x, exact_take(x, segments, thresholds.tolist()))


def test_kth_largest_of_rank_zero_is_infinite_and_beats_the_quota() -> None:
    x, segments = torch.randn(60_000), cut([20_000, 40_000], [100, 100])
    for backend in (NumpyView, TorchView):
        kth = backend(x, segments).kth_largest(np.array([0, 30_000]))
        assert kth[0] == math.inf
        assert kth[1] == x[20_000:].abs().sort(descending=True).values[29_999]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(5))
def test_statistics_agree_with_double_precision(backend: type[SegmentedView], seed: int) -> None:
    x, segments = random_case(seed)
    view = backend(x, segments)
    thresholds = torch.rand(len(segments), generator=torch.Generator().manual_seed(seed))
    number, first, second = view.tail_moments(thresholds)
    logs, present = view.log_abs_sums()
    results = (view.sums(), view.abs_sums(), view.square_sums(), view.abs_max())
    for s, quota in enumerate(segments.quotas.tolist()):
        piece = x[segments.edges[s] : segments.edges[s + 1]].double()
        if not quota or not len(piece):
            continue
        size, magnitude = len(piece), piece.abs()
        excess = (magnitude - thresholds[s].double()).clamp(min=0)
        expected = (piece.sum(), magnitude.sum(), piece.square().sum(), magnitude.max())
        for result, value in zip(results, expected, strict=True):
            assert float(result[s]) == pytest.approx(float(value), rel=1e-6, abs=1e-6 * float(magnitude.sum()))
        assert present[s] == (piece != 0).sum()
        assert float(logs[s]) == pytest.approx(float(magnitude[magnitude > 0].log().sum()), rel=1e-5, abs=1e-6 * size)
        assert number[s] == (excess > 0).sum()
        assert float(first[s]) == pytest.approx(float(excess.sum()), rel=1e-5)
        assert float(second[s]) == pytest.approx(float(excess.square().sum()), rel=1e-5)


SPECIAL = {
    "zeros": torch.zeros(40_000),
    "constant": torch.full((40_000,), -0.25),
    "one-hot": torch.zeros(40_000).index_fill_(0, torch.tensor([31_234]), -3.0),
    "denormals": torch.arange(40_000).float() * 1e-44,
    "one NaN": torch.randn(40_000, generator=torch.Generator().manual_seed(1)).index_fill_(
        0, torch.tensor(9), math.nan
    ),
    "infinities": torch.randn(40_000, generator=torch.Generator().manual_seed(2)).index_fill_(
        0, torch.arange(0, 40_000, 7), -math.inf
    ),
    "all NaN": torch.full((40_000,), math.nan),
    "negative zeros": torch.full((40_000,), -0.0),
    # every sampled position is large, so that the sampled floor is far too high
    "periodic": torch.where(torch.arange(40_000) % 17 == 0, 100.0, 1.0) * torch.arange(1, 40_001) / 40_000,
    "rising": torch.arange(40_000).float(),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("quota", [1, 3, 400, 30_000, 40_000])
def test_special_inputs_select_exactly(backend: type[SegmentedView], name: str, quota: int) -> None:
    x, segments = SPECIAL[name], span_segments(40_000, quota)
    view = backend(x, segments)
    check(view.top(), x, best(x, 0, 40_000, quota))
    for threshold in (0.0, 1.0, math.nan):
        selection = view.take(torch.tensor([threshold]))
        assert 1 <= int(selection.count) <= quota
        if name not in ("one NaN", "all NaN"):
            check(selection, x, exact_take(x, segments, [threshold]))


@pytest.mark.parametrize("name", SPECIAL)
def test_backends_agree_bitwise(name: str) -> None:
    x, segments = SPECIAL[name], cut([0, 1, 30_000, 0, 9_000, 999], [0, 1, 700, 0, 0, 333])
    views = [NumpyView(x, segments), TorchView(x, segments)]
    for threshold in (0.0, 0.5, 3.0, math.inf):
        a, b = (view.take(torch.full((6,), threshold)) for view in views)
        assert torch.equal(a.indices, b.indices[: int(b.count)])
        a, b = (view.count_above(torch.full((6,), threshold)) for view in views)
        assert torch.equal(a[[1, 2, 5]], b[[1, 2, 5]])
    a, b = (view.kth_largest(segments.quotas) for view in views)
    assert torch.equal(a[[1, 2, 5]].view(torch.int32), b[[1, 2, 5]].view(torch.int32))
    a, b = (view.abs_max() for view in views)
    assert torch.equal(a[[1, 2, 5]].view(torch.int32), b[[1, 2, 5]].view(torch.int32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_small_segments_select_exactly(backend: type[SegmentedView]) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 400, 2000)
    quotas = np.minimum(sizes, rng.integers(0, 4, 2000))
    x = torch.from_numpy(rng.standard_normal(int(sizes.sum())).astype(np.float32))
    segments = cut(sizes.tolist(), quotas.tolist())
    check(backend(x, segments).top(), x, exact_top(x, segments))


SMALL_KINDS = ["plain", "ties", "zeros", "few non-zeros", "constant", "NaN", "infinities", "denormals", "rising"]


def small_segment(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal(size).astype(np.float32)
    if kind == "ties":
        return np.round(x)
    if kind == "zeros":
        return x * 0
    if kind == "few non-zeros":
        return np.where(rng.random(size) < 0.005, x, -0.0).astype(np.float32)
    if kind == "constant":
        return np.full(size, -0.5, np.float32)
    if kind in ("NaN", "infinities"):
        return np.where(rng.random(size) < 0.02, np.float32(kind == "NaN" and np.nan or -np.inf), x)
    if kind == "denormals":
        return (np.arange(size) % 50 * 1e-44).astype(np.float32)
    return np.arange(size, dtype=np.float32) if kind == "rising" else x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [*SMALL_KINDS, "all"])
def test_small_segments_select_exactly(backend: type[SegmentedView], kind: str) -> None:
    """Their floors are exact: with ties, zeros and NaN at the rank."""
    rng = np.random.default_rng(3)
    sizes = rng.choice([0, 1, 5, 32, 700, 1024, 3000], 60)
    quotas = [int(rng.choice([0, min(1, s), s // 100, s // 9, s // 3, s])) for s in sizes]
    kinds = [SMALL_KINDS[i % len(SMALL_KINDS)] if kind == "all" else kind for i in range(len(sizes))]
    parts = [small_segment(part, int(size), rng) for part, size in zip(kinds, sizes, strict=True)]
    x, segments = torch.from_numpy(np.concatenate(parts)), cut(sizes.tolist(), quotas)
    check(backend(x, segments).top(), x, exact_top(x, segments))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(5))
def test_thresholds_in_any_order_are_answered_as_by_a_fresh_view(backend: type[SegmentedView], seed: int) -> None:
    """Candidates are remembered from one threshold to the next."""
    x, segments = random_case(seed)
    rng = np.random.default_rng(seed)
    view = backend(x, segments)
    live = torch.from_numpy(segments.quotas > 0)
    for _ in range(6):
        choices = [-1.0, 0.0, 0.5, 1.0, 2.0, 3.0, math.inf, math.nan]
        thresholds = torch.tensor(rng.choice(choices, size=len(segments)), dtype=torch.float32)
        fresh = TorchView(x, segments)
        assert torch.equal(view.count_above(thresholds)[live], fresh.count_above(thresholds)[live])
        check(view.take(thresholds), x, exact_take(x, segments, thresholds.tolist()))
        kth = view.kth_largest(segments.quotas)[live]
        assert torch.equal(kth.view(torch.int32), fresh.kth_largest(segments.quotas)[live].view(torch.int32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_moments_are_the_sums(backend: type[SegmentedView]) -> None:
    x, segments = random_case(3)
    view = backend(x, segments)
    for magnitudes, first in ((False, view.sums()), (True, view.abs_sums())):
        for moment, expected in zip(view.moments(magnitudes=magnitudes), (first, view.square_sums()), strict=True):
            assert torch.equal(moment, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_segments_without_a_quota_are_left_out(backend: type[SegmentedView]) -> None:
    x = torch.randn(40_000, generator=torch.Generator().manual_seed(7))
    segments = cut([1000, 50] * 10 + [29_500], [10, 0] * 10 + [0])
    view = backend(x, segments)
    check(view.top(), x, exact_top(x, segments))
    for threshold in (-1.0, math.nan, 1.0):
        selection = view.take(torch.full((21,), threshold))
        check(selection, x, exact_take(x, segments, [threshold] * 21))


def test_sampled_abs_is_the_strided_magnitude() -> None:
    x, segments = torch.linspace(-1, 1, 100), cut([60, 0, 40], [1, 0, 1])
    first, none, last = segmented_view(x, segments).sampled_abs([7, 3, 50], [2, 0, 39])
    assert torch.equal(first, x[2:60:7].abs())
    assert len(none) == 0
    assert torch.equal(last, x[99:].abs())


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


def exact_choice(x: Tensor, segments: Segments) -> Selection:
    return segmented_view(x, segments).top()


@pytest.mark.parametrize("seed", range(12))
def test_pooled_quotas_are_floors_and_the_largest_of_the_rest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 1, 30, 800, 20_000], size=7)
    quotas = [min(int(rng.integers(0, 4)), s) for s in sizes]
    scale = np.repeat(rng.choice([0.01, 1, 50], size=7), sizes)
    x = torch.from_numpy((rng.standard_normal(int(sizes.sum())) * scale).astype(np.float32))
    segments = cut(sizes.tolist(), quotas, pool=int(rng.integers(1, 500)))
    floors = exact_top(x, segments)
    eligible = np.repeat(np.array(quotas) > 0, sizes)
    eligible[floors] = False
    rest = np.flatnonzero(eligible)
    order = np.argsort(-bits_of(x)[rest].astype(np.int64), kind="stable")
    expected = sorted([*floors, *rest[order[: segments.pool]].tolist()]) if floors else []
    check(pooled(x, segments, exact_choice), x, expected)
    check(TopK().select(x, segments, 0), x, expected)


@needs_kernels
@pytest.mark.parametrize("seed", range(12))
def test_pooled_quotas_take_one_look_at_the_span(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 1, 30, 800, 20_000, 150_000], size=9)
    sizes[rng.integers(9)] = 150_000
    quotas = [0 if rng.random() < 0.2 else max(1, s // 400) if s else 0 for s in sizes]
    quotas[int(sizes.argmax())] = 300
    scale = np.repeat(rng.choice([0.0, 0.01, 1, 50], size=9), sizes)
    x = torch.from_numpy((rng.standard_normal(int(sizes.sum())) * scale).astype(np.float32))
    if seed % 2:
        x = x.bfloat16().float()  # many equals
    segments = cut(sizes.tolist(), quotas, pool=int(rng.integers(1, 3000)))
    twice = pooled(x, segments, exact_choice)
    check(TopK().select(x, segments, 0), x, twice.indices.tolist())
    with native.unused():
        check(TopK().select(x, segments, 0), x, twice.indices.tolist())
    once = NativeView(x, segments).top_pooled()
    assert once is not None or (scale == 0).any()  # among zeros only the first ones count


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
    check(once, x, pooled(x, segments, exact_choice).indices.tolist())


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
    check(once, span, pooled(span, segments, exact_choice).indices.tolist())


@needs_kernels
@pytest.mark.parametrize("pool", [0, 700])
@pytest.mark.parametrize("seed", range(4))
def test_floors_of_the_last_selection_change_no_result(pool: int, seed: int) -> None:
    """Gradients that shrink and grow, vanish, become NaN, all alike, or move to another tensor."""
    rng = np.random.default_rng(seed)
    sizes = [40_000, 3, 0, 700, 17_000, 700, 90_000]
    segments = cut(sizes, [400, 1, 0, 7, 0, 20, 900], pool)
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
        span, plain = torch.from_numpy(x), cut(sizes, segments.quotas.tolist(), pool)
        for sparsifier in (TopK(), Constant()):
            with native.unused():
                expected = sparsifier.select(span, plain, 0)
            selection = sparsifier.select(span, segments, 0)
            assert torch.equal(selection.indices, expected.indices)
            assert torch.equal(selection.values.view(torch.int32), expected.values.view(torch.int32))
        view, reference = NativeView(span, segments), NumpyView(span, plain)
        for theirs, ours in zip(reference.moments(), view.moments(), strict=True):
            atol = 1e-3 * float(span.nan_to_num().abs().mean())
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol, equal_nan=True)
        thresholds = torch.full((len(segments),), float(np.nan_to_num(np.abs(x)).mean()))
        assert torch.equal(view.count_above(thresholds), reference.count_above(thresholds))


@needs_kernels
def test_counts_beyond_enough_need_no_other_look(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    view = NativeView(x, span_segments(100_000, 1000))
    assert int(view.count_above(torch.tensor([2.0]))) == int((x.abs() > 2).sum())
    monkeypatch.setattr(NativeView, "_read", None)  # which would be called
    assert int(view.count_above(torch.tensor([1.0]), enough=torch.tensor([1333.0]))) > 1333
    assert int(view.count_above(torch.tensor([2.5]), enough=torch.tensor([1333.0]))) == int((x.abs() > 2.5).sum())


def test_merge_is_the_same_on_both_backends() -> None:
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(4)).bfloat16().float()  # ties everywhere
    segments = cut([10_000, 40_000], [5, 5])
    for room in (0, 10, 300, 5000):
        others = TorchView(x, span_segments(50_000, 1000)).top()
        a, b = (view(x, segments) for view in (NumpyView, TorchView))
        merged = [view.merge(view.top(), others, room) for view in (a, b)]
        check(merged[1], x, merged[0].indices.tolist())
        assert len(merged[0].indices) <= 10 + room == len(merged[1].indices)


class Constant(ThresholdSparsifier):
    """One threshold for everything."""

    name = "constant"

    def thresholds(self, view: SegmentedView, step: int) -> Tensor:
        return torch.full((len(view.segments),), 1.0, dtype=torch.float64)


def test_threshold_policies_get_pools_and_empty_spans_for_free() -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(5))
    plain = Constant().select(x, cut([5000], [50]), 0)
    check(plain, x, exact_take(x, cut([5000], [50]), [1.0]))
    both = Constant().select(x, cut([1000, 4000], [3, 3], pool=44), 0)
    assert both.count == 50
    assert set(exact_top(x, cut([1000, 4000], [3, 3]))) <= set(both.indices.tolist())
    for segments in (cut([5000], [0]), cut([5000], [0], pool=7)):
        assert Constant().select(x, segments, 0).count == 0
    assert Constant().select(x[:0], cut([0, 0], [0, 0]), 0).count == 0

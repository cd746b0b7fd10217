"""Every backend of selection against brute force, over spans that Hypothesis makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_safusion.sparsify import Segments, TopK
from lightning_safusion.sparsify.selection.select import SegmentedView, pooled, segmented_view
from lightning_safusion.testing import FINITE, KINDS, values_of
from tests.sparsify.oracle import BACKENDS, check, cut, exact_pooled, exact_take, exact_top, kernels

# below, at and above blocks of 64, 1,024 and 65,536 elements
SIZES = [0, 1, 2, 5, 32, 300, 700, 1024, 3000, 17_000, 70_000]
Case = tuple[Tensor, Segments]


@st.composite
def spans(draw: st.DrawFn, kinds: Sequence[str] = KINDS, sizes: Sequence[int] = SIZES, pooled: bool = False) -> Case:
    """A span and its segments: empty ones and long ones, quotas from nothing to everything, another kind of values in
    each."""
    lengths = draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=5))
    quotas = [draw(st.sampled_from([0, min(1, n), n // 100, n // 9, n // 3, n])) for n in lengths]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    parts = [values_of(draw(st.sampled_from(kinds)), n, rng) for n in lengths]
    pool = draw(st.integers(0, 3000)) if pooled else 0
    return torch.from_numpy(np.concatenate(parts)), cut(lengths, quotas, pool)


THRESHOLDS = st.sampled_from([-1.0, 0.0, 0.4, 0.5, 0.9, 1.0, 2.0, 3.0, 1e9, math.inf, math.nan])


def thresholds_of(draw: Callable[[st.SearchStrategy[float]], float], segments: Segments) -> Tensor:
    return torch.tensor([draw(THRESHOLDS) for _ in range(len(segments))], dtype=torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=spans())
def test_top_is_the_exact_top_k_of_every_segment(backend: type[SegmentedView], case: Case) -> None:
    x, segments = case
    check(backend(x, segments).top(), x, exact_top(x, segments))


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=spans([*FINITE, "infinities"]), data=st.data())
def test_take_cuts_to_the_quota_and_sends_at_least_one(
    backend: type[SegmentedView], case: Case, data: st.DataObject
) -> None:
    x, segments = case
    thresholds = thresholds_of(data.draw, segments)
    selection = backend(x, segments).take(thresholds)
    check(selection, x, exact_take(x, segments, thresholds.tolist()))


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=spans([*FINITE, "infinities"]), data=st.data())
def test_a_view_answers_any_sequence_of_questions_exactly(
    backend: type[SegmentedView], case: Case, data: st.DataObject
) -> None:
    """A view remembers candidates from one threshold to the next."""
    x, segments = case
    view, live = backend(x, segments), segments.quotas > 0
    pieces = [piece.abs() for piece in x.split(segments.sizes.tolist())]
    thresholds = thresholds_of(data.draw, segments)
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, len(segments) - 1))
        thresholds[place] = data.draw(THRESHOLDS)  # the others have been counted already
        counts = view.count_above(thresholds)
        expected = [int((piece > limit).sum()) for piece, limit in zip(pieces, thresholds, strict=True)]
        assert [int(n) for n in counts[live]] == [n for n, has_quota in zip(expected, live, strict=True) if has_quota]
        check(view.take(thresholds), x, exact_take(x, segments, thresholds.tolist()))
    kth = view.kth_largest(segments.quotas)
    for piece, rank, value in zip(pieces, segments.quotas.tolist(), kth, strict=True):
        assert not rank or value == piece.sort(descending=True).values[rank - 1]


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=spans(["plain", "bfloat16", "ties", "few non-zeros", "constant"]), data=st.data())
def test_statistics_agree_with_double_precision(backend: type[SegmentedView], case: Case, data: st.DataObject) -> None:
    x, segments = case
    view = backend(x, segments)
    limits = torch.tensor([data.draw(st.sampled_from([0.0, 0.3, 0.7])) for _ in range(len(segments))])
    (number, first, second), (logs, present) = view.tail_moments(limits), view.log_abs_sums()
    results = (*view.moments(), view.abs_sums(), view.abs_max())
    pieces = x.double().split(segments.sizes.tolist())
    for s, (piece, quota) in enumerate(zip(pieces, segments.quotas.tolist(), strict=True)):
        if not quota:
            continue
        magnitude = piece.abs()
        excess = (magnitude - limits[s].double()).clamp(min=0)
        expected = (piece.sum(), piece.square().sum(), magnitude.sum(), magnitude.max())
        for result, value in zip(results, expected, strict=True):
            assert float(result[s]) == pytest.approx(float(value), rel=1e-6, abs=1e-6 * float(magnitude.sum()))
        assert present[s] == (piece != 0).sum()
        total = float(magnitude[magnitude > 0].log().sum())
        assert float(logs[s]) == pytest.approx(total, rel=1e-5, abs=1e-6 * len(piece))
        assert number[s] == (excess > 0).sum()
        assert float(first[s]) == pytest.approx(float(excess.sum()), rel=1e-5)
        assert float(second[s]) == pytest.approx(float(excess.square().sum()), rel=1e-5)


@given(case=spans(pooled=True))
def test_pooled_quotas_are_floors_and_the_largest_of_the_rest(case: Case) -> None:
    x, segments = case
    expected = exact_pooled(x, segments)
    check(pooled(x, segments, lambda x, segments: segmented_view(x, segments).top()), x, expected)
    for used in (True, False):
        with kernels(used):
            check(TopK().select(x, segments, 0), x, expected)

"""ADTopk: what a row is, exactly how many elements of each are sent, and which."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion.sparsify.adtopk import ADTopk, Rule, top_per_row
from lightning_safusion.sparsify.base import Segments, span_segments
from lightning_safusion.sparsify.selection.select import segmented_view
from tests.sparsify.distributions import sample

RULES: tuple[Rule, ...] = ("dim1", "dim0", "longer", "rows")
SHAPES = [(6, 5), (5, 6), (4, 3, 2, 2), (2, 7, 3), (8, 1, 3, 3), (9,), (), (1, 5), (5, 1)]


def one_tensor(shape: tuple[int, ...], quota: int) -> Segments:
    return Segments(np.array([0, math.prod(shape)], np.int64), np.array([quota], np.int64), (0,), (shape,))


def rows_of(shape: tuple[int, ...], rule: Rule) -> list[list[int]]:
    """Flat positions of every row, written out from the definition."""
    positions = np.arange(math.prod(shape)).reshape(shape)
    if len(shape) < 2:
        return [positions.reshape(-1).tolist()]
    if rule == "rows":
        return positions.reshape(shape[0], -1).tolist()
    axis = 0 if rule == "dim0" or (rule == "longer" and shape[0] > shape[1]) else 1
    others = list(np.ndindex(*(n if a != axis else 1 for a, n in enumerate(shape))))
    return [[int(positions[(*i[:axis], c, *i[axis + 1 :])]) for c in range(shape[axis])] for i in others]


def brute_force(x: Tensor, shape: tuple[int, ...], rule: Rule, each: int) -> list[int]:
    return sorted(
        position
        for row in rows_of(shape, rule)
        for position in sorted(row, key=lambda p: (-abs(float(x[p])), p))[:each]
    )


@pytest.mark.parametrize("rule", RULES)
def test_every_row_sends_its_largest(rule: Rule) -> None:
    sparsifier = ADTopk(rule)
    for shape, density in product(SHAPES, (0.01, 0.35, 0.6, 1.0)):
        x = (sample("gaussian", math.prod(shape), seed=2) * 3).round()  # many ties, some zeros
        quota = sparsifier.quota(x.numel(), shape, density)
        rows = rows_of(shape, rule)
        each = min(len(rows[0]), max(1, math.floor(len(rows[0]) * density + 1e-6)))
        assert quota == len(rows) * each
        selection = sparsifier.select(x, one_tensor(shape, quota), 0)
        assert selection.indices.tolist() == brute_force(x, shape, rule, each)
        assert selection.count == quota


def test_quota_of_nothing_is_nothing() -> None:
    assert ADTopk().quota(0, (0, 4), 0.1) == 0
    assert ADTopk("dim0").quota(0, (4, 0), 0.1) == 0


@pytest.mark.parametrize("quota", [1, 4, 7, 11, 29])
def test_foreign_quota_is_met_exactly_and_evenly(quota: int) -> None:
    """A quota that is no multiple of the rows: they differ by one at most, the largest next elements win."""
    x = sample("laplace", 30, seed=5)
    selection = ADTopk().select(x, one_tensor((6, 5), quota), 0)
    per_row = np.bincount(selection.indices.numpy() // 5, minlength=6)
    assert per_row.sum() == quota
    assert per_row.max() - per_row.min() <= 1
    ranked = x.abs().view(6, 5).sort(1, descending=True).values
    nexts = ranked[:, quota // 6]
    favoured = torch.from_numpy(per_row > quota // 6)
    if 0 < favoured.sum() < 6:
        assert nexts[favoured].min() >= nexts[~favoured].max()


def test_segment_that_is_not_one_tensor_is_a_single_row() -> None:
    x = sample("gaussian", 500)
    selection = ADTopk().select(x, span_segments(500, 20), 0)
    assert torch.equal(selection.indices, segmented_view(x, span_segments(500, 20)).top().indices)
    mismatched = Segments(np.array([0, 500]), np.array([20]), (0,), ((10, 10),))
    assert torch.equal(ADTopk().select(x, mismatched, 0).indices, selection.indices)


def test_interleaving_alternates_by_step() -> None:
    x = torch.cat([sample("gaussian", 200), 10 * sample("gaussian", 200, seed=1)])
    segments = one_tensor((20, 20), 40)
    rows = ADTopk().select(x, segments, 0).indices
    top = segmented_view(x, segments).top().indices
    assert not torch.equal(rows, top)
    interleaved = ADTopk(interleave=True)
    for step in (3, 0, 1, 1, 2, 7):  # the step alone decides, not the number of calls
        assert torch.equal(interleaved.select(x, segments, step).indices, top if step % 2 else rows)


def test_a_threshold_is_kept_until_it_is_refreshed() -> None:
    """Of the magnitudes 1 to 400 the largest 40 are sent; scales are binary fractions, so that nothing is rounded."""
    segments = one_tensor((20, 20), 40)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    x = (order + 1.0) * sample("gaussian", 400, seed=3).sign()

    def selected(sparsifier: ADTopk, scale: float, step: int) -> list[int]:
        return sparsifier.select(x * scale, segments, step).indices.tolist()

    def above(magnitude: int) -> list[int]:
        return (x.abs() > magnitude).nonzero().squeeze(1).tolist()

    sparsifier = ADTopk(interleave=True, refresh=8)
    assert sparsifier.estimates
    for step, scale in ((1, 1.0), (3, 0.5), (13, 0.5), (15, 1.0), (17, 1.0)):  # the beginning, a new period
        assert selected(sparsifier, scale, step) == above(360)
    for step in (19, 21):  # what exceeds 361 / scale, again and again
        assert selected(sparsifier, 15 / 16, step) == above(385)
    assert selected(sparsifier, 2.0, 23) == above(360)  # of 220 that pass, the quota
    rows = ADTopk().select(x, segments, 24).indices.tolist()
    assert selected(sparsifier, 1.0, 24) == rows  # the period begins here, for Top-k with its next step
    assert selected(sparsifier, 0.5, 25) == above(360)
    resumed = ADTopk(interleave=True, refresh=8)
    resumed.load_state_dict(sparsifier.state_dict())
    for each in (sparsifier, resumed):
        assert selected(each, 31 / 64, 27) == above(372)
        assert selected(each, 7 / 16, 29) == above(399)  # nothing exceeds 180.5: the largest


def test_state_without_thresholds_is_refused() -> None:
    with pytest.raises(ValueError, match="ADTopk keeps no state, got"):
        ADTopk(interleave=True).load_state_dict({"keys": [0]})


def test_several_tensors_of_a_span() -> None:
    """A skipped tensor and an empty one between two others, all cut by their own shapes."""
    shapes = ((4, 6), (3, 3), (0, 5), (7,), (2, 5, 2))
    quotas = np.array([8, 0, 0, 2, 4])
    edges = np.concatenate([[0], np.cumsum([math.prod(shape) for shape in shapes])])
    x = sample("gaussian", int(edges[-1]), seed=8)
    selection = ADTopk().select(x, Segments(edges, quotas, tuple(range(5)), shapes), 0)
    expected = []
    for start, shape, quota in zip(edges, shapes, quotas, strict=False):
        if quota:
            each = int(quota) // len(rows_of(shape, "dim1"))
            chosen = brute_force(x[start : start + math.prod(shape)], shape, "dim1", each)
            expected += [int(start) + position for position in chosen]
    assert selection.indices.tolist() == expected
    assert torch.equal(selection.values, x[selection.indices])


def test_top_per_row_breaks_ties_by_position() -> None:
    rows = torch.tensor([[1.0, 1.0, 1.0], [2.0, 1.0, 2.0]])
    assert top_per_row(rows, 2).tolist() == [[True, False, False], [True, False, False]]
    assert top_per_row(rows, 3).tolist() == [[True, False, False], [True, False, True]]
    assert top_per_row(torch.ones(2, 3), 3).tolist() == [[True, True, False], [True, False, False]]

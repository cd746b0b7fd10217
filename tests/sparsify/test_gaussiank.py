"""Gaussian-k: its first threshold, the paper's loop and the bisection that replaces it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from lightning_safusion.sparsify.base import Segments, span_segments
from lightning_safusion.sparsify.gaussiank import GaussianK, normal_thresholds
from lightning_safusion.sparsify.selection.select import segmented_view
from tests.sparsify.distributions import (
    DENSITIES,
    NUMEL,
    SAMPLERS,
    TAIL_THRESHOLDS,
    check_found,
    found_ratio,
    large_sample,
    sample,
)
from tests.sparsify.oracle import cut

# Elements found as multiples of the quota at 10^6 elements, first threshold and after the paper's loop of three trials,
# computed from the distributions.
RAW = {
    "gaussian": (1, 1, 1, 1),
    "laplace": (0.977, 1.25, 2.62, 9.53),
    "student3": (0.652, 0.853, 2.10, 10.7),
    "uniform": (0.503, 0, 0, 0),
    "zeros_gaussian": (0.603, 1.07, 4.15, 29.8),
}
PAPER_LOOP = {
    ("laplace", 0.01): 6.51,
    ("laplace", 0.001): 0.93,
    ("student5", 0.001): 0.212,
    ("uniform", 0.1): 2.88,
    ("uniform", 0.001): 0.0,
}
# an infinite fourth moment: the deviation of a sample is noise at the rarest density
NOISY = ("student3", 0.001)


@pytest.mark.parametrize("place", range(4))
def test_first_threshold_is_the_normal_quantile(place: int) -> None:
    x = torch.special.ndtri((torch.arange(NUMEL, dtype=torch.float64) + 0.5) / NUMEL).float()
    view = segmented_view(x, span_segments(NUMEL, int(DENSITIES[place] * NUMEL)))
    assert float(normal_thresholds(view)) == pytest.approx(TAIL_THRESHOLDS["gaussian"][place], rel=1e-5)


def test_number_found_without_refinement() -> None:
    for name, figures in RAW.items():
        for density, expected in zip(DENSITIES, figures, strict=True):
            if (name, density) != NOISY:
                check_found(GaussianK("paper", max_refine=1), name, density, expected)


def test_paper_loop_is_reproduced_with_its_failures() -> None:
    for (name, density), expected in PAPER_LOOP.items():
        check_found(GaussianK("paper"), name, density, expected)


@pytest.mark.parametrize("density", DENSITIES)
def test_bisection_settles_or_leaves_more_than_the_quota(density: float) -> None:
    for name in SAMPLERS:
        found = found_ratio(GaussianK(), large_sample(name), density)
        assert found >= 2 / 3, name
        if name != "uniform" or density > 0.01:  # eight trials do not suffice there, and the exact cut takes over
            assert found <= 4 / 3, name


@pytest.mark.parametrize("name", ["gaussian", "laplace", "uniform"])
def test_estimate_in_the_band_is_left_alone(name: str) -> None:
    """Both refinements agree with the first threshold where that finds 2/3 to 4/3 of the quota."""
    density = {"gaussian": 0.01, "laplace": 0.05, "uniform": 0.1}[name]
    segments = span_segments(NUMEL, int(density * NUMEL))
    thresholds = [
        float(sparsifier.thresholds(segmented_view(large_sample(name), segments), 0))
        for sparsifier in (GaussianK("paper", max_refine=1), GaussianK("paper"), GaussianK())
    ]
    assert (len(set(thresholds)) == 1) == (name != "uniform")  # the raw estimate finds half a quota there


@pytest.mark.parametrize("shift", [-0.5, 0.5])
def test_mean_widens_the_threshold_whatever_its_sign(shift: float) -> None:
    x = sample("gaussian", 100_000) + shift
    segments = span_segments(100_000, 1_000)
    tau = float(normal_thresholds(segmented_view(x, segments)))
    assert tau == pytest.approx(0.5 + 2.575829, abs=0.02)
    mirrored = GaussianK().select(-x, segments, 0)
    assert torch.equal(mirrored.indices, GaussianK().select(x, segments, 0).indices)


def test_mostly_zero_segment_sends_its_non_zeros() -> None:
    x = torch.zeros(10_000)
    x[torch.arange(5) * 1_000] = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])
    selection = GaussianK().select(x, span_segments(10_000, 100), 0)
    assert selection.indices.tolist() == [0, 1_000, 2_000, 3_000, 4_000]


def counts(x: torch.Tensor, segments: Segments) -> tuple[int, torch.Tensor]:
    """How often elements are counted on the way to the thresholds, and these."""
    view = segmented_view(x, segments)
    with mock.patch.object(view, "count_above", wraps=view.count_above) as counting:
        tau = GaussianK().thresholds(view, 0)
    return counting.call_count, tau


def test_small_quotas_are_not_chased_to_the_very_number() -> None:
    """For a quota of 1 the paper's bounds leave no number but 1."""
    x = sample("laplace", 3_200)
    segments = cut([32] * 100, [1] * 100)
    number, tau = counts(x, segments)
    assert number <= 3
    found = segmented_view(x, segments).count_above(tau)
    assert int(found.min()) >= 1
    largest = x.view(100, 32).abs().argmax(1) + torch.arange(0, 3_200, 32)
    assert torch.equal(GaussianK().select(x, segments, 0).indices, largest)


def test_zeros_end_the_refinement_at_once() -> None:
    assert counts(torch.zeros(5_000), span_segments(5_000, 50)) == (1, torch.zeros(1))

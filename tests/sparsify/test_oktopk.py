"""Threshold reuse: when thresholds are exact, how they are kept in between, and what is saved."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
import torch

from lightning_safusion.sparsify.base import span_segments
from lightning_safusion.sparsify.oktopk import OkTopk
from lightning_safusion.sparsify.selection.select import segmented_view
from tests.sparsify.distributions import SAMPLERS, found_ratio, large_sample, sample
from tests.sparsify.oracle import cut

Control = Literal["scaled", "step", "none"]
NUMEL, QUOTA = 50_000, 500


def ratio(sparsifier: OkTopk, x: torch.Tensor, step: int) -> float:
    return found_ratio(sparsifier, x, QUOTA / NUMEL, step)


@pytest.mark.parametrize("control", ["scaled", "step"])
def test_evaluated_steps_find_exactly_the_quota(control: Control) -> None:
    """The first step, every entry into a new period, and never in between: there the sample decides."""
    sparsifier = OkTopk(refresh=4, control=control)
    exact = [ratio(sparsifier, sample("laplace", NUMEL, seed=step), step) == 1 for step in range(2, 14)]
    assert exact == [step == 2 or step % 4 == 0 for step in range(2, 14)]


def test_missed_evaluation_is_made_up_for() -> None:
    sparsifier = OkTopk(refresh=8)
    assert ratio(sparsifier, sample("gaussian", NUMEL, seed=0), 3) == 1
    assert ratio(sparsifier, sample("gaussian", NUMEL, seed=1), 11) == 1  # step 8 did not happen here
    assert ratio(sparsifier, sample("gaussian", NUMEL, seed=2), 12) != 1


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "uniform"])
def test_stationary_input_stays_near_the_quota(name: str) -> None:
    """Noise of two samples: the one that set the threshold and the one it is used on."""
    sparsifier = OkTopk(refresh=100)
    for step in range(20):
        x = sample(name, NUMEL, seed=100 + step)
        assert abs(ratio(sparsifier, x, step) - 1) <= 5 * math.sqrt(2 / QUOTA)


def test_control_does_not_swing_on_a_cliff() -> None:
    """Near the end of a bounded support 1 % of threshold is a whole quota: noisy, but never away for good."""
    sparsifier = OkTopk(refresh=1_000)
    ratios = [ratio(sparsifier, sample("uniform", NUMEL, seed=100 + step), step) for step in range(60)]
    assert np.mean(ratios) == pytest.approx(1, abs=0.2)
    assert np.mean(ratios[40:]) == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("growth", [0.5, 0.9, 1.25, 8.0])
def test_scale_drift_is_followed_at_once(growth: float) -> None:
    """In units of the mean magnitude the same threshold finds the same elements, whatever the scale."""
    x = sample("gaussian", NUMEL)
    sparsifier = OkTopk(refresh=100)
    for step in range(10):
        assert ratio(sparsifier, x * growth**step, step) == pytest.approx(1, abs=0.01)


def test_without_units_scale_drift_multiplies_the_number_found() -> None:
    """What the unit is for: 25 % more scale finds 3.9 times the elements of a Gaussian at density 0.01."""
    sparsifier = OkTopk(refresh=100, control="step")
    x = large_sample("gaussian")
    assert found_ratio(sparsifier, x, 0.01, 0) == 1
    grown = 1.25 * x
    quota = 10_000
    tau = sparsifier.state_dict()["levels"].float()
    reused = int(segmented_view(grown, span_segments(len(x), quota)).count_above(tau)) / quota
    assert reused == pytest.approx(3.93, rel=0.05)
    # the early stop of the authors' control law: five times 3 %
    assert found_ratio(sparsifier, grown, 0.01, 1) == pytest.approx(
        int((grown.abs() > float(tau) * 1.03**5).sum()) / quota, rel=1e-3
    )


def test_change_of_shape_is_corrected_by_the_power_law() -> None:
    """From a Gaussian to a Laplace distribution at one step: one count leads back to the quota."""
    sparsifier = OkTopk(refresh=100)
    ratios = [
        ratio(sparsifier, sample("gaussian" if step == 0 else "laplace", NUMEL, seed=step), step) for step in range(5)
    ]
    assert ratios[1] > 2
    assert all(abs(found - 1) < 0.25 for found in ratios[3:])


def test_step_control_law() -> None:
    """1.2 % up above 5/4, 1.2 % down below 2/3, nothing in between, with effect from the next step on."""
    x = torch.linspace(0, 1, 10_001)[1:]
    segments = span_segments(10_000, 1_000)

    def level_after(found: float) -> float:
        sparsifier = OkTopk(refresh=100, control="step")
        level = 1 - found * 0.1
        state = {
            "control": "step",
            "keys": [0],
            "levels": torch.tensor([level], dtype=torch.float64),
            "quotas": [1_000],
            "evaluated": [0],
        }
        sparsifier.load_state_dict(state)
        tau = sparsifier.thresholds(segmented_view(x, segments), 1)
        assert float(tau) == pytest.approx(level)
        return float(sparsifier.state_dict()["levels"][0]) / level

    assert level_after(0.5) == pytest.approx(1 / 1.012)
    assert level_after(0.8) == pytest.approx(1)
    assert level_after(1.2) == pytest.approx(1)
    assert level_after(1.3) == pytest.approx(1.012)


def test_new_quota_is_evaluated_at_once() -> None:
    sparsifier = OkTopk(refresh=100)
    ratio(sparsifier, sample("gaussian", NUMEL), 0)
    assert found_ratio(sparsifier, sample("gaussian", NUMEL, seed=1), 0.002, 1) == 1


@pytest.mark.parametrize("control", ["scaled", "step"])
def test_skipped_segments_keep_their_threshold(control: Control) -> None:
    segments = cut([1_000, 2_000], [10, 20], keys=("a", "b"))
    sparsifier = OkTopk(refresh=100, control=control)
    sparsifier.select(sample("gaussian", 3_000), segments, 0)
    before = sparsifier.state_dict()
    other = segments.skipping(np.array([False, True]))
    sparsifier.select(sample("gaussian", 3_000, seed=1), other, 1)
    after = sparsifier.state_dict()
    assert after["keys"] == ["a", "b"]
    assert after["levels"][1] == before["levels"][1]
    assert after["quotas"] == [10, 20]


@pytest.mark.parametrize("control", ["scaled", "step"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_a_bad_step_teaches_nothing(control: Control, bad: float) -> None:
    sparsifier = OkTopk(refresh=100, control=control)
    x = sample("gaussian", NUMEL)
    ratio(sparsifier, x, 0)
    poisoned = x.clone() if bad else torch.zeros_like(x)
    poisoned[3] = bad
    selection = sparsifier.select(poisoned, span_segments(NUMEL, QUOTA), 1)
    assert 1 <= selection.count <= QUOTA
    assert ratio(sparsifier, x, 2) == pytest.approx(1, abs=0.15)


def test_state_of_the_other_control_is_not_reused() -> None:
    """Thresholds with and without a unit do not compare: the first step evaluates anew."""
    saved = OkTopk(control="step")
    ratio(saved, sample("gaussian", NUMEL), 0)
    resumed = OkTopk(control="scaled")
    resumed.load_state_dict(saved.state_dict())
    assert ratio(resumed, 7 * sample("gaussian", NUMEL, seed=1), 1) == 1

"""SIDCo: fits and quantiles against closed forms, stages against computed counts, control of the stages."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion.sparsify.base import span_segments
from lightning_safusion.sparsify.selection.select import segmented_view
from lightning_safusion.sparsify.sidco import SIDCo, gamma_fit, gamma_tail_quantile, gpareto, gpareto_fit
from tests.sparsify.distributions import (
    DENSITIES,
    MOMENTS,
    TAIL_THRESHOLDS,
    check_found,
    found_ratio,
    large_sample,
    sample,
)
from tests.sparsify.oracle import cut

Fit = Literal["exponential", "gamma_gpareto", "gpareto"]
EULER = 0.5772156649015329
# E ln |X|, for the fit of the gamma distribution
MEAN_LOG = {"gaussian": -0.5 * (EULER + math.log(2)), "laplace": -EULER, "gamma": -EULER - 2 * math.log(2)}


def scalar(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


# -- fits and quantiles ---------------------------------------------------------------------------------------------


def test_pareto_fit() -> None:
    for figures in MOMENTS.values():
        shape, scale = gpareto_fit(scalar(figures.mean), scalar(figures.std**2))
        assert (float(shape), float(scale)) == pytest.approx(figures.gpareto, abs=2e-5)


def test_gamma_fit() -> None:
    for name, mean_log in MEAN_LOG.items():
        shape, scale = gamma_fit(scalar(MOMENTS[name].mean), scalar(mean_log))
        assert (float(shape), float(scale)) == pytest.approx(MOMENTS[name].gamma, abs=2e-5)


def test_quantiles_are_exact_for_their_own_distribution() -> None:
    for place, density in enumerate(DENSITIES):
        level = scalar(-math.log(density))
        for name, shape in (("gpareto10", 0.1), ("gpareto25", 0.25), ("gpareto40", 0.4), ("uniform", -1.0)):
            mean, variance = 1 / (1 - shape), 1 / ((1 - shape) ** 2 * (1 - 2 * shape))
            tau = gpareto(scalar(mean), scalar(variance), level)
            assert float(tau) == pytest.approx(TAIL_THRESHOLDS[name][place], rel=1e-6)
        assert float(gpareto(scalar(1.0), scalar(1.0), level)) == pytest.approx(float(level))  # the limit, shape 0
        quantile = gamma_tail_quantile(scalar(0.5), scalar(density))
        assert float(quantile) == pytest.approx(TAIL_THRESHOLDS["gamma"][place], rel=1e-6)


def test_gamma_quantile_inverts_the_tail_everywhere() -> None:
    shape, density = torch.meshgrid(
        torch.logspace(math.log10(0.05), math.log10(5_000), 60, dtype=torch.float64),
        torch.cat([torch.logspace(-9, -0.01, 60, dtype=torch.float64), torch.tensor([0.99, 0.9999])]),
        indexing="ij",
    )
    y = gamma_tail_quantile(shape.flatten(), density.flatten())
    tail = torch.special.gammaincc(shape.flatten(), y)
    assert torch.allclose(tail, density.flatten(), rtol=1e-10, atol=0)


def test_gamma_threshold_ignores_exact_zeros() -> None:
    """Zeros have no logarithm: among nine times as many of them the fit of the others stays as it is."""
    dense = sample("gamma", 100_000)
    sparse = torch.zeros(1_000_000)
    sparse[::10] = dense
    sidco = SIDCo("gamma_gpareto", stages=1)
    alone = sidco.thresholds(segmented_view(dense, span_segments(100_000, 1_000)), 0)
    among = sidco.thresholds(segmented_view(sparse, span_segments(1_000_000, 1_000)), 0)
    assert float(among) == pytest.approx(float(alone), rel=1e-5)
    assert float(alone) == pytest.approx(TAIL_THRESHOLDS["gamma"][2], rel=0.02)


def test_degenerate_moments_stay_finite() -> None:
    level = scalar(4.6)
    assert float(gpareto(scalar(2.0), scalar(0.0), level)) == pytest.approx(2.0)
    shape, scale = gamma_fit(scalar(2.0), scalar(math.log(2.0)))
    assert math.isfinite(float(scale * gamma_tail_quantile(shape, scalar(0.01))))


# -- stages ---------------------------------------------------------------------------------------------------------

# Elements found as multiples of the quota, computed from the distributions, by density
PLAIN: dict[tuple[Fit, int], dict[str, tuple[float, float, float, float]]] = {
    ("exponential", 1): {
        "laplace": (1, 1, 1, 1),
        "gaussian": (0.66, 0.34, 0.024, 3.6e-5),
        "student3": (0.85, 0.91, 1.48, 4.70),
        "zeros_laplace": (0.79, 1.48, 6.3, 50),
    },
    ("exponential", 3): {
        "laplace": (1, 1, 1, 1),
        "gaussian": (1.21, 1.25, 1.13, 0.70),
        "student3": (0.71, 0.64, 0.66, 1.16),
        "uniform": (1.82, 2.19, 1.17, 0),
        "zeros_laplace": (0.35, 0.35, 0.35, 0.35),
    },
    ("gpareto", 3): {
        "laplace": (1, 1, 1, 1),
        "gaussian": (0.96, 0.95, 0.92, 0.90),
        "gpareto10": (1, 1, 1, 1),
        "student3": (1.03, 1.03, 0.99, 0.92),
        "uniform": (1, 1, 1, 1),
        "zeros_gaussian": (0.39, 0.37, 0.34, 0.34),
    },
    ("gamma_gpareto", 1): {"gaussian": (0.88, 0.63, 0.16, 0.0045), "student3": (0.87, 0.94, 1.55, 5.0)},
    ("gamma_gpareto", 3): {"gaussian": (1.11, 1.10, 1.06, 1.03), "student3": (0.94, 0.94, 0.90, 0.84)},
}
CORRECTED = {
    "gaussian": (1.01, 1.00, 0.993, 0.986),
    "laplace": (1, 1, 1, 1),
    "student3": (1.02, 1.02, 1.00, 0.993),
    "zeros_gaussian": (0.934, 1.01, 0.995, 0.979),
}
# infinite fourth moments make the moments of the fit noise at the rarest density
HEAVY = ("student3", "uniform")


@pytest.mark.parametrize(("fit", "stages"), PLAIN)
def test_number_found_by_plain_stages(fit: Fit, stages: int) -> None:
    for name, figures in PLAIN[fit, stages].items():
        for density, expected in zip(DENSITIES, figures, strict=True):
            if density != 0.001 or name not in HEAVY:
                check_found(SIDCo(fit, stages, correct=False), name, density, expected)


@pytest.mark.parametrize("stages", [3, 4])
def test_number_found_by_corrected_stages(stages: int) -> None:
    for name, figures in CORRECTED.items():
        for density, expected in zip(DENSITIES, figures, strict=True):
            check_found(SIDCo(stages=stages), name, density, expected)


@pytest.mark.parametrize("fit", ["exponential", "gamma_gpareto", "gpareto"])
def test_correction_heals_what_stages_multiply(fit: Fit) -> None:
    x = large_sample("zeros_laplace")
    assert found_ratio(SIDCo(fit, 3, correct=False), x, 0.01) < 0.5
    assert 0.9 < found_ratio(SIDCo(fit, 3), x, 0.01) < 1.1


def test_density_beyond_the_first_stage_uses_one_stage() -> None:
    for density in (0.25, 0.3, 0.5):
        many = found_ratio(SIDCo("exponential", 4), large_sample("laplace"), density)
        assert many == found_ratio(SIDCo("exponential", 1), large_sample("laplace"), density)
        assert many == pytest.approx(1, abs=0.02)


def test_segments_are_estimated_independently() -> None:
    """Densities on both sides of the first stage, a segment that takes no part, and one that is empty."""
    pieces = [large_sample(name)[:100_000] for name in ("gaussian", "laplace", "student3", "gamma")]
    quotas = [500, 60_000, 0, 0, 2_000]
    segments = cut([100_000, 100_000, 0, 100_000, 100_000], quotas)
    together = SIDCo().thresholds(segmented_view(torch.cat(pieces), segments), 0)
    for place, piece in ((0, pieces[0]), (1, pieces[1]), (4, pieces[3])):
        alone = SIDCo().thresholds(segmented_view(piece, span_segments(100_000, quotas[place])), 0)
        assert float(together[place]) == pytest.approx(float(alone), rel=1e-5)


# -- control of the number of stages --------------------------------------------------------------------------------


def stages_of(sidco: SIDCo) -> list[float]:
    return sidco.state_dict()["stages"][:, 0].tolist()


def test_stages_rise_for_light_tails_until_the_density_is_met() -> None:
    """A Gaussian under-selects with one exponential stage; every five steps one more is tried."""
    sidco = SIDCo("exponential", stages=1, correct=False, adapt=True)
    segments = span_segments(200_000, 200)
    seen, ratios = [], []
    for step in range(25):
        view = segmented_view(sample("gaussian", 200_000, seed=step), segments)
        ratios.append(int(view.count_above(sidco.thresholds(view, step))) / 200)
        seen.append(stages_of(sidco)[0])
    assert seen[3] == 1
    assert seen[4] == 2
    assert seen[9] == 3
    assert seen[14] == seen[19] == 4
    assert np.mean(ratios[15:20]) == pytest.approx(1.06, abs=0.2)


def test_stages_are_kept_per_segment_and_bounded() -> None:
    """Light tails gain a stage, heavy ones are at 1 already, a segment that takes no part stays where it began."""
    sidco = SIDCo("exponential", stages=1, correct=False, adapt=True, adapt_every=1)
    x = torch.cat([sample("uniform", 50_000), sample("student3", 50_000), sample("uniform", 50_000)])
    segments = cut([50_000] * 3, [5_000, 50, 0], keys=("light", "heavy", "idle"))
    for step in range(8):
        sidco.select(x, segments, step)
        light, heavy, idle = stages_of(sidco)
        assert 1 <= light <= math.ceil(math.log2(10))
        assert heavy == 1
        assert idle == 1
        assert light == 2 or step > 0


def test_smaller_density_range_clamps_a_loaded_stage_count() -> None:
    sidco = SIDCo("exponential", stages=1, correct=False, adapt=True)
    sidco.load_state_dict({"keys": [0], "stages": torch.tensor([[9.0, 0.0, 0.0]], dtype=torch.float64)})
    x = sample("laplace", 100_000)
    assert found_ratio(sidco, x, 0.1) == pytest.approx(1, abs=0.03)

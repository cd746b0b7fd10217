"""RedSync: trimmed and searched thresholds, both ending in exact Top-k."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_safusion.sparsify.base import span_segments
from lightning_safusion.sparsify.redsync import RedSync
from lightning_safusion.sparsify.selection.select import segmented_view
from tests.sparsify.distributions import DENSITIES, SAMPLERS, found_ratio, sample

NUMEL = 100_000
CONTINUOUS = [name for name in SAMPLERS if not name.startswith("zeros")]


@pytest.mark.parametrize("method", ["search", "trim"])
@pytest.mark.parametrize("name", ["gaussian", "student3", "uniform", "zeros_laplace"])
def test_result_is_top_k(name: str, method: str) -> None:
    x = sample(name, NUMEL, seed=1)
    non_zeros = int(x.count_nonzero())
    for density in (0.5, 0.05, 0.001):
        quota = min(int(density * NUMEL), non_zeros)
        selection = RedSync(method).select(x, span_segments(NUMEL, quota), 0)  # type: ignore[arg-type]  # a value of the Literal
        assert torch.equal(selection.indices, segmented_view(x, span_segments(NUMEL, quota)).top().indices)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_search_finds_one_to_two_quotas(name: str) -> None:
    for density in DENSITIES:
        assert 1 <= found_ratio(RedSync(), sample(name, NUMEL), density) <= 2


@pytest.mark.parametrize("outlier", [1e2, 1e3, 1e5])
def test_an_outlier_does_not_spoil_the_search(outlier: float) -> None:
    """From 1e4 on a linear grid of a thousand points between mean and maximum has no point inside the bulk."""
    x = sample("gaussian", NUMEL)
    x[17] = outlier
    assert 1 <= found_ratio(RedSync(), x, 0.01) <= 2


@pytest.mark.parametrize("method", ["search", "trim"])
def test_outlier_that_lifts_the_mean_above_the_rest_leaves_top_k(method: str) -> None:
    x = sample("gaussian", NUMEL)
    x[17] = 1e12
    segments = span_segments(NUMEL, 1_000)
    selection = RedSync(method).select(x, segments, 0)  # type: ignore[arg-type]  # a value of the Literal
    assert torch.equal(selection.indices, segmented_view(x, segments).top().indices)


def test_threshold_is_the_mean_where_no_higher_one_suffices() -> None:
    """The quota-th magnitude is above the mean, but below all points of the search."""
    x = torch.tensor([1.0] * 60 + [0.1] * 39 + [36.0])
    mean = float(x.double().mean())
    assert mean < 1 < mean * (36 / mean) ** 2**-10
    tau = RedSync().thresholds(segmented_view(x, span_segments(100, 61)), 0)
    assert float(tau) == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("step", [0.2, 0.1, 1.0])
def test_trim_stops_at_the_first_step_that_suffices(step: float) -> None:
    x = sample("laplace", NUMEL)
    magnitude = x.abs().double()
    mean, peak = magnitude.mean(), magnitude.max()
    quota = 1_000
    ratio = next(r for i in range(1, 100) if (magnitude > mean + (r := 1 - i * step) * (peak - mean)).sum() >= quota)
    tau = RedSync("trim", trim_step=step).thresholds(segmented_view(x, span_segments(NUMEL, quota)), 0)
    assert float(tau) == pytest.approx(float(mean + ratio * (peak - mean)), rel=1e-6)


@pytest.mark.parametrize("method", ["search", "trim"])
def test_plateau_across_the_window_still_gives_the_first_quota(method: str) -> None:
    """900 equal magnitudes: no threshold finds between 100 and 200."""
    x = torch.full((1_000,), 0.1)
    x[50:950] = -1.0
    selection = RedSync(method).select(x, span_segments(1_000, 100), 0)  # type: ignore[arg-type]  # a value of the Literal
    assert selection.indices.tolist() == list(range(50, 150))


@pytest.mark.parametrize("method", ["search", "trim"])
def test_density_out_of_reach_takes_non_zeros(method: str) -> None:
    x = sample("laplace", 1_000)
    tau = RedSync(method).thresholds(segmented_view(x, span_segments(1_000, 600)), 0)  # type: ignore[arg-type]  # a value of the Literal
    assert float(tau) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"method": "grid"}, "grid"), ({"tolerance": 0.0}, "tolerance"), ({"trim_step": 1.2}, "trim_step")],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RedSync(**arguments)

"""RedSync: trimmed and searched thresholds, both ending in exact Top-k."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from lightning_safusion.sparsify.base import span_segments
from lightning_safusion.sparsify.redsync import RedSync
from lightning_safusion.sparsify.selection.select import segmented_view
from tests.sparsify.distributions import DENSITIES, SAMPLERS, found_ratio, sample

Method = Literal["search", "trim"]
NUMEL = 100_000
TOP = {name: sample(name, NUMEL, seed=1) for name in ("gaussian", "student3", "uniform", "zeros_laplace")}
# its mean is above all others
TOP["outlier"] = torch.cat([sample("gaussian", 1_000), torch.tensor([1e12])])
# no threshold finds between 100 and 200 of the first thousand
TOP["plateau"] = torch.tensor([0.1, -1.0, 0.1]).repeat_interleave(torch.tensor([50, 900, 50]))
CONTINUOUS = [name for name in SAMPLERS if not name.startswith("zeros")]


@pytest.mark.parametrize("method", ["search", "trim"])
@pytest.mark.parametrize("name", TOP)
def test_result_is_top_k(name: str, method: Method) -> None:
    x = TOP[name]
    for density in (0.5, 0.1, 0.05, 0.001):
        segments = span_segments(len(x), min(int(density * len(x)), int(x.count_nonzero())))
        selection = RedSync(method).select(x, segments, 0)
        assert torch.equal(selection.indices, segmented_view(x, segments).top().indices)


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
def test_density_out_of_reach_takes_non_zeros(method: Method) -> None:
    x = sample("laplace", 1_000)
    tau = RedSync(method).thresholds(segmented_view(x, span_segments(1_000, 600)), 0)
    assert float(tau) == 0

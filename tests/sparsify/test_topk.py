"""Exact Top-k: what stays behind. Its contract: `test_estimators.py`; by a sort: `test_selection_properties.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion.sparsify import TopK, span_segments
from lightning_safusion.sparsify.base import Segments, element_quota


def samples(name: str) -> Tensor:
    rng = np.random.default_rng(7)
    sign = rng.choice([-1.0, 1.0], 1_000_000)
    values = {
        "gaussian": lambda: rng.standard_normal(1_000_000),
        "laplace": lambda: sign * rng.exponential(1, 1_000_000),
        "uniform": lambda: rng.uniform(-1, 1, 1_000_000),
    }[name]()
    return torch.from_numpy(values.astype(np.float32))


# Population values of ||x - TopK(x)||^2 / ||x||^2: 1 - 2 [t phi(t) + 1 - Phi(t)], 1 - d (1 + L + L^2 / 2), (1 - d)^3.
RESIDUAL_ENERGY = {
    "gaussian": {0.1: 0.560714, 0.01: 0.915508, 0.001: 0.987304},
    "laplace": {0.1: 0.404647, 0.01: 0.837910, 0.001: 0.968234},
    "uniform": {0.1: 0.729, 0.01: 0.970299, 0.001: 0.997003},
}


@pytest.mark.parametrize("name", RESIDUAL_ENERGY)
def test_energy_that_stays_behind_is_the_population_value(name: str) -> None:
    x = samples(name)
    for density, expected in RESIDUAL_ENERGY[name].items():
        values = TopK().select(x, span_segments(len(x), element_quota(len(x), density)), 0).values
        left = 1 - float(values.double().square().sum() / x.double().square().sum())
        assert left == pytest.approx(expected, rel=0.01)


def test_every_tensor_sends_something_ahead_of_fusion() -> None:
    sizes = [3, 1, 50_000, 0, 40]
    quotas = np.array([min(s, element_quota(s, 0.001)) for s in sizes])
    segments = Segments(np.cumsum([0, *sizes]), quotas, tuple(range(5)), tuple((s,) for s in sizes))
    x = torch.zeros(segments.numel)
    x[4:50_004] = 1.0  # behind fusion the large tensor would take all the room
    selection = TopK().select(x, segments, 0)
    owners = np.searchsorted(segments.edges, selection.indices.numpy(), side="right") - 1
    assert np.bincount(owners, minlength=5).tolist() == [1, 1, 50, 0, 1]

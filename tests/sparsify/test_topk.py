from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion.sparsify import TopK, span_segments
from lightning_safusion.sparsify.base import Segments, element_quota

N = 200_000


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


@pytest.mark.parametrize("density", [0.5, 0.05, 0.001])
def test_contraction_and_threshold_consistency(density: float) -> None:
    x = torch.randn(N, generator=torch.Generator().manual_seed(1)) ** 3
    k = element_quota(N, density)
    selection = TopK().select(x, span_segments(N, k), 0)
    assert selection.count == k
    assert (selection.indices.diff() > 0).all()
    rest = x.clone()
    rest[selection.indices] = 0
    assert rest.double().square().sum() <= (1 - k / N) * x.double().square().sum() * (1 + 1e-6)
    assert selection.values.abs().min() >= rest.abs().max()


def test_contraction_is_an_equality_for_constant_magnitude() -> None:
    x = torch.where(torch.arange(N) % 3 == 0, 2.0, -2.0)
    selection = TopK().select(x, span_segments(N, 500), 0)
    assert selection.indices.tolist() == list(range(500))


def test_everything_is_the_identity() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    selection = TopK().select(x, span_segments(1000, 1000), 0)
    assert torch.equal(selection.values, x)


@pytest.mark.parametrize("exponent", [-20, 1, 12])
def test_scale_and_sign_equivariance(exponent: int) -> None:
    x = torch.randn(N, generator=torch.Generator().manual_seed(3))
    a = TopK().select(x, span_segments(N, 700), 0)
    b = TopK().select(-x * 2.0**exponent, span_segments(N, 700), 0)
    assert torch.equal(a.indices, b.indices)
    assert torch.equal(-a.values * 2.0**exponent, b.values)


def test_permutation_equivariance() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randperm(N, generator=generator).float() - N // 3  # no two magnitudes above the threshold are equal
    order = torch.randperm(N, generator=generator)
    a = TopK().select(x, span_segments(N, 2000), 0)
    b = TopK().select(x[order].contiguous(), span_segments(N, 2000), 0)
    assert set(order[b.indices].tolist()) == set(a.indices.tolist())


def test_every_tensor_sends_something_ahead_of_fusion() -> None:
    sizes = [3, 1, 50_000, 0, 40]
    quotas = np.array([min(s, element_quota(s, 0.001)) for s in sizes])
    segments = Segments(np.cumsum([0, *sizes]), quotas, tuple(range(5)), tuple((s,) for s in sizes))
    x = torch.zeros(segments.numel)
    x[4:50_004] = 1.0  # behind fusion the large tensor would take all the room
    selection = TopK().select(x, segments, 0)
    owners = np.searchsorted(segments.edges, selection.indices.numpy(), side="right") - 1
    assert np.bincount(owners, minlength=5).tolist() == [1, 1, 50, 0, 1]

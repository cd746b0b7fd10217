"""Symmetric distributions with known tails: samplers, and exact figures to test estimators against.

``TAIL_THRESHOLDS`` holds the threshold that leaves a share ``DENSITIES`` of the magnitudes; ``MOMENTS`` the mean and
the standard deviation of the magnitudes and the distributions fitted to them. All figures are those of the
distributions, not of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.sparsify.base import span_segments
from lightning_safusion.sparsify.selection.select import ThresholdSparsifier, segmented_view

DENSITIES = (0.1, 0.05, 0.01, 0.001)
NUMEL = 1_000_000  # elements of a large sample


def _signed(magnitudes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return magnitudes * rng.choice([-1.0, 1.0], len(magnitudes))


def _gpareto(shape: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, n: _signed((rng.uniform(size=n) ** -shape - 1) / shape, rng)


def _mostly_zero(rng: np.random.Generator, values: np.ndarray) -> np.ndarray:
    return np.where(rng.uniform(size=len(values)) < 0.9, 0.0, values)


SAMPLERS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "gaussian": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: _signed(rng.exponential(size=n), rng),
    "gamma": lambda rng, n: _signed(rng.gamma(0.5, size=n), rng),
    "gpareto10": _gpareto(0.1),
    "gpareto25": _gpareto(0.25),
    "gpareto40": _gpareto(0.4),
    "student5": lambda rng, n: rng.standard_t(5, n),
    "student3": lambda rng, n: rng.standard_t(3, n),
    "uniform": lambda rng, n: rng.uniform(-1, 1, n),
    "zeros_gaussian": lambda rng, n: _mostly_zero(rng, rng.standard_normal(n)),
    "zeros_laplace": lambda rng, n: _mostly_zero(rng, _signed(rng.exponential(size=n), rng)),
}


def sample(name: str, numel: int, seed: int = 0) -> Tensor:
    """float32 [numel], a seeded sample."""
    return torch.from_numpy(SAMPLERS[name](np.random.default_rng(seed), numel).astype(np.float32))


@cache
def large_sample(name: str) -> Tensor:
    """float32 [NUMEL], drawn once; not to be changed."""
    return sample(name, NUMEL)


TAIL_THRESHOLDS: dict[str, tuple[float, float, float, float]] = {
    "gaussian": (1.644854, 1.959964, 2.575829, 3.290527),
    "gamma": (1.352772, 1.920729, 3.317448, 5.413783),
    "gpareto10": (2.589254, 3.492828, 5.848932, 9.952623),
    "gpareto25": (3.113118, 4.458970, 8.649111, 18.493653),
    "gpareto40": (3.779716, 5.786135, 13.273934, 37.122330),
    "uniform": (0.9, 0.95, 0.99, 0.999),
}


class Moments(NamedTuple):
    """Mean and deviation of the magnitudes; shape and scale of the fitted Pareto and gamma distributions."""

    mean: float
    std: float
    gpareto: tuple[float, float]
    gamma: tuple[float, float]


MOMENTS: dict[str, Moments] = {
    "gaussian": Moments(0.797885, 0.602810, (-0.37597, 1.097865), (1.35509, 0.588805)),
    "laplace": Moments(1.0, 1.0, (0.0, 1.0), (0.990942, 1.009140)),
    "gamma": Moments(0.5, 0.707107, (0.25, 0.375), (0.493026, 1.014146)),
    "gpareto25": Moments(1.333333, 1.885618, (0.25, 1.0), (0.798095, 1.670645)),
    "student3": Moments(1.102658, 1.335719, (0.15926, 0.927047), (1.037865, 1.062429)),
    "uniform": Moments(0.5, 0.288675, (-1.0, 1.0), (1.769695, 0.282535)),
}


def found_ratio(sparsifier: ThresholdSparsifier, x: Tensor, density: float, step: int = 0) -> float:
    """Elements of ``x`` beyond the estimated threshold, before any cut, as a multiple of the quota."""
    quota = int(density * x.numel() + 1e-6)
    view = segmented_view(x, span_segments(x.numel(), quota))
    return view.count_above(sparsifier.thresholds(view, step)).item() / quota


def check_found(sparsifier: ThresholdSparsifier, name: str, density: float, expected: float) -> None:
    """Of a large sample ``expected`` quotas are found, but for five standard deviations of a count, and 3 %."""
    found = found_ratio(sparsifier, large_sample(name), density)
    tolerance = 5 * (expected / (density * NUMEL)) ** 0.5 + 0.03 * expected
    assert abs(found - expected) <= tolerance, (name, density, found, expected)

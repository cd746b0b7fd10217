"""Times that differ between workers and between iterations: drawn from a seed, and what workers make of them."""

from __future__ import annotations

from math import log1p, sqrt

import numpy as np

from lightning_safusion.simulate.cluster import Cluster
from lightning_safusion.simulate.trace import Trace


def draw_factors(cluster: Cluster, iteration: int, workers: int, tensors: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors on the times of an iteration: of each worker [workers], and of each of its gradients [workers, L]."""
    # windows before the first iteration have negative numbers, which a seed cannot have
    rng = np.random.default_rng([cluster.seed, int(iteration < 0), abs(iteration)])
    return lognormal(rng, cluster.jitter, (workers,)), lognormal(rng, cluster.jitter, (workers, tensors))


def lognormal(rng: np.random.Generator, deviation: float, shape: tuple[int, ...]) -> np.ndarray:
    """Factors with mean 1 and a relative standard deviation; lognormal, since times and sizes are not negative."""
    sigma = sqrt(log1p(deviation**2))
    return rng.lognormal(-(sigma**2) / 2, sigma, shape)


def agreed_backward(trace: Trace, cluster: Cluster, windows: int = 11) -> np.ndarray:
    """Backward times as the workers of a running job agree on them, seconds [L].

    Every worker takes the median over its latest windows, and the slowest one counts, gradient by gradient.
    """
    nominal = np.array([tensor.backward for tensor in trace.tensors])
    if cluster.jitter == 0:
        return nominal
    draws = [draw_factors(cluster, -1 - window, cluster.workers, len(nominal)) for window in range(windows)]
    ready = np.array([np.cumsum(nominal * pace[:, None] * noise, axis=1) for pace, noise in draws])
    return np.diff(np.median(ready, axis=0).max(axis=0), prepend=0.0)

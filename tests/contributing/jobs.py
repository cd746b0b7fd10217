"""A job of three workers in one process, without a model."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.cluster import Cluster, settings
from tests.models import equal


def exchanged(collective: str, wire: str = "auto") -> tuple[list[list[Tensor]], float]:
    """Means of three windows, and the largest share of a gradient that was neither delivered nor kept."""
    cluster = Cluster(3, lambda: settings(collective=collective, density=0.05, wire=wire))
    total = [torch.zeros(spec.numel, dtype=torch.float64) for spec in cluster.specs]
    means = []
    for step in range(3):
        grads = cluster.random_grads(step)
        results = cluster.step(grads)
        assert all(equal(results[0], other) for other in results[1:])
        for index in range(len(total)):
            total[index] += sum(rank[index].double() for rank in grads) - 3 * results[0][index].double()
        means.append(results[0])
    kept = [sum(cluster.residual(rank, index) for rank in range(3)) for index in range(len(total))]
    scale = max(float(each.abs().max()) for each in kept if len(each))
    lost = max(float((a - b).abs().max()) / scale for a, b in zip(total, kept, strict=True) if len(a))
    cluster.close()
    return means, lost

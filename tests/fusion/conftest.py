"""Clusters of virtual workers, which end with the test; some whose device decides, with kernels; and a fake device."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import Any

import pytest
import torch

from tests.cluster import Cluster, settings
from tests.cuda import fake_cuda, read_nothing
from tests.fusion.windows import Make


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes clusters, from their arguments and those of their settings."""
    clusters: list[Cluster] = []

    def build(world_size: int = 2, tensors: Any = None, **options: Any) -> Cluster:
        parts = {name: options.pop(name) for name in ("measure", "deferred", "nodes") if name in options}
        clusters.append(Cluster(world_size, lambda: settings(**options), tensors, **parts))
        return clusters[-1]

    yield build
    for cluster in clusters:
        for engine in cluster.engines:
            engine.launching.release()
        cluster.close()


@pytest.fixture
def make_fused(make: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes clusters; those whose device decides, or with ``kernels=True``, have kernels.

    Triton's interpreter runs them, which one thread may use.
    """
    pytest.importorskip("triton")
    from lightning_safusion.kernels.cuda import launch

    start, lock = launch.launch, Lock()

    def alone(*arguments: Any, **constants: Any) -> None:
        with lock:
            start(*arguments, **constants)

    monkeypatch.setattr(launch, "launch", alone)

    def build(*arguments: Any, deferred: bool = False, kernels: bool | None = None, **options: Any) -> Cluster:
        cluster = make(*arguments, deferred=deferred, **options)
        for engine in cluster.engines:
            engine.fused.serves = deferred if kernels is None else kernels
        return cluster

    return build


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A CUDA device of fake tensors, which fail where the host would wait for it."""
    read_nothing(monkeypatch)
    with fake_cuda(monkeypatch) as fake:
        yield fake

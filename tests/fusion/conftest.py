"""Clusters of virtual workers, which end with the test; and some whose device decides, with kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any

import pytest

from lightning_safusion.fusion.layout import TensorSpec
from tests.cluster import Cluster, settings


@pytest.fixture
def make() -> Iterator[Callable[..., Cluster]]:
    """Makes clusters, from their arguments and those of their settings."""
    clusters: list[Cluster] = []

    def build(
        world_size: int = 2,
        tensors: Sequence[TensorSpec] | None = None,
        *,
        measure: bool = False,
        deferred: bool = False,
        nodes: Sequence[int] | None = None,
        **options: Any,
    ) -> Cluster:
        parts: dict[str, Any] = {"measure": measure, "deferred": deferred, "nodes": nodes}
        clusters.append(Cluster(world_size, lambda: settings(**options), tensors, **parts))
        return clusters[-1]

    yield build
    for cluster in clusters:
        cluster.close()


@pytest.fixture
def make_fused(make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cluster]:
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

"""Clusters whose device decides, with kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any

import pytest

from lightning_safusion.fusion import fused
from tests.cluster import Cluster, settings


@pytest.fixture
def make_fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters; those whose device decides have kernels, in Triton's interpreter, which one thread may use."""
    pytest.importorskip("triton")
    from lightning_safusion.kernels.cuda import buffer

    clusters: list[Cluster] = []
    launch, lock = buffer.launch, Lock()

    def alone(*arguments: Any, **constants: Any) -> None:
        with lock:
            launch(*arguments, **constants)

    monkeypatch.setattr(buffer, "launch", alone)
    monkeypatch.setattr(fused, "serves_buffers", lambda device: True)

    def build(world_size: int, tensors: Any, deferred: bool = True, **options: Any) -> Cluster:
        clusters.append(Cluster(world_size, lambda: settings(**options), tensors, deferred=deferred))
        return clusters[-1]

    yield build
    for cluster in clusters:
        cluster.close()

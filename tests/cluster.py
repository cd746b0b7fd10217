"""n virtual workers in one process, each with an engine of its own: the whole path without processes or a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.virtual.transport import local_transports
from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.layout import TensorSpec
from lightning_safusion.fusion.plans.registry import resolve_fusion
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.sparsify import resolve_density, resolve_memory, resolve_sparsifier
from tests.models import equal

#: Uneven on purpose: norms and biases, an empty tensor, one element, and sizes on both sides of 64 Ki.
SHAPES = ((40, 30), (40,), (1,), (64, 9, 3), (64,), (0,), (300, 230), (230,), (7, 11), (3,))


def settings(
    compressor: Any = "topk", density: Any = 0.05, fusion: Any = "aligned", memory: Any = "residual", **options: Any
) -> EngineSettings:
    parts = resolve_sparsifier(compressor), resolve_density(density), resolve_fusion(fusion), resolve_memory(memory)
    return EngineSettings(*parts, **options)


def specs(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32, dense: Sequence[int] = ()
) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", i, shape, int(np.prod(shape)), dtype, i in dense) for i, shape in enumerate(shapes)]


class Cluster:
    """Engines of ``world_size`` workers over in-process transports.

    Args:
        world_size: Workers.
        make_settings: Called once per worker: parts hold state.
        tensors: The gradients' description.
        order: Registration indices in ready order; the reverse of registration by default.
        measure: Plan with measured times.
        deferred: Let the device decide at the end of a window, as on CUDA.
        nodes: Node of every rank.
    """

    def __init__(
        self,
        world_size: int,
        make_settings: Callable[[], EngineSettings],
        tensors: Sequence[TensorSpec] | None = None,
        order: Sequence[int] | None = None,
        measure: bool = False,
        deferred: bool = False,
        nodes: Sequence[int] | None = None,
    ) -> None:
        self.specs = list(tensors if tensors is not None else specs())
        self.order = list(order if order is not None else reversed(range(len(self.specs))))
        self.transports = local_transports(world_size, timeout=60.0)
        self.pool = ThreadPoolExecutor(world_size)
        self.settings = [make_settings() for _ in range(world_size)]

        def build(rank: int) -> Engine:
            traits = JobTraits(measure=measure, deferred=deferred, node=nodes[rank] if nodes is not None else None)
            return build_engine(self.settings[rank], self.specs, self.transports[rank], torch.device("cpu"), traits)

        self.engines: list[Engine] = self.each(build)

    def each(self, fn: Callable[[int], Any]) -> list[Any]:
        return list(self.pool.map(fn, range(len(self.transports))))

    def errors(self, grads: Sequence[Sequence[Tensor]]) -> list[list[str]]:
        """What each of two ranks is told of a window in which the last one fails; the first hears of it in the next."""

        def run(rank: int) -> list[str]:
            heard = []
            for _ in range(2 - rank):
                try:
                    self.window(rank, grads)
                except (RuntimeError, ValueError) as error:
                    heard.append(str(error))
            return heard

        return self.each(run)

    def step(
        self,
        grads: Sequence[Sequence[Tensor]],
        fresh: Sequence[Sequence[bool]] | None = None,
        order: Sequence[int] | None = None,
    ) -> list[list[Tensor]]:
        """What each rank's gradients become in one window.

        ``grads`` (flat, not changed) and ``fresh`` are by rank and registration index, ``order`` is that of arrival.
        """
        return self.each(lambda rank: self.window(rank, grads, fresh, order))

    def window(
        self,
        rank: int,
        grads: Sequence[Sequence[Tensor]],
        fresh: Sequence[Sequence[bool]] | None = None,
        order: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """The part of one rank in :meth:`step`."""
        mine, engine = [grad.clone() for grad in grads[rank]], self.engines[rank]
        for index in order if order is not None else self.order:
            engine.push(index, mine[index], fresh[rank][index] if fresh is not None else True)
        engine.drain()
        return mine

    def random_grads(self, seed: int) -> list[list[Tensor]]:
        """Heavy-tailed gradients of very different scales, as real ones are."""
        generator = torch.Generator().manual_seed(seed)

        def random(spec: TensorSpec) -> Tensor:
            scale = 10.0 ** (spec.index % 4 - 2)
            return (torch.randn(spec.numel, generator=generator) ** 3 * scale).to(spec.dtype)

        return [[random(spec) for spec in self.specs] for _ in self.transports]

    def residual(self, rank: int, index: int) -> Tensor:
        """What a rank still holds back of a tensor, float64."""
        layout = self.engines[rank].space.layout
        place = layout.places[index]
        start, stop = int(layout.edges[place]), int(layout.edges[place + 1])
        return self.settings[rank].memory.accumulated(start, stop).double()

    def residuals(self) -> list[Tensor]:
        """Copies of what all ranks hold back of all tensors."""
        ranks, indices = range(len(self.transports)), range(len(self.specs))
        return [self.residual(rank, index).clone() for rank in ranks for index in indices]

    def close(self) -> None:
        self.pool.shutdown()


def conserved(
    cluster: Cluster, steps: int = 6, fresh: Callable[[int], Sequence[Sequence[bool]] | None] = lambda step: None
) -> tuple[list[Tensor], list[Tensor]]:
    """Sum over steps of world_size * update plus residuals, and the sum of all gradients, float64, by tensor.

    ``fresh`` says, of a step, by rank and registration index, which gradients there are; None: all.
    """
    n, places = len(cluster.transports), range(len(cluster.specs))
    done = [torch.zeros(s.numel, dtype=torch.float64) for s in cluster.specs]
    given = [torch.zeros(s.numel, dtype=torch.float64) for s in cluster.specs]
    for step in range(steps):
        grads, flags = cluster.random_grads(step), fresh(step)
        if flags is not None:
            grads = [[x * flag for x, flag in zip(*own, strict=True)] for own in zip(grads, flags, strict=True)]
        means = cluster.step(grads, flags)
        assert all(equal(means[0], other) for other in means[1:]), "replicas differ"
        for i in places:
            done[i] += n * means[0][i].double()
            given[i] += sum(mine[i].double() for mine in grads)
    return [done[i] + sum(cluster.residual(rank, i) for rank in range(n)) for i in places], given


def assert_conserved(
    cluster: Cluster, steps: int = 5, fresh: Callable[[int], Sequence[Sequence[bool]] | None] = lambda step: None
) -> None:
    """Replicas are equal, and all gradients are in the updates or in a residual; ``fresh``: as of :func:`conserved`."""
    done, given = conserved(cluster, steps, fresh)
    for spec, a, b in zip(cluster.specs, done, given, strict=True):
        bound = 2e-5 * max(float(b.abs().max()) if b.numel() else 1.0, 1e-30)
        torch.testing.assert_close(a, b, rtol=0, atol=bound, msg=lambda m, name=spec.name: f"{name}: {m}")

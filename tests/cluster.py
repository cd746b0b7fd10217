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

#: Uneven on purpose: norms and biases, an empty tensor, one element, and sizes on both sides of 64 Ki.
SHAPES: tuple[tuple[int, ...], ...] = (
    (40, 30),
    (40,),
    (1,),
    (64, 9, 3),
    (64,),
    (0,),
    (300, 230),
    (230,),
    (7, 11),
    (3,),
)


def settings(
    compressor: Any = "topk",
    density: Any = 0.05,
    fusion: Any = "aligned",
    memory: Any = "residual",
    **options: Any,
) -> EngineSettings:
    """Settings from names."""
    return EngineSettings(
        resolve_sparsifier(compressor),
        resolve_density(density),
        resolve_fusion(fusion),
        resolve_memory(memory),
        **options,
    )


def specs(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32, dense: Sequence[int] = ()
) -> list[TensorSpec]:
    """Tensors ``t0``, ``t1``, ... of these shapes."""
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
        self.engines: list[Engine] = self.each(
            lambda rank: build_engine(
                self.settings[rank],
                self.specs,
                self.transports[rank],
                torch.device("cpu"),
                JobTraits(measure=measure, deferred=deferred, node=nodes[rank] if nodes is not None else None),
            )
        )

    def each(self, fn: Callable[[int], Any]) -> list[Any]:
        """Calls ``fn(rank)`` on every worker at once."""
        return list(self.pool.map(fn, range(len(self.transports))))

    def errors(self, grads: Sequence[Sequence[Tensor]]) -> list[list[str]]:
        """What each of two ranks is told of a window in which the last one fails; the first hears of it in the next."""

        def run(rank: int) -> list[str]:
            heard = []
            for _ in range(2 - rank):
                try:
                    for index in self.order:
                        self.engines[rank].push(index, grads[rank][index].clone())
                    self.engines[rank].drain()
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
        """One backward window.

        Args:
            grads: By rank and registration index, flat; not changed.
            fresh: By rank and registration index.
            order: Registration indices in the order of arrival.

        Returns:
            What each rank's gradients became.
        """

        def run(rank: int) -> list[Tensor]:
            mine = [grad.clone() for grad in grads[rank]]
            engine = self.engines[rank]
            for index in order if order is not None else self.order:
                engine.push(index, mine[index], fresh[rank][index] if fresh is not None else True)
            engine.drain()
            return mine

        return self.each(run)

    def random_grads(self, seed: int) -> list[list[Tensor]]:
        """Heavy-tailed gradients of very different scales, as real ones are."""
        generator = torch.Generator().manual_seed(seed)
        return [
            [
                (torch.randn(s.numel, generator=generator) ** 3 * 10.0 ** (s.index % 4 - 2)).to(s.dtype)
                for s in self.specs
            ]
            for _ in self.transports
        ]

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
        """Ends the threads."""
        self.pool.shutdown()


def conserved(cluster: Cluster, steps: int = 6) -> tuple[list[Tensor], list[Tensor]]:
    """Sum over steps of world_size * update plus residuals, and the sum of all gradients, float64, by tensor."""
    n = len(cluster.transports)
    done = [torch.zeros(s.numel, dtype=torch.float64) for s in cluster.specs]
    given = [torch.zeros(s.numel, dtype=torch.float64) for s in cluster.specs]
    for step in range(steps):
        grads = cluster.random_grads(step)
        means = cluster.step(grads)
        for rank in range(1, n):
            assert all(torch.equal(a, b) for a, b in zip(means[0], means[rank], strict=True)), "replicas differ"
        for i in range(len(cluster.specs)):
            done[i] += n * means[0][i].double()
            given[i] += sum(grads[rank][i].double() for rank in range(n))
    for i in range(len(cluster.specs)):
        done[i] += sum(cluster.residual(rank, i) for rank in range(n))
    return done, given


def assert_conserved(cluster: Cluster, steps: int = 5) -> None:
    """Replicas are equal, and all gradients are in the updates or in a residual."""
    done, given = conserved(cluster, steps)
    for spec, a, b in zip(cluster.specs, done, given, strict=True):
        scale = float(b.abs().max()) if b.numel() else 1.0
        torch.testing.assert_close(
            a, b, rtol=0, atol=2e-5 * max(scale, 1e-30), msg=lambda m, name=spec.name: f"{name}: {m}"
        )

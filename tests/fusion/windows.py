"""What tests of the engine do in windows: of virtual workers, of one engine, and of a device that is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.comm.transport.torch_backend import SoloTransport
from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.fusion.layout import TensorSpec
from lightning_safusion.sparsify import Segments, Selection, TopK
from lightning_safusion.sparsify.selection.survey import Selector
from lightning_safusion.sparsify.selection.units import Moment, UpdateUnits
from tests.cluster import Cluster, settings, specs

Make = Callable[..., Cluster]
DEFERRED = JobTraits(measure=False, deferred=True)
#: For the fake device, on which every operation takes a millisecond.
FEW = ((40, 30), (40,), (1,), (0,), (90, 70), (7, 11))


def random_window(cluster: Cluster, seed: int) -> list[list[Tensor]]:
    """What random gradients become, by rank."""
    return cluster.step(cluster.random_grads(seed))


def train(cluster: Cluster, last: int, first: int = 0) -> list[list[Tensor]]:
    """Random windows by their numbers: what the gradients of the last one have become."""
    means: list[list[Tensor]] = []
    for step in range(first, last):
        means = random_window(cluster, step)
    return means


def finite(grads: Any) -> bool:
    """Whether all elements of lists of tensors are."""
    return bool(flat(grads).isfinite().all())


def flat(grads: Any) -> Tensor:
    """All elements of a tensor, or of lists of them, float64."""
    return grads.double().flatten() if isinstance(grads, Tensor) else torch.cat([flat(each) for each in grads])


def attempt(cluster: Cluster, grads: Sequence[Sequence[Tensor]], order: Sequence[int] | None = None) -> list[str]:
    """One window of gradients by rank: the error that each rank has raised, or nothing."""

    def run(rank: int) -> str:
        try:
            cluster.window(rank, grads, order=order)
        except Exception as error:
            return str(error)
        return ""

    return cluster.each(run)


def assert_seen_and_kept(cluster: Cluster, tensor: int, bad: dict[int, float]) -> None:
    """Elements of one tensor of the second rank that are not finite are seen by all ranks, and poison nothing.

    Nothing leaves the residuals, and every finite gradient is in them; the next window is as others.
    """
    before, grads = cluster.residuals(), cluster.random_grads(9)
    for element, value in bad.items():
        grads[1][tensor][element] = value
    for own in cluster.step(grads):
        assert [i for i, mean in enumerate(own) if not finite(mean)] == [tensor]
    grads[1][tensor].zero_()
    torch.testing.assert_close(flat(cluster.residuals()), flat(before) + flat(grads), rtol=1e-5, atol=1e-5)
    assert finite(random_window(cluster, 10))


class Failing(TopK):
    """Fails on demand."""

    fail = False

    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:
        if self.fail:
            raise ValueError(f"no selection in step {step}")
        return super().select(x, segments, step)


def failing(engine: Engine) -> Failing:
    """A compressor that fails on demand, from now on the engine's."""
    compressor = Failing()
    engine.space.selector = Selector(compressor)
    return compressor


def unreadable(indices: Sequence[int]) -> list[Moment | None]:
    """In place of second moments."""
    raise ValueError(f"no second moment of tensor {indices[0]}")


class Clock:
    """Seconds, which pass only where a test says so."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def now(self) -> float:
        return self.seconds

    def pause(self, seconds: float) -> None:
        self.seconds += seconds


def observed(engine: Engine) -> list[WindowEvents]:
    """The events of all windows from now on."""
    seen: list[WindowEvents] = []
    engine.observers.append(SimpleNamespace(observe=seen.append))
    return seen


def engine_on(
    device: torch.device,
    transport: Transport | None = None,
    tensors: Sequence[TensorSpec] | None = None,
    traits: JobTraits = DEFERRED,
    **options: Any,
) -> Engine:
    """An engine of few tensors, alone if no transport is given; of settings with an all-gather by default."""
    chosen = settings(**({"collective": "allgather"} | options))
    return build_engine(chosen, tensors or specs(FEW), transport or SoloTransport(), device, traits)


def push(engine: Engine, *indices: int) -> None:
    """Gradients of nothing, of tensors by their indices."""
    for index in indices:
        spec = next(spec for spec in engine.space.layout.specs if spec.index == index)
        engine.push(index, torch.zeros(spec.numel, device=engine.space.device, dtype=spec.dtype))


def windows(engine: Engine, number: int = 4) -> None:
    """Windows of gradients of nothing."""
    for _ in range(number):
        push(engine, *reversed(range(len(engine.space.layout))))
        engine.drain()


def compare_by_update(engine: Engine) -> None:
    """Gives every tensor a second moment."""
    tensors = engine.space.layout.specs
    moments = {spec.index: Moment(torch.zeros(spec.numel, device=engine.space.device), 1e-8) for spec in tensors}
    engine.space.compare_in(UpdateUnits(lambda indices: [moments[index] for index in indices], engine.space.device))

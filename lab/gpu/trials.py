"""Trainings of byte-level transformers on one device, by virtual workers: sizes, systems, curves."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lab.convergence.scheme import Scheme
from lab.convergence.training import averager_of, make_optimizers
from lab.gpu.device import Device
from lab.tasks import Task
from lab.tasks.deep import BytePredictor, Shape
from lab.tasks.sources import Sources, source_files, source_roots, split_text
from lab.virtual.batched import BatchedTraining
from lab.virtual.workers import Averager, Engines
from lightning_safusion.fusion.layout import specs_from_parameters

#: Virtual workers, and those of a rehearsal.
WORKERS, _REHEARSED = 8, 2
# Points of a curve, and samples of the held-out text in a rehearsal.
_POINTS, _FEW = 10, 16
# The parts of the default system, with all tensors in one buffer.
_DEFAULT = Scheme("auto", memory="auto", wire="q4", degree=0, workers=WORKERS)


@dataclass(frozen=True)
class Size:
    """A model, and how it is trained.

    Args:
        shape: Of the transformer.
        sequences: Of a worker's batch.
        steps: Optimizer steps; a tenth of them warm up, then the learning rate falls to zero along a cosine.
        rates: Largest learning rates, the likeliest first.
    """

    shape: Shape
    sequences: int
    steps: int
    rates: tuple[float, ...]


#: 25.4 and 111 million parameters.
SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "25M": Size(Shape(512, 8, 8, 256), 8, 1500, (1e-3, 2e-3, 5e-4)),
        "110M": Size(Shape(960, 10, 15, 256), 8, 1000, (6e-4,)),
    }
)
_TINY = Shape(16, 1, 2, 8)
#: Ways to average. DeMo sends 32 of each chunk of 64 x 64, as its paper.
SYSTEMS: Mapping[str, Scheme] = MappingProxyType(
    {
        "dense": Scheme("dense", workers=WORKERS),
        "2 %": replace(_DEFAULT, density=0.02),
        "1 %": replace(_DEFAULT, density=0.01),
        "PowerSGD rank 4": Scheme("powersgd", rank=4, workers=WORKERS),
        "DeMo": Scheme("demo", density=32 / 4096, workers=WORKERS),
    }
)


class Trial(NamedTuple):
    """A training of the comparison.

    Args:
        size: Of :data:`SIZES`.
        system: Of :data:`SYSTEMS`.
        seed: Of weights and batches.
        lr: Largest learning rate.
    """

    size: str
    system: str
    seed: int
    lr: float

    def __str__(self) -> str:
        return f"{self.size}, {self.system}, seed {self.seed}, rate {self.lr:g}"


@dataclass(frozen=True)
class Outcome:
    """What became of a trial; plain numbers.

    Args:
        loss: Of the held-out text after the last step, nats per byte; None if the training diverged.
        curve: Steps so far, mean training loss since the last point, and held-out loss, by point.
        seconds: It took.
        nbytes: That a worker sends in a step: in the last one; mean of all.
    """

    loss: float | None
    curve: list[tuple[int, float, float]]
    seconds: float
    nbytes: tuple[int, float]


class _FewSources(Sources):
    """A little text of Python alone, for a rehearsal."""

    def texts(self) -> tuple[Tensor, Tensor]:
        return split_text(source_files(source_roots()[:1]), 1 << 16, 1 << 13)


@dataclass
class Job:
    """A training that is ready to begin.

    Args:
        training: Makes gradients.
        averager: Makes their mean.
        optimizers: Step along it.
        lr: Largest learning rate.
    """

    training: BatchedTraining
    averager: Averager
    optimizers: list[Optimizer]
    lr: float

    def step(self, number: int) -> Tensor:
        """Trains for one step; its loss, on the device."""
        return self.training.step(number, self.averager, self.optimizers, self.lr)


@contextmanager
def job(place: Device, trial: Trial, steps: int) -> Iterator[Job]:
    """Makes the job of a trial, in the memory of the last one; ends its threads.

    Args:
        place: Where it runs; on the CPU a tiny model stands for all.
        trial: What is trained.
        steps: Of the whole training.
    """
    place.clear()
    size, workers = SIZES[trial.size], WORKERS if place.cuda else _REHEARSED
    shape, sequences = (size.shape, size.sequences) if place.cuda else (_TINY, 1)
    scheme = replace(SYSTEMS[trial.system], workers=workers)
    task = Task(
        f"bytes-{trial.size}",
        partial(BytePredictor, shape, torch.bfloat16),
        Sources,
        "loss",
        "adamw",
        lr=trial.lr,
        steps=steps,
        batch=workers * sequences,
        weight_decay=0.1,
        warmup=0.1,
        precision="bf16",
    )
    text = Sources(trial.seed, task.batch) if place.cuda else _FewSources(trial.seed, task.batch, shape.length, _FEW)
    training = BatchedTraining(task, text, workers, place.device)
    specs = specs_from_parameters(training.model.named_parameters())
    optimizers = make_optimizers(task, scheme, training.params)
    with closing(averager_of(task, scheme, specs, training.order, optimizers, place.device, deferred=True)) as averager:
        averager.carry_momentum(optimizers, training.params)
        for engine in averager.by_worker if isinstance(averager, Engines) else ():
            engine.fused.serves = True  # in the interpreter too
        yield Job(training, averager, optimizers, trial.lr)


def trained(place: Device, trial: Trial, steps: int, curves: Path | None = None, points: int = _POINTS) -> Outcome:
    """Trains once.

    Args:
        place: The device.
        trial: What is trained.
        steps: For so many.
        curves: Takes every point as it comes, a line of comma-separated values each.
        points: Of the curve.
    """
    curve: list[tuple[int, float, float]] = []
    with job(place, trial, steps) as ready:
        begin, losses, nbytes, last = time.perf_counter(), torch.zeros(steps, device=place.device), 0, 0
        for stop in sorted({math.ceil(steps * (point + 1) / points) for point in range(points)}):
            for number in range(last, stop):
                losses[number] = ready.step(number)
                nbytes += ready.averager.bytes_sent
            curve.append((stop, float(losses[last:stop].mean()), ready.training.evaluate()))
            last = stop
            if curves is not None:
                _add_point(curves, trial, curve[-1])
            if not all(map(math.isfinite, curve[-1])):
                break
        usual, seconds = ready.averager.bytes_sent, time.perf_counter() - begin
    finite = [point for point in curve if all(map(math.isfinite, point))]
    return Outcome(curve[-1][2] if len(finite) == len(curve) else None, finite, seconds, (usual, nbytes / last))


def _add_point(curves: Path, trial: Trial, point: tuple[int, float, float]) -> None:
    new = not curves.exists()
    with curves.open("a", encoding="utf-8") as file:
        if new:
            file.write("size,system,seed,learning rate,step,training loss,held-out loss\n")
        values = (f"{each:.6g}" if isinstance(each, float) else str(each) for each in (*trial, *point))
        file.write(",".join(values) + "\n")

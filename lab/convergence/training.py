"""One run: a task, a scheme and a seed make a result."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from lab.convergence.adaptive import FrozenSecondMoment
from lab.convergence.scheme import STEPPING, Scheme
from lab.processes import Ledger
from lab.tasks import Task
from lab.virtual.chunks import DEMO_DECAY, DeMo, SparseLoCo
from lab.virtual.masks import Scape
from lab.virtual.powersgd import PowerSGD
from lab.virtual.training import VirtualTraining
from lab.virtual.workers import Averager, Dense, Engines, Rounded
from lightning_safusion.baselines.hooks import POWERSGD_START
from lightning_safusion.fusion.layout import TensorSpec, specs_from_parameters
from lightning_safusion.metrics import AchievedDensity, CompressionError, TensorMissingRate

# Points of the curve of the training loss, and samples of what was sent of every tensor.
_POINTS = 40
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Result:
    """The figures of a run; plain numbers.

    Args:
        metric: On held-out data after the last step; None if the training diverged (a loss that is not finite).
        curve: Training loss, mean over workers, averaged over equal parts of the run.
        missing: Share of the gradients of which nothing was sent; None where the engine has no part.
        density: Share of the elements that was sent.
        error: Share of the energy that was not sent, of sparse tensors.
        bytes_mean: Bytes that a worker sends in a step, mean over all steps.
        bytes_median: The same, of a usual step: without warm-up.
        dense_bytes: What the gradients have in float32.
        tensors: Gradient tensors.
        seconds: Of the run.
    """

    metric: float | None
    curve: list[float]
    missing: float | None
    density: float | None
    error: float | None
    bytes_mean: float
    bytes_median: float
    dense_bytes: int
    tensors: int
    seconds: float


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        task: What is trained.
        scheme: How gradients are averaged.
        seed: Of the weights and the batches.
    """

    task: Task
    scheme: Scheme
    seed: int

    @property
    def config(self) -> str:
        """Task and scheme: runs that differ in the seed only share it."""
        return f"{self.task.name}/{self.scheme.name}"

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.config}, seed {self.seed}"

    def settings(self) -> dict[str, Any]:
        """All that decides the result; plain values."""
        return {
            "task": self.task.name,
            "recipe": self.task.recipe(),
            "scheme": self.scheme.options(),
            "seed": self.seed,
        }

    def train(self) -> Result:
        """Trains once."""
        return train(self.task, self.scheme, self.seed)


def read_results(path: Path) -> Ledger[Result]:
    """The finished runs of a file; errors as of :class:`Ledger`."""
    return Ledger(path, Result, "a finished run")


def results_of(ledger: Ledger[Result], runs: Iterable[Run]) -> dict[str, dict[int, Result]]:
    """Results of those of the runs that have been done, by configuration and seed."""
    done: dict[str, dict[int, Result]] = {}
    for run in runs:
        if (result := ledger.get(run.settings())) is not None:
            done.setdefault(run.config, {})[run.seed] = result
    return done


@dataclass
class _Statistics:
    """What the callbacks of training measure, with the same metrics.

    Args:
        specs: The tensors.
    """

    specs: Sequence[TensorSpec]
    losses: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.specs]
        self._metrics = [kind(names) for kind in (TensorMissingRate, AchievedDensity, CompressionError)]
        self._sampled = False

    def sample(self, engines: Engines) -> None:
        figures = engines.figures()
        for metric in self._metrics:
            metric.update(figures)
        self._sampled = True

    def shares(self) -> dict[str, float | None]:
        values = [float(metric.compute()) if self._sampled else math.nan for metric in self._metrics]
        return {
            name: value if math.isfinite(value) else None
            for name, value in zip(("missing", "density", "error"), values, strict=True)
        }

    def curve(self) -> list[float]:
        size = max(1, math.ceil(len(self.losses) / _POINTS))
        return [round(fmean(self.losses[i : i + size]), 5) for i in range(0, len(self.losses), size)]


def train(task: Task, scheme: Scheme, seed: int) -> Result:
    """Trains once. Data and initial weights depend on the task and the seed only.

    Args:
        task: What is trained.
        scheme: How gradients are averaged.
        seed: Of the weights and the batches.
    """
    begin = time.perf_counter()
    training = VirtualTraining(task, seed, scheme.workers, scheme.shares)
    specs = specs_from_parameters(
        training.model.named_parameters(), dense_below=scheme.dense_below if scheme.sparse else 0
    )
    statistics = _Statistics(specs)
    optimizers = make_optimizers(task, scheme, training.params)
    with closing(averager_of(task, scheme, specs, training.order, optimizers)) as averager:
        _steps(scheme, training, averager, optimizers, statistics)
    metric = training.evaluate(optimizers) if math.isfinite(statistics.losses[-1]) else math.nan
    return Result(
        metric=metric if math.isfinite(metric) else None,
        curve=[point for point in statistics.curve() if math.isfinite(point)],
        **statistics.shares(),
        bytes_mean=fmean(statistics.sent),
        bytes_median=median(statistics.sent),
        dense_bytes=sum(spec.numel * spec.dtype.itemsize for spec in specs),
        tensors=len(specs),
        seconds=round(time.perf_counter() - begin, 2),
    )


def averager_of(
    task: Task,
    scheme: Scheme,
    specs: Sequence[TensorSpec],
    order: Sequence[int],
    optimizers: Sequence[torch.optim.Optimizer],
    device: torch.device = _CPU,
    deferred: bool = False,
) -> Averager:
    """What makes one gradient of those of all workers.

    Args:
        task: What is trained.
        scheme: How gradients are averaged.
        specs: The tensors.
        order: Registration indices in the order in which gradients become ready.
        optimizers: Step with that gradient.
        device: Where gradients live.
        deferred: The device ends the windows of engines, as :class:`Engines` says.
    """
    if scheme.method == "dense":
        return Dense(specs)
    if scheme.method == "bf16":
        return Rounded(specs, torch.bfloat16)
    if scheme.method == "powersgd":
        return PowerSGD(specs, order, scheme.workers, scheme.rank, POWERSGD_START, device=device)
    if scheme.method == "demo":
        return DeMo(specs, scheme.density, scheme.momentum or DEMO_DECAY)
    betas = task.momentum if scheme.momentum is None else scheme.momentum, scheme.beta2 or task.beta2
    if scheme.method == "sparseloco":
        return SparseLoCo(specs, scheme.density, betas=betas)
    if scheme.method == "scape":
        return Scape(specs, scheme.density, scheme.workers, betas)
    return Engines(lambda: scheme.settings(task.steps), specs, order, scheme.workers, device, deferred, optimizers)


def _steps(
    scheme: Scheme,
    training: VirtualTraining,
    averager: Averager,
    optimizers: Sequence[torch.optim.Optimizer],
    statistics: _Statistics,
) -> None:
    """Trains until the last step, or until the loss is not finite."""
    task = training.task
    averager.carry_momentum(optimizers, training.params)
    frozen = FrozenSecondMoment(optimizers[0], round(scheme.frozen * task.steps))
    sampled_every = max(1, task.steps // _POINTS)
    for step in range(task.steps):
        statistics.losses.append(training.step(step, averager, optimizers, task.lr * scheme.lr_scale))
        if not math.isfinite(statistics.losses[-1]):
            break
        statistics.sent.append(averager.bytes_sent)
        if isinstance(averager, Engines) and (step + 1) % sampled_every == 0:
            statistics.sample(averager)
        frozen.after_step(step)


def make_optimizers(task: Task, scheme: Scheme, params: Sequence[Tensor]) -> list[torch.optim.Optimizer]:
    """The task's optimizers with what the scheme changes of them; plain descent along steps that others have made.

    Raises:
        ValueError: If such steps would be clipped as gradients are.
    """
    if scheme.method in STEPPING:
        if task.clip is not None or task.clip_value is not None:
            raise ValueError(f"{scheme.method} makes steps, which task {task.name!r} would clip as gradients")
        return replace(task, optimizer="sgd").make_optimizers(params, task.lr * scheme.lr_scale, momentum=0.0)
    return task.make_optimizers(params, task.lr * scheme.lr_scale, scheme.momentum, scheme.beta2)

"""Trainings for a time to accuracy: rows of a benchmark with virtual workers, a metric every few steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from lab.accuracy.job import TrainedRow
from lab.tasks import Task
from lab.virtual.powersgd import PowerSGD
from lab.virtual.training import VirtualTraining
from lab.virtual.workers import Averager, Dense, Engines, Rounded
from lightning_safusion.baselines.hooks import POWERSGD_RANKS, POWERSGD_START
from lightning_safusion.comm.catalogue import find_collective
from lightning_safusion.fusion.layout import TensorSpec
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.policy import FusionPolicy
from lightning_safusion.fusion.settings import EngineSettings

# Points of a curve.
_POINTS = 40
# Settings that a plan has made use of, or that make no difference to what is sent.
_IN_THE_PLAN = ("fusion", "own_buffers", "offload")
# Hooks whose means are not plain averages.
_OTHER_MEANS = ("bf16", "fp16", *POWERSGD_RANKS)
_DENSITY = 0.01  # where a row's other settings are looked at


class Kept(FusionPolicy):
    """The buffers of another job.

    Args:
        groups: As :meth:`Plan.to_list` returns them.
    """

    name = "kept"

    def __init__(self, groups: Sequence[Sequence[Any]]) -> None:
        self.groups = groups

    def plan(self, costs: GroupCosts) -> Plan:
        return Plan.from_list(self.groups)


@dataclass(frozen=True)
class Curve:
    """The metric of a training by step.

    Args:
        steps: Optimizer steps after which the metric was taken, rising; the last one is the end.
        metrics: On held-out data; None where the training had diverged, which ends it.
        seconds: Of the training, for those who wait for it.
    """

    steps: list[int]
    metrics: list[float | None]
    seconds: float

    @property
    def metric(self) -> float | None:
        """The last one."""
        return self.metrics[-1]


@dataclass(frozen=True)
class Training:
    """One training of a row.

    Args:
        task: What is trained.
        row: With options.
        density: Of rows that have none of their own.
        workers: Virtual workers.
        seed: Of weights and batches.
        plan: Buffers, and the collective of each, of the row's real workers on the link; None where DDP did the
            exchange. With it virtual workers select as the real ones do, and plan nothing.
    """

    task: Task
    row: TrainedRow
    density: float
    workers: int
    seed: int
    plan: list[list[Any]] | None

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.row.name}, seed {self.seed}"

    def settings(self) -> dict[str, Any]:
        """All that decides the curve; plain values. What a row is called does not: systems may change."""
        strategy, hook = self.row.strategy(self.density), self.row.published.ddp_hook
        parts = {"dense_rules": list(strategy.dense_rules)} | strategy.settings.describe()
        sparse = {name: part for name, part in parts.items() if name not in _IN_THE_PLAN} if self.plan else None
        return {
            "task": self.task.name,
            "recipe": self.task.recipe(),
            "hook": hook if hook in _OTHER_MEANS else None,
            "parts": sparse,
            "plan": self.plan,
            "training": dict(self.row.training),
            "workers": self.workers,
            "seed": self.seed,
        }


def check_trainable(row: TrainedRow, task: Task) -> None:
    """Refuses rows of which virtual workers would train something else than real ones.

    Raises:
        ValueError: Names the row, and why.
    """
    system, settings = row.published, row.strategy(_DENSITY).settings
    if system.ddp_hook == "local":
        reason = "workers hold different weights, and virtual ones share them"
    elif settings.fusion.streams or settings.fusion.ticking:
        reason = "what shares a buffer is a matter of each step's timing, which virtual workers do not have"
    elif find_collective(settings.collective).levels:
        reason = "virtual workers have no nodes"
    elif task.optimizer == "sgd" and "beta2" in dict(row.training):
        reason = f"{task.name} is trained with SGD, which has no beta2"
    else:
        return
    raise ValueError(f"time to accuracy of row {row.name!r} cannot be predicted: {reason}. Leave it out.")


def train_curve(training: Training) -> Curve:
    """Trains once, with virtual workers. Weights and batches depend on task and seed only."""
    begin = time.perf_counter()
    task, options = training.task, dict(training.row.training)
    virtual = VirtualTraining(task, training.seed, training.workers)
    lr = options.pop("lr", task.lr)
    optimizers = task.make_optimizers(virtual.params, lr, **options)
    every = max(1, task.steps // _POINTS)
    steps: list[int] = []
    metrics: list[float | None] = []
    with closing(make_averager(training, virtual, optimizers)) as averager:
        averager.carry_momentum(optimizers, virtual.params)
        for step in range(task.steps):
            finite = math.isfinite(virtual.step(step, averager, optimizers, lr))
            if finite and (step + 1) % every and step + 1 < task.steps:
                continue
            metric = virtual.evaluate() if finite else math.nan
            steps.append(step + 1)
            metrics.append(metric if math.isfinite(metric) else None)
            if metrics[-1] is None:
                break
    return Curve(steps, metrics, round(time.perf_counter() - begin, 2))


def make_averager(training: Training, virtual: VirtualTraining, optimizers: Sequence[Optimizer]) -> Averager:
    """What makes the mean in place of the row's exchange, for optimizers that step with it."""
    row, hook = training.row, training.row.published.ddp_hook
    specs: Sequence[TensorSpec] = row.strategy(training.density).gradient_specs(virtual.model)
    if hook == "bf16" or hook == "fp16":
        return Rounded(specs, torch.bfloat16 if hook == "bf16" else torch.float16)
    if hook is not None and hook in POWERSGD_RANKS:
        return PowerSGD(specs, virtual.order, training.workers, POWERSGD_RANKS[hook], POWERSGD_START)
    if training.plan is None:
        return Dense(specs)
    plan = training.plan

    def settings() -> EngineSettings:
        # where selection is done makes no difference to what is selected
        return replace(row.strategy(training.density).settings, fusion=Kept(plan), offload=False)

    return Engines(settings, specs, virtual.order, training.workers, optimizers=optimizers)

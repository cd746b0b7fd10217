"""Steps to a metric, times the seconds of a step: what a time to accuracy is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lab.accuracy.training import Curve
from lab.tasks import Task
from lightning_safusion.baselines.hooks import POWERSGD_RANKS, POWERSGD_START
from lightning_safusion.notation import read
from lightning_safusion.systems import resolve_system

#: How much worse than DDP's at its end the metric may be: points of accuracy as a share, or a share of the loss.
ACCURACY_BELOW, LOSS_ABOVE = 0.005, 0.01


@dataclass(frozen=True)
class RowTimes:
    """Steps of a row on the link.

    Args:
        step_s: Median seconds.
        low_s: Lower quartile.
        high_s: Upper quartile.
        wire_bytes: That a worker's device has sent per step; None on the loopback.
        plan: Buffers at the end, as :meth:`Plan.to_list` returns them; None where DDP did the exchange.
    """

    step_s: float
    low_s: float
    high_s: float
    wire_bytes: float | None
    plan: list[list[Any]] | None


@dataclass(frozen=True)
class Reached:
    """A row: when it reached the target.

    Args:
        name: Of the row.
        times: Of its steps.
        steps: By seed, steps to the target; None where it was never reached.
        seconds: By seed, what they take on the link.
        ends: By seed, the metric at the end of the training; None where it diverged.
        curve: ``(seconds, metric)``, means over the seeds, as far as all of them got.
    """

    name: str
    times: RowTimes
    steps: dict[int, int | None]
    seconds: dict[int, float | None]
    ends: dict[int, float | None]
    curve: list[tuple[float, float]]

    @property
    def reached(self) -> int:
        """Seeds with which the target was reached."""
        return sum(step is not None for step in self.steps.values())

    @property
    def mean_steps(self) -> float | None:
        """Over the seeds with which the target was reached; None without any."""
        return _mean(list(self.steps.values()))

    @property
    def mean_seconds(self) -> float | None:
        """The same of the seconds."""
        return _mean(list(self.seconds.values()))


def _mean(values: list[int | None] | list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def summarize(task: Task, curves: Mapping[str, Mapping[int, Curve]], times: Mapping[str, RowTimes]) -> list[Reached]:
    """When each row reached the target.

    The target is DDP's metric at the end of its training with the same seed (held-out samples depend on it too), less
    half a point of accuracy, or 1 % of the loss more. It is reached at the first point of a curve that is as good.

    Args:
        task: What was trained.
        curves: By row and seed; with ``"ddp"``.
        times: Of the steps, by row.

    Raises:
        RuntimeError: If DDP's own training has diverged.
    """
    targets = {}
    for seed, curve in curves["ddp"].items():
        end = curve.metric
        if end is None:
            raise RuntimeError(f"DDP's training of {task.name} with seed {seed} has diverged: nothing to compare with")
        targets[seed] = end - ACCURACY_BELOW if task.higher_is_better else end * (1 + LOSS_ABOVE)
    return [_row(task, name, by_seed, targets, times) for name, by_seed in curves.items()]


def _row(
    task: Task,
    name: str,
    curves: Mapping[int, Curve],
    targets: Mapping[int, float],
    times: Mapping[str, RowTimes],
) -> Reached:
    steps = {seed: _first(task, curve, targets[seed]) for seed, curve in curves.items()}
    together = zip(*(zip(curve.steps, curve.metrics, strict=True) for curve in curves.values()), strict=False)
    curve = []
    for points in together:
        metrics = [metric for _, metric in points if metric is not None]
        if len(metrics) < len(points):
            break
        curve.append((seconds(name, points[0][0], times), fmean(metrics)))
    return Reached(
        name,
        times[name],
        steps,
        {seed: None if step is None else seconds(name, step, times) for seed, step in steps.items()},
        {seed: curve.metric for seed, curve in curves.items()},
        curve,
    )


def _first(task: Task, curve: Curve, target: float) -> int | None:
    """The first step of a curve at which the metric is as good as the target."""
    for step, metric in zip(curve.steps, curve.metrics, strict=True):
        if metric is not None and (metric >= target if task.higher_is_better else metric <= target):
            return step
    return None


def seconds(name: str, steps: int, times: Mapping[str, RowTimes]) -> float:
    """What a row takes for its first steps on the link.

    Args:
        name: Of the row. PowerSGD begins with dense steps, which take as long as DDP's; all other steps are alike.
        steps: How many.
        times: Of the steps, by row.
    """
    dense = min(steps, POWERSGD_START) if resolve_system(read(name)[0]).ddp_hook in POWERSGD_RANKS else 0
    return dense * times["ddp"].step_s + (steps - dense) * times[name].step_s

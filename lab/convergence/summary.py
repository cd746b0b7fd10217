"""Runs of one configuration in figures: means, intervals, differences to dense training; the table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import Any

from scipy.stats import t

from lab.convergence.plan import DENSE
from lab.convergence.scheme import Scheme
from lab.convergence.training import Result, Run
from lab.markdown import markdown
from lab.tasks import Task


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval.

    Args:
        mean: Of the values.
        half: Half of the interval's width; NaN for a single value.
    """

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """By Student's t-distribution."""
        if len(values) < 2:
            return cls(fmean(values) if values else math.nan, math.nan)
        quantile = float(t.ppf(0.975, len(values) - 1))
        return cls(fmean(values), quantile * stdev(values) / math.sqrt(len(values)))

    def show(self, places: int, sign: bool = False) -> str:
        """As text; empty if there is no mean."""
        if math.isnan(self.mean):
            return ""
        mean = f"{self.mean:{'+' if sign else ''}.{places}f}"
        return mean if math.isnan(self.half) else f"{mean} ± {self.half:.{places}f}"


@dataclass(frozen=True)
class Summary:
    """All runs of one configuration.

    Args:
        task: What was trained.
        scheme: How gradients were averaged.
        metric: Over the runs that did not diverge.
        middle: Median of the metric over these; NaN if there are none.
        difference: To dense training from the same weights with the same batches, seed by seed.
        runs: How many there are.
        diverged: How many of them had a loss that is not finite.
        missing: Share of the gradients of which nothing was sent; None where it is not defined.
        density: Share of the elements sent.
        error: Share of the energy that was not sent.
        bytes_mean: Bytes per worker and step, over all steps.
        bytes_median: The same, of a usual step.
        ratio: Bytes of float32 gradients over those of a usual step.
        tensors: Gradient tensors.
    """

    task: Task
    scheme: Scheme
    metric: Estimate
    middle: float
    difference: Estimate
    runs: int
    diverged: int
    missing: float | None
    density: float | None
    error: float | None
    bytes_mean: float
    bytes_median: float
    ratio: float
    tensors: int

    @property
    def config(self) -> str:
        """Task and scheme."""
        return Run(self.task, self.scheme, 0).config

    def figures(self) -> dict[str, Any]:
        """Plain values for JSON; None for what is not a number."""
        names = ("runs", "diverged", "missing", "density", "error", "bytes_mean", "bytes_median", "ratio", "tensors")
        numbers = {
            "metric": self.metric.mean,
            "metric_half": self.metric.half,
            "median": self.middle,
            "difference": self.difference.mean,
            "difference_half": self.difference.half,
        }
        return {
            "task": self.task.name,
            "scheme": self.scheme.options(),
            **{name: None if math.isnan(number) else number for name, number in numbers.items()},
            **{name: getattr(self, name) for name in names},
        }


def baseline(scheme: Scheme) -> Scheme:
    """Dense training that a scheme is compared with: as many workers, the same learning rate."""
    return replace(DENSE, workers=scheme.workers, lr_scale=scheme.lr_scale)


def summarize(runs: Sequence[Run], results: Mapping[str, Mapping[int, Result]]) -> list[Summary]:
    """A summary of every configuration that has results, in the order of the runs."""
    first = {run.config: run for run in reversed(runs)}
    configs = dict.fromkeys(run.config for run in runs)
    return [_summary(first[config], results) for config in configs if config in results]


def _summary(run: Run, results: Mapping[str, Mapping[int, Result]]) -> Summary:
    mine = results[run.config]
    dense = results.get(replace(run, scheme=baseline(run.scheme)).config, {})
    metrics = {seed: result.metric for seed, result in mine.items() if result.metric is not None}
    differences = [
        metric - reference
        for seed, metric in metrics.items()
        if seed in dense and (reference := dense[seed].metric) is not None
    ]
    everything = list(mine.values())
    return Summary(
        task=run.task,
        scheme=run.scheme,
        metric=Estimate.of(list(metrics.values())),
        middle=median(metrics.values()) if metrics else math.nan,
        difference=Estimate.of(differences),
        runs=len(mine),
        diverged=len(mine) - len(metrics),
        missing=_mean([result.missing for result in everything]),
        density=_mean([result.density for result in everything]),
        error=_mean([result.error for result in everything]),
        bytes_mean=fmean(result.bytes_mean for result in everything),
        bytes_median=fmean(result.bytes_median for result in everything),
        ratio=fmean(result.dense_bytes / result.bytes_median for result in everything),
        tensors=everything[0].tensors,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def table(summaries: Sequence[Summary]) -> str:
    """The summaries in markdown, task by task."""
    columns = ("metric", "median", "to dense", "runs", "missing", "density", "error", "bytes", "all steps", "ratio")
    tasks = list(dict.fromkeys(summary.task.name for summary in summaries))
    ordered = sorted(summaries, key=lambda each: tasks.index(each.task.name))
    return markdown(("configuration", *columns), map(_cells, ordered))


def _cells(summary: Summary) -> tuple[object, ...]:
    return (
        summary.config,
        summary.metric.show(4),
        "" if math.isnan(summary.middle) else f"{summary.middle:.4f}",
        summary.difference.show(4, sign=True),
        f"{summary.runs} ({summary.diverged} diverged)" if summary.diverged else summary.runs,
        _percent(summary.missing, 1),
        _percent(summary.density, 2),
        _percent(summary.error, 1),
        f"{summary.bytes_median:,.0f}",
        f"{summary.bytes_mean:,.0f}",
        f"{summary.ratio:.1f}",
    )


def _percent(share: float | None, places: int) -> str:
    return "" if share is None else f"{share:.{places}%}"

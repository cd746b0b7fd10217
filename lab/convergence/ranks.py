"""Which scope is best over tasks, densities and seeds: mean ranks, at equal density and at equal bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy.stats import rankdata

from lab.convergence.plan import DEFAULT, DENSITIES, FEW_BITS, MAIN, MORE_DENSITIES
from lab.convergence.scheme import Scheme
from lab.convergence.training import Result, Run
from lab.markdown import markdown
from lab.tasks import Task

# A curve is taken to reach this much below its lowest point: messages of equal density differ by a few bytes.
_REACH = 0.03

Results = Mapping[str, Mapping[int, Result]]


@dataclass(frozen=True)
class Standing:
    """One contender, over all trials (task, density and seed) in which every contender has been run.

    Args:
        name: Of the contender.
        by_density: Mean rank where all have the same density; 1 is best.
        by_bytes: Mean rank where all may send as many bytes; a contender that cannot send so few is last.
        error: Standard error of ``by_bytes`` over trials; NaN for a single one.
        trials: How many there are.
    """

    name: str
    by_density: float
    by_bytes: float
    error: float
    trials: int

    def figures(self) -> dict[str, Any]:
        """All fields, None in place of NaN."""
        return asdict(self) | {"error": None if math.isnan(self.error) else self.error}


def standings(results: Results, contenders: Mapping[str, Scheme]) -> list[Standing]:
    """The contenders, best at equal bytes first; empty if no trial is complete.

    Args:
        results: By configuration and seed.
        contenders: Schemes by name; their density is replaced.
    """
    by_density: list[dict[str, float]] = []
    by_bytes: list[dict[str, float]] = []
    for task in MAIN:
        seeds = {seed for config, runs in results.items() if config.startswith(f"{task.name}/") for seed in runs}
        for seed in sorted(seeds):
            curves = {name: _curve(task, scheme, seed, results) for name, scheme in contenders.items()}
            for density in DENSITIES:
                points = {name: curve[density] for name, curve in curves.items() if density in curve}
                if len(points) < len(contenders):
                    continue
                budget = min(point.bytes_median for point in points.values())
                by_density.append(_ranks({name: _score(task, point) for name, point in points.items()}))
                by_bytes.append(_ranks({name: _score_at(task, curve, budget) for name, curve in curves.items()}))
    return sorted(
        (_standing(name, by_density, by_bytes) for name in contenders if by_bytes), key=lambda row: row.by_bytes
    )


def _standing(name: str, by_density: Sequence[dict[str, float]], by_bytes: Sequence[dict[str, float]]) -> Standing:
    ranks = [trial[name] for trial in by_bytes]
    error = stdev(ranks) / math.sqrt(len(ranks)) if len(ranks) > 1 else math.nan
    return Standing(name, fmean(trial[name] for trial in by_density), fmean(ranks), error, len(ranks))


def _config(task: Task, scheme: Scheme) -> str:
    return Run(task, scheme, 0).config


def _curve(task: Task, scheme: Scheme, seed: int, results: Results) -> dict[float, Result]:
    """A contender's results on one task with one seed by density."""
    densities = (*DENSITIES, *(MORE_DENSITIES if scheme in (FEW_BITS, DEFAULT) else ()))
    runs = {density: results.get(_config(task, replace(scheme, density=density)), {}) for density in densities}
    return {density: run[seed] for density, run in runs.items() if seed in run}


def _score(task: Task, result: Result) -> float:
    """Higher is better; a training that diverged is worse than all that did not."""
    if result.metric is None:
        return -math.inf
    return result.metric if task.higher_is_better else -result.metric


def _score_at(task: Task, curve: Mapping[float, Result], budget: float) -> float:
    """The score at so many bytes, on straight lines over their logarithm; beyond the largest density, the one there."""
    points = sorted((math.log(result.bytes_median), _score(task, result)) for result in curve.values())
    places, scores = [place for place, _ in points], [score for _, score in points]
    if math.log(budget) < places[0] - _REACH:
        return -math.inf
    return float(np.interp(math.log(budget), places, scores))


def _ranks(scores: Mapping[str, float]) -> dict[str, float]:
    """1 for the highest score; equals share the mean of their ranks."""
    return dict(zip(scores, rankdata([-score for score in scores.values()]).tolist(), strict=True))


def table(rows: Sequence[Standing]) -> str:
    """The ranks in markdown."""
    columns = ("scope", "mean rank at equal bytes, standard error", "mean rank at equal density", "trials")
    return markdown(columns, map(_cells, rows))


def _cells(row: Standing) -> tuple[object, ...]:
    error = "" if math.isnan(row.error) else f" ± {row.error:.2f}"
    return row.name, f"{row.by_bytes:.2f}{error}", f"{row.by_density:.2f}", row.trials

"""Which scope is best over tasks and densities: mean ranks, at equal density and at equal bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from benchmarks.convergence.plan import DENSITIES, MAIN, SCOPES
from benchmarks.convergence.scheme import Scheme
from benchmarks.convergence.store import Run
from benchmarks.convergence.summary import Summary
from lightning_safusion.tasks import Task

# A curve is taken to reach this much beyond its ends: messages of equal density differ by a few bytes.
_REACH = 0.03


@dataclass(frozen=True)
class Standing:
    """One contender, over all cells (task and density) in which every contender has been run.

    Args:
        name: Of the contender.
        by_density: Mean rank where all have the same density; 1 is best.
        by_bytes: Mean rank where all send as many bytes; whoever cannot send so few is last.
        cells: How many there are.
    """

    name: str
    by_density: float
    by_bytes: float
    cells: int


def standings(summaries: Sequence[Summary], contenders: Mapping[str, Scheme] = SCOPES) -> list[Standing]:
    """The contenders, best at equal bytes first; empty if no cell is complete.

    Args:
        summaries: Of the runs.
        contenders: Schemes by name; their density is replaced.
    """
    known = {summary.config: summary for summary in summaries}
    by_density, by_bytes = [], []
    for task in MAIN:
        curves = {name: _curve(task, scheme, known) for name, scheme in contenders.items()}
        for density in DENSITIES:
            cell = {name: curve.get(density) for name, curve in curves.items()}
            points = {name: point for name, point in cell.items() if point is not None}
            if len(points) < len(contenders):
                continue
            target = min(point.bytes_median for point in points.values())
            by_density.append(_ranks({name: _score(point) for name, point in points.items()}))
            by_bytes.append(_ranks({name: _score_at(list(curve.values()), target) for name, curve in curves.items()}))
    if not by_density:
        return []
    rows = [
        Standing(name, fmean(r[name] for r in by_density), fmean(r[name] for r in by_bytes), len(by_density))
        for name in contenders
    ]
    return sorted(rows, key=lambda row: row.by_bytes)


def _curve(task: Task, scheme: Scheme, known: Mapping[str, Summary]) -> dict[float, Summary]:
    """A contender's summaries on one task by density."""
    configs = {density: Run(task, replace(scheme, density=density), 0).config for density in DENSITIES}
    return {density: known[config] for density, config in configs.items() if config in known}


def _score(summary: Summary) -> float:
    """Higher is better; a scheme that diverged in any run is behind all that did not."""
    if summary.diverged:
        return -math.inf
    return summary.metric.mean if summary.task.higher_is_better else -summary.metric.mean


def _score_at(curve: Sequence[Summary], target: float) -> float:
    """The score at so many bytes, on straight lines over the logarithm of bytes."""
    points = sorted((math.log(summary.bytes_median), _score(summary)) for summary in curve)
    places, scores = [place for place, _ in points], [score for _, score in points]
    if not places[0] - _REACH <= math.log(target) <= places[-1] + _REACH:
        return -math.inf
    return float(np.interp(math.log(target), places, scores))


def _ranks(scores: Mapping[str, float]) -> dict[str, float]:
    """1 for the highest score; equals share the mean of their ranks."""
    return {
        name: 1 + sum(other > score for other in scores.values()) + (list(scores.values()).count(score) - 1) / 2
        for name, score in scores.items()
    }


def markdown(rows: Sequence[Standing]) -> str:
    """The ranks as a table."""
    lines = [
        "| scope | mean rank at equal bytes | mean rank at equal density | cells |",
        "| --- | ---: | ---: | ---: |",
    ]
    return "\n".join(lines + [f"| {r.name} | {r.by_bytes:.2f} | {r.by_density:.2f} | {r.cells} |" for r in rows])

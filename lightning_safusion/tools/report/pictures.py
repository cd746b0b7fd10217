"""Pictures of a page: parts of a step by rank, and times over the run.

Matplotlib is optional: it is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from lightning_safusion.profiling.figures import PARTS, RankFigures, StepFigures
from lightning_safusion.profiling.pictures import COLORS, new_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

RANKS = 32
"""Ranks that :func:`breakdown` draws."""


def breakdown(figures: RankFigures) -> Figure | SubFigure:
    """One stacked bar for each of the first ranks: the parts of a step's time."""
    shown = figures.ranks[:RANKS]
    axes = new_axes(1.4 + 0.36 * len(shown))
    at = np.zeros(len(shown))
    for part, label in PARTS.items():
        lengths = np.nan_to_num([getattr(each, f"{part}_s") * 1e3 for each in shown])
        if lengths.any():
            axes.barh(range(len(shown)), lengths, left=at, color=COLORS[part], label=label)
        at += lengths
    axes.set_yticks(range(len(shown)), [f"rank {rank}" for rank in range(len(shown))])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    if axes.containers:
        axes.figure.legend(loc="outside lower center", ncols=len(PARTS), fontsize="small", frameon=False)
    return axes.figure


def plot_times(steps: Mapping[int, StepFigures]) -> Figure | SubFigure:
    """Step time and exposed exchange of the recorded steps, over the run."""
    axes = new_axes(2.6)
    for part, color, label in (("step", COLORS["backward"], "step"), ("exposed", COLORS["exposed"], PARTS["exposed"])):
        times = {number: getattr(each, f"{part}_s") * 1e3 for number, each in steps.items()}
        known = {number: time for number, time in times.items() if not np.isnan(time)}
        axes.scatter(list(known), list(known.values()), 9.0, color, label=label)
    axes.set_ylim(bottom=0.0)
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="step", ylabel="ms")
    axes.grid(alpha=0.3)
    axes.figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    return axes.figure

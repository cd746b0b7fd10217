"""The report's pictures: drawn by matplotlib, embedded as SVG."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any, ParamSpec

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure, SubFigure

from lightning_safusion.metrics.history import TensorRow
from lightning_safusion.profiling.figures import PARTS, RankFigures, StepFigures
from lightning_safusion.profiling.picture import COLORS, new_figure, plot_rates

_P = ParamSpec("_P")

RANKS = 32
"""Ranks that :func:`breakdown` draws."""

_INK = "#0a0b0c"  # stands for the text colour of the page
_STYLE = "<style>svg{color:#1b2330}@media (prefers-color-scheme:dark){svg{color:#e4e8ee}}</style>"
_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
_OPTIONS: dict[Any, Any] = {
    **dict.fromkeys(_INKED, _INK),
    "svg.fonttype": "none",
    "svg.hashsalt": "safusion",
    "text.parse_math": False,  # a name is no formula
}
_WIDTH = 11.0  # inches


def embedded(draw: Callable[_P, Figure | SubFigure], *args: _P.args, **kwargs: _P.kwargs) -> str:
    """A picture as the ``data:`` address of an SVG, whose text is light on dark screens."""
    written = StringIO()
    with rc_context(_OPTIONS):
        draw(*args, **kwargs).figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]  # without the address of a DTD
    head = svg.index(">") + 1
    content = svg[:head] + _STYLE + svg[head:].replace(_INK, "currentColor")
    return f"data:image/svg+xml;base64,{b64encode(content.encode()).decode()}"


def breakdown(figures: RankFigures) -> Figure:
    """One stacked bar for each of the first ranks: what a step's time went into."""
    shown = figures.ranks[:RANKS]
    figure = new_figure(_WIDTH, 1.4 + 0.36 * len(shown))
    axes = figure.add_subplot()
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
        figure.legend(loc="outside lower center", ncols=len(PARTS), fontsize="small", frameon=False)
    return figure


def history(steps: dict[int, StepFigures]) -> Figure:
    """Step time and exposed exchange of the recorded steps, over the run."""
    figure = new_figure(_WIDTH, 2.6)
    axes = figure.add_subplot()
    for part, color, label in (("step", COLORS["backward"], "step"), ("exposed", COLORS["exposed"], PARTS["exposed"])):
        seconds = np.array([getattr(each, f"{part}_s") for each in steps.values()])
        axes.plot(list(steps), seconds * 1e3, ".", color=color, label=label)
    axes.set_ylim(bottom=0.0)
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="step", ylabel="ms")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    return figure


def heat_map(tensors: Sequence[TensorRow], steps: Sequence[int]) -> Figure | SubFigure:
    """The missing rate by tensor (rows) and step (columns); grey where a tensor had no gradient."""
    axes = new_figure(_WIDTH, 1.6 + 0.16 * len(tensors)).add_subplot()
    rates = np.array([each.rates for each in tensors], np.float64)  # None becomes NaN
    return plot_rates([each.name for each in tensors], steps, rates, axes)

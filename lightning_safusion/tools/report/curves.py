"""A page of trainings side by side, from their ``metrics.csv``: results over steps and over time, and the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lightning_safusion.profiling.pictures import new_axes
from lightning_safusion.tools.report import comparison
from lightning_safusion.tools.report.comparison import DENSE, DENSITY, EXPOSED, SENT
from lightning_safusion.tools.report.metrics_file import Logged
from lightning_safusion.tools.report.render import picture, render

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

#: Runs that can be told apart in a picture.
RUNS = 6
_STYLES = (
    *(("#4878b0", "-"), ("#d9822b", "--"), ("#3f8f63", "-."), ("#8d5fb8", ":")),
    *(("#d03a2b", (0, (5, 1))), ("#6b6b6b", (0, (1, 1)))),
)
_POINTS = 400
_DRAWN = 8  # results
_EXCHANGE = {SENT: "MB sent in a step", EXPOSED: "ms exposed", DENSITY: "density"}

Line = tuple[str, np.ndarray, np.ndarray]  # name, float64 [N], float64 [N]


def render_curves(runs: Sequence[Logged]) -> tuple[str, list[str]]:
    """The page as HTML, and what it says in words."""
    called = comparison.names([run.path for run in runs])
    results = comparison.shared(runs)
    words = list(comparison.sent_alone(runs[0], called[0])) if len(runs) == 1 else []
    for other, name in zip(runs[1:], called[1:], strict=True):
        words += comparison.differences(runs[0], other, called[0], name)
    for run, name in zip(runs, called, strict=True):
        words += comparison.remarks(run, name)
    words += comparison.timeless(runs, called)
    drawn = [each for name in results[:_DRAWN] for each in _pictures(runs, called, name, name)]
    exchange = [each for name, label in _EXCHANGE.items() for each in _pictures(runs, called, name, label)[:1]]
    page = render(
        "curves.html",
        runs=runs,
        called=called,
        words=words,
        pictures={"results": drawn, "exchange": exchange},
        left=results[_DRAWN:],
        rows=comparison.table(runs),
    )
    return page, words


def _pictures(runs: Sequence[Logged], called: Sequence[str], column: str, label: str) -> list[tuple[str, str]]:
    """Names of pictures of a column, and these: over steps, and over time where that is known."""
    over_steps, over_time = [], []
    for run, name in zip(runs, called, strict=True):
        if column not in run.curves:
            continue
        curve = run.curves[column]
        finite = np.isfinite(curve.values)
        steps, values = curve.steps[finite], curve.values[finite]
        seconds = run.seconds(steps)
        known = ~np.isnan(seconds)
        over_steps.append((name, *thinned(steps, values)))
        over_time.append((name, *thinned(seconds[known], values[known])))
    whole = max((run.latest(DENSE) or 0.0 for run in runs), default=0.0) if column == SENT else 0.0
    drawn = []
    for lines, axis in ((over_steps, "step"), (over_time, "seconds of training")):
        shown = [line for line in lines if len(line[1])]
        if shown:
            drawn.append((f"{label} by {axis}", picture(plot_lines, shown, called, axis, label, whole)))
    return drawn


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most 400 points: means of neighbours where there are more."""
    parts = min(_POINTS, len(x))
    if parts == len(x):
        return x, y
    edges = np.linspace(0, len(x), parts, endpoint=False).astype(int)
    counts = np.diff([*edges, len(x)])
    return np.add.reduceat(x, edges) / counts, np.add.reduceat(y, edges) / counts


def plot_lines(
    lines: Sequence[Line], called: Sequence[str], axis: str, label: str, whole: float = 0.0
) -> Figure | SubFigure:
    """Draws curves of runs; ``called``, those of the page, have the same colours in all its pictures.

    ``whole`` is a level that is marked as that of whole gradients; 0 for none.
    """
    axes = new_axes(3.4, 5.4)
    for name, x, y in lines:
        color, style = _STYLES[called.index(name)]
        marker = "o" if len(x) < 30 else ""
        axes.plot(x, y, color=color, linestyle=style, marker=marker, markersize=4, label=_short(name))
    if whole:
        axes.axhline(whole, color="#6b6b6b", linewidth=1, linestyle=(0, (2, 2)), label="whole gradients, as DDP's")
        axes.set_ylim(bottom=0.0)
    axes.set(xlabel=axis, ylabel=_short(label))
    axes.grid(alpha=0.3)
    axes.figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return axes.figure


def _short(text: str, letters: int = 28) -> str:
    return text if len(text) <= letters else f"…{text[1 - letters :]}"

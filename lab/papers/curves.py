"""Experiment 1 as a table, sentences, and curves over steps and over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from lab.markdown import markdown
from lab.papers.claims import PAPERS
from lab.papers.convergence import CLOSE, DENSE, RIVALS, SYSTEMS, TASKS, Point
from lab.svg import INK

#: Inches that :func:`draw` needs.
SIZE = (8, 2.6 * len(TASKS))


def table(points: Sequence[Point]) -> str:
    """A row for each task and system: the metric at the end, the best one, and what the training took."""
    rows = []
    for task, system in _trained(points):
        curve = [point for point in points if (point.task, point.system) == (task, system)]
        values = [point.metric for point in curve]
        best = max(values) if TASKS[task].higher_is_better else min(values)
        last = curve[-1]
        per_step = f"{1e3 * last.seconds / last.step:.0f}"
        rows.append((task, system, f"{last.metric:.3f}", f"{best:.3f}", last.step, f"{last.seconds:.1f}", per_step))
    heads = ("task", "system", "metric at the end", "best", "steps", "seconds", "ms per step")
    return markdown(heads, rows, names=2)


def sentences(points: Sequence[Point]) -> list[str]:
    """One for each task: which parts of its claim hold."""
    ends = {place: next(p for p in reversed(points) if (p.task, p.system) == place) for place in _trained(points)}
    found = []
    for name, task in TASKS.items():
        loss = {}  # against dense, as a share; below 0 is better
        for system in SYSTEMS:
            share = ends[name, system].metric / ends[name, DENSE].metric - 1
            loss[system] = -share if task.higher_is_better else share
        own = loss[PAPERS]
        parts = {f"`{PAPERS}` is {_worse(own)} dense ({task.metric})": own <= CLOSE}
        if task.images:
            parts |= {f"{_worse(own - loss[rival])} `{rival}`": own < loss[rival] for rival in RIVALS}
        good = sum(parts.values())
        verdict = "is reached" if good == len(parts) else "is reached in part" if good else "is not reached"
        found.append(f"{name}: **the claim {verdict}**: {', '.join(parts)}.")
    found.append(
        f"One seed. 'Slightly' and 'the same' are taken as at most {CLOSE:.0%} of the dense metric; shares are of that."
    )
    return found


def draw(points: Sequence[Point], figure: Figure) -> None:
    """A row for each task: the metric over steps (left) and over seconds of training (right)."""
    for row, name in zip(figure.subplots(len(TASKS), 2, sharey="row"), TASKS, strict=True):
        for number, system in enumerate(SYSTEMS):
            curve = [point for point in points if (point.task, point.system) == (name, system)]
            style = {"color": INK if system == DENSE else colormaps["tab10"](number), "label": system}
            for axes, of in zip(row, ("step", "seconds"), strict=True):
                axes.plot([getattr(p, of) for p in curve], [p.metric for p in curve], ".-", linewidth=1.2, **style)
        for axes, label in zip(row, ("steps", "seconds of training"), strict=True):
            axes.set_xlabel(label, fontsize="small")
            axes.grid(alpha=0.3)
            if not TASKS[name].higher_is_better:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(ScalarFormatter())
        row[0].set_ylabel(TASKS[name].metric, fontsize="small")
        row[0].set_title(name, fontsize="small", loc="left")
    figure.axes[0].legend(fontsize="x-small")


def _trained(points: Sequence[Point]) -> Iterator[tuple[str, str]]:
    yield from dict.fromkeys((point.task, point.system) for point in points)


def _worse(share: float) -> str:
    return f"{abs(share):.1%} {'worse' if share > 0 else 'better'} than"

"""The laboratory's pictures; each shows what has been run so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from lab.convergence.plan import (
    CONTENDERS,
    DEFAULT,
    DEGREES,
    DENSE,
    DENSITIES,
    FEW_BITS,
    MAIN,
    MORE_DENSITIES,
    OBSERVED,
    RANKS,
    WEIGHED,
    WEIGHTS,
)
from lab.convergence.scheme import Scheme
from lab.convergence.summary import Summary
from lab.convergence.training import Run
from lab.tasks import Task

_COLORS = dict(zip(CONTENDERS, ("tab:red", "tab:cyan", "tab:blue", "tab:olive", "tab:green"), strict=True))
_MEMORIES = {"residual": ("tab:blue", "feedback"), "none": ("tab:red", "no feedback")}
_RUNS = 3  # of one configuration that an interval needs
_COLUMNS = 3  # of panels; a page shows no more
# The glossary's words.
_WORDS = {"behind": "after fusion", "ahead": "before fusion", "the default": "the default, by gradient"}
_AXIS = {"accuracy": "validation accuracy", "loss": "validation loss"}


class Known:
    """Summaries by task and scheme.

    Args:
        summaries: Of the runs.
    """

    def __init__(self, summaries: Iterable[Summary]) -> None:
        self.summaries = list(summaries)
        self._by_config = {summary.config: summary for summary in self.summaries}

    def of(self, task: Task, schemes: Iterable[Scheme]) -> list[Summary]:
        """Those of the schemes that have been run, and have a metric."""
        configs = dict.fromkeys(Run(task, scheme, 0).config for scheme in schemes)
        found = [self._by_config[config] for config in configs if config in self._by_config]
        return [summary for summary in found if not math.isnan(summary.metric.mean)]


def save_pictures(summaries: Sequence[Summary], folder: Path) -> list[Path]:
    """Draws all pictures for which there are results.

    Returns:
        The files.
    """
    known = Known(summaries)
    pictures: Mapping[str, Callable[[Known], Figure | None]] = {
        "density": by_density,
        "bytes": by_bytes,
        "observation_1": observation_1,
        "observation_2": observation_2,
        "scales": scales,
    }
    files = []
    for name, draw in pictures.items():
        figure = draw(known)
        if figure is not None:
            files.append(folder / f"{name}.png")
            figure.savefig(files[-1], dpi=100)
    return files


def by_density(known: Known) -> Figure | None:
    """The metric by density, one line for each scope, one panel for each task."""

    def draw(axes: Axes, task: Task) -> None:
        _dense(axes, known.of(task, [DENSE]))
        for name, scheme in CONTENDERS.items():
            points = known.of(task, [replace(scheme, density=density) for density in DENSITIES])
            _line(axes, points, [point.scheme.density for point in points], _WORDS.get(name, name), _COLORS[name])
        axes.set(xscale="log", xlabel="density")
        axes.set_xticks(DENSITIES)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
        axes.xaxis.set_minor_locator(NullLocator())

    return _panels(known, "Accuracy by density", [task for task in MAIN if _swept(known, task)], draw)


def by_bytes(known: Known) -> Figure | None:
    """The metric by bytes sent: all schemes at the task's own learning rate, and PowerSGD as a line."""

    def draw(axes: Axes, task: Task) -> None:
        _dense(axes, known.of(task, [DENSE]))
        for name, scheme in CONTENDERS.items():
            densities = (*DENSITIES, *(MORE_DENSITIES if scheme in (FEW_BITS, DEFAULT) else ()))
            points = known.of(task, [replace(scheme, density=density) for density in densities])
            _line(axes, points, [point.bytes_mean for point in points], _WORDS.get(name, name), _COLORS[name])
        ranks = known.of(task, [Scheme("powersgd", rank=rank) for rank in RANKS])
        _line(axes, ranks, [point.bytes_mean for point in ranks], "PowerSGD", "black")
        others = known.of(task, [each.scheme for each in known.summaries if _is_usual(each.scheme)])
        axes.plot(
            [point.bytes_mean for point in others], [point.metric.mean for point in others], ".", color="gray", zorder=0
        )
        axes.set(xscale="log", xlabel="bytes per worker and step")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count / 1e3:g} kB"))
        axes.xaxis.set_minor_locator(NullLocator())

    return _panels(known, "What bytes buy", [task for task in MAIN if _swept(known, task)], draw)


def observation_1(known: Known) -> Figure | None:
    """Missing tensors and accuracy by fusion degree, with and without error feedback; a row for each task."""
    rows = [(task, scheme) for task, scheme in OBSERVED if _by_degree(known, task, scheme, _MEMORIES)]
    if not rows:
        return None
    figure = Figure(figsize=(11, 4.2 * len(rows)), layout="constrained")
    figure.suptitle("Observation 1: tensors that go missing, and accuracy")
    for (left, right), (task, scheme) in zip(figure.subplots(len(rows), 2, squeeze=False), rows, strict=True):
        for memory, (color, label) in _MEMORIES.items():
            points = _by_degree(known, task, scheme, [memory])
            degrees = [float(min(point.scheme.degree or point.tensors, point.tensors)) for point in points]
            left.plot(
                degrees, [point.missing or 0.0 for point in points], "o-", color=color, label=f"after fusion, {label}"
            )
            _line(right, points, degrees, f"after fusion, {label}", color)
            for before in known.of(task, [replace(scheme, method="ahead", memory=memory)]):
                left.axhline(before.missing or 0.0, color=color, ls="--")
                right.axhline(before.metric.mean, color=color, ls="--", label=f"before fusion, {label}")
        _dense(right, known.of(task, [DENSE]))
        left.set(ylabel="share of tensors that send nothing")
        right.set(ylabel=_AXIS[task.metric])
        _bounded(right, task)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda degree, _: f"{degree:g}"))
            axes.set(title=f"{task.name}, density {scheme.density:.2%}", xlabel="tensors in a buffer")
            axes.grid(alpha=0.3)
        right.legend(fontsize=8)
    return figure


def _by_degree(known: Known, task: Task, scheme: Scheme, memories: Iterable[str]) -> list[Summary]:
    return known.of(task, [replace(scheme, memory=memory, degree=degree) for memory in memories for degree in DEGREES])


def scales(known: Known) -> Figure | None:
    """Accuracy by the scale of one head's gradients, with selection from one buffer and from each tensor."""
    kinds = [replace(scheme, memory=memory) for memory in _MEMORIES for scheme in WEIGHED]
    if not any(known.of(task, kinds) for task in WEIGHTS.values()):
        return None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(f"Two heads, AdamW, density {WEIGHED[0].density:.0%}: mean accuracy of both")
    for axes, (memory, (_, label)) in zip(figure.subplots(1, 2, sharey=True), _MEMORIES.items(), strict=True):
        for scheme in (DENSE, *(replace(each, memory=memory) for each in WEIGHED)):
            points = {weight: found[0] for weight, task in WEIGHTS.items() if (found := known.of(task, [scheme]))}
            color, name = _COLORS.get(scheme.method, "black"), _WORDS.get(scheme.method, scheme.method)
            _line(axes, list(points.values()), list(points), name, color)
        axes.set(title=label, xscale="log", xlabel="weight of the second head in the loss", ylabel=_AXIS["accuracy"])
        _bounded(axes, next(iter(WEIGHTS.values())))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure


def observation_2(known: Known) -> Figure | None:
    """Selection after and before fusion on every task, without error feedback and with it; dense as a line."""
    kinds = {
        f"{_WORDS[method].replace(' ', chr(10))},\n{'no ' if memory == 'none' else ''}feedback": Scheme(
            method, memory=memory
        )
        for memory in ("none", "residual")
        for method in ("behind", "ahead")
    }

    def draw(axes: Axes, task: Task) -> None:
        _dense(axes, known.of(task, [DENSE]))
        for place, scheme in enumerate(kinds.values()):
            color = _COLORS[scheme.method]
            for point in known.of(task, [scheme]):
                axes.errorbar(place, point.metric.mean, _half(point), fmt="o", capsize=4, color=color)
        axes.set_xticks(range(len(kinds)), list(kinds), fontsize=8)

    tasks = [task for task in MAIN if known.of(task, [each for each in kinds.values() if each.memory == "none"])]
    return _panels(known, f"Observation 2: density {Scheme('behind').density:.0%}", tasks, draw)


def _is_usual(scheme: Scheme) -> bool:
    return scheme.sparse and scheme.workers == DENSE.workers and scheme.lr_scale == 1


def _swept(known: Known, task: Task) -> bool:
    return bool(known.of(task, [replace(s, density=density) for s in CONTENDERS.values() for density in DENSITIES]))


def _panels(known: Known, title: str, tasks: Sequence[Task], draw: Callable[[Axes, Task], None]) -> Figure | None:
    """One panel for each task; None if there are none."""
    if not tasks:
        return None
    columns = min(_COLUMNS, len(tasks))
    rows = math.ceil((len(tasks) + 1) / columns)  # the legend has a place of its own
    figure = Figure(figsize=(3.7 * columns, 3.4 * rows), layout="constrained")
    figure.suptitle(title)
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, task in zip(places, tasks, strict=False):
        draw(axes, task)
        axes.set(title=task.name, ylabel=_AXIS[task.metric])
        axes.grid(alpha=0.3)
        _bounded(axes, task)
    for axes in places[len(tasks) :]:
        axes.axis("off")
    handles = {
        label: handle for axes in places for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    places[len(tasks)].legend(handles.values(), handles, loc="center left")
    return figure


def _bounded(axes: Axes, task: Task) -> None:
    """No accuracy is above 1, whatever the interval."""
    if task.higher_is_better:
        axes.set_ylim(top=min(1.0, axes.get_ylim()[1]))


def _line(axes: Axes, points: Sequence[Summary], places: Sequence[float], label: str, color: str) -> None:
    """Means with intervals, from left to right."""
    if not points:
        return
    rows = sorted(zip(places, points, strict=True), key=lambda row: row[0])
    halves = [_half(point) for _, point in rows]
    means = [point.metric.mean for _, point in rows]
    axes.errorbar([place for place, _ in rows], means, halves, fmt="o-", capsize=3, color=color, label=label)


def _half(point: Summary) -> float:
    """Half of the interval that is drawn; 0 for less than three runs, whose intervals would fill the picture."""
    return point.metric.half if point.runs - point.diverged >= _RUNS else 0.0


def _dense(axes: Axes, points: Sequence[Summary]) -> None:
    for point in points:
        axes.axhline(point.metric.mean, color="black", ls=":", label="dense")
        if half := _half(point):
            axes.axhspan(point.metric.mean - half, point.metric.mean + half, color="black", alpha=0.07)

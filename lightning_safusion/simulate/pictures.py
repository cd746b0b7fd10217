"""Pictures: systems side by side, sweeps, and the timeline of one iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_safusion.simulate.comparison import PlanRow
from lightning_safusion.simulate.iteration import Iteration, Resource
from lightning_safusion.simulate.systems import SIMULATED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_ROWS: tuple[Resource, ...] = ("compute", "select", "bus", "host", "link")
_COLORS: dict[str, str] = {
    "compute": "#4878b0",
    "select": "#e8a33d",
    "bus": "#8d7fb8",
    "host": "#b5651d",
    "link": "#5b9e77",
    "exposed": "#d03a2b",
}
_LABELS = {"gbit": "effective Gbit/s per node", "density": "density", "workers": "workers"}


def plot_table(rows: Sequence[PlanRow], ax: Axes | None = None) -> Figure | SubFigure:
    """Bars of all systems, fastest on top: the trace alone, and what is exposed.

    Args:
        rows: Systems on one cluster.
        ax: Where to draw; a new figure if there is none.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    ax = ax or _new_axes(1.2 + 0.26 * len(rows))
    ordered = sorted(rows, key=lambda row: -row.iteration_s)
    names = [row.system for row in ordered]
    alone = [(row.iteration_s - row.exposed_s) * 1e3 for row in ordered]
    ax.barh(names, alone, color=_COLORS["compute"], label="forward, backward, optimizer")
    ax.barh(names, [row.exposed_s * 1e3 for row in ordered], left=alone, color=_COLORS["exposed"], label="exposed")
    for place, row in enumerate(ordered):
        ax.annotate(f" {row.speedup:.2f}x", (row.iteration_s * 1e3, place), va="center", fontsize="small")
    ax.margins(x=0.1)
    ax.set_xlabel("ms per iteration (and speed-up over DDP in bf16)")
    ax.legend(loc="upper right")
    return ax.figure


def plot_sweep(records: Sequence[Mapping[str, Any]], x: str = "gbit", ax: Axes | None = None) -> Figure | SubFigure:
    """A line per system: milliseconds per iteration over bandwidth, density or workers; dense systems dashed.

    Args:
        records: Of :func:`sweep_table`, one per system and value of ``x``.
        x: ``"gbit"``, ``"density"`` or ``"workers"``.
        ax: Where to draw; a new figure if there is none.

    Raises:
        ValueError: If ``x`` is something else.
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    if x not in _LABELS:
        raise ValueError(f"cannot draw over {x!r}: choose one of {list(_LABELS)}")
    ax = ax or _new_axes(5.5)
    for name in dict.fromkeys(record["system"] for record in records):
        points = sorted((record[x], record["iteration_s"] * 1e3) for record in records if record["system"] == name)
        style = "-" if SIMULATED[name].sparse else "--"
        ax.plot(*zip(*points, strict=True), style, marker=".", label=name)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel(_LABELS[x])
    ax.set_ylabel("ms per iteration")
    ax.legend(fontsize="x-small", ncols=2)
    return ax.figure


def plot_iteration(iteration: Iteration, ax: Axes | None = None) -> Figure | SubFigure:
    """The timeline of one iteration: a row per resource of worker 0, and one for the link.

    Args:
        iteration: What :func:`simulate` returned.
        ax: Where to draw; a new figure if there is none.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    ax = ax or _new_axes(2.6)
    used = [resource for resource in _ROWS if any(entry.resource == resource for entry in iteration.intervals)]
    for place, resource in enumerate(reversed(used)):
        bars = [entry for entry in iteration.intervals if entry.resource == resource]
        spans = [(entry.begin * 1e3, (entry.end - entry.begin) * 1e3) for entry in bars]
        ax.broken_barh(spans, (place - 0.35, 0.7), facecolor=_COLORS[resource], edgecolor="white", linewidth=0.3)
    ax.set_yticks(range(len(used)), [str(resource) for resource in reversed(used)])
    ax.axvline(iteration.compute * 1e3, color=_COLORS["exposed"], linestyle=":", label="the trace alone")
    ax.set_xlabel("ms")
    ax.legend(loc="lower right")
    return ax.figure


def _new_axes(height: float) -> Axes:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('pictures need matplotlib: pip install "lightning-safusion[plot]"') from error
    return Figure(figsize=(9, height), layout="constrained").add_subplot()

"""Pictures: systems side by side, and sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_safusion.lookup import need
from lightning_safusion.simulate.comparison import PlanRow
from lightning_safusion.simulate.systems import SIMULATED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_ALONE, _EXPOSED = "#4878b0", "#d03a2b"
_LABELS = {"gbit": "effective Gbit/s per node", "density": "density", "workers": "workers"}


def plot_table(rows: Sequence[PlanRow], ax: Axes | None = None) -> Figure | SubFigure:
    """Bars of all systems of one cluster, fastest on top: the trace alone, and what is exposed; on new axes by default.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    ax = ax or _new_axes(1.2 + 0.26 * len(rows))
    ordered = sorted(rows, key=lambda row: -row.iteration_s)
    names = [row.system for row in ordered]
    alone = [(row.iteration_s - row.exposed_s) * 1e3 for row in ordered]
    ax.barh(names, alone, color=_ALONE, label="forward, backward, optimizer")
    ax.barh(names, [row.exposed_s * 1e3 for row in ordered], left=alone, color=_EXPOSED, label="exposed")
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
        ax: Where to draw; new axes by default.

    Raises:
        ValueError: If ``x`` is something else.
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    if x not in _LABELS:
        raise ValueError(f"cannot draw over {x!r}: choose one of {list(_LABELS)}")
    ax = ax or _new_axes(5.5)
    for name in dict.fromkeys(record["system"] for record in records):
        points = sorted((record[x], record["iteration_s"] * 1e3) for record in records if record["system"] == name)
        style = "-" if SIMULATED[name].row.sparse else "--"
        ax.plot(*zip(*points, strict=True), style, marker=".", label=name)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel(_LABELS[x])
    ax.set_ylabel("ms per iteration")
    ax.legend(fontsize="x-small", ncols=2)
    return ax.figure


def _new_axes(height: float) -> Axes:
    need("matplotlib", "plot")
    from matplotlib.figure import Figure

    return Figure(figsize=(9, height), layout="constrained").add_subplot()

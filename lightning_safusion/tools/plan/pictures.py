"""Pictures of predictions: bars of one cluster, lines of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isclose
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from lightning_safusion.profiling.pictures import new_axes
from lightning_safusion.tools.plan.comparison import PlanRow
from lightning_safusion.tools.plan.models import WHOLE
from lightning_safusion.tools.plan.rows import simulated_row
from lightning_safusion.tools.tables import RowName

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

#: Of each sweep: the field of the records, and its heading.
AXES = {
    "bandwidth": ("gbit", "Gbit/s of a card"),
    "density": ("density", "density"),
    "nodes": ("workers", "workers"),
}
_ALONE, _EXPOSED = "#4878b0", "#d03a2b"
_WIDTH = 9  # inches
_LABEL = 44  # characters of a line beside a bar
_ALIKE = 0.01  # lines that nowhere differ by more are one
_MARKERS = "osv"


def plot_table(rows: Sequence[PlanRow], dense: str = WHOLE.dense) -> Figure | SubFigure:
    """Bars of all systems of one cluster, fastest on top: the trace alone, and the exposed time; ``dense``: what they
    are compared with, in bf16."""
    ordered = sorted(rows, key=lambda row: -row.iteration_s)
    names = ["\n".join(RowName(row.system).lines(_LABEL)) for row in ordered]
    ax = new_axes(1.2 + 0.26 * sum(name.count("\n") + 1 for name in names), _WIDTH)
    alone = [(row.iteration_s - row.exposed_s) * 1e3 for row in ordered]
    ax.barh(names, alone, color=_ALONE, label="forward, backward, optimizer")
    ax.barh(names, [row.exposed_s * 1e3 for row in ordered], left=alone, color=_EXPOSED, label="exposed")
    for place, row in enumerate(ordered):
        ax.annotate(f" {row.speedup:.2f}x", (row.iteration_s * 1e3, place), va="center", fontsize="small")
    ax.margins(x=0.1)
    ax.set_xlabel(f"ms per iteration (and speed-up over {dense} in bf16)")
    ax.legend(loc="upper right")
    return ax.figure


def plot_sweep(records: Sequence[Mapping[str, Any]], over: str) -> Figure | SubFigure:
    """Milliseconds per iteration over ``"bandwidth"``, ``"density"`` or ``"nodes"``: a line for each system, or for
    several that lie on each other; dense systems dashed, and those whose work on the device is an order of magnitude
    marked. A line may rise with the bandwidth: ``omgs`` fuses less where messages are cheap, and the device selects and
    decodes each of them."""
    from matplotlib.ticker import LogLocator

    ax = new_axes(7, _WIDTH)
    field, heading = AXES[over]
    lines: list[tuple[bool, dict[float, float], list[str]]] = []
    for name in dict.fromkeys(record["system"] for record in records):
        mine = [record for record in records if record["system"] == name]
        times = {record[field]: record["iteration_s"] * 1e3 for record in sorted(mine, key=itemgetter(field))}
        sparse, label = simulated_row(name).sparse, "~ " * any(not record["counted"] for record in mine) + name
        for kind, known, labels in lines:
            if kind == sparse and all(isclose(known[value], times[value], rel_tol=_ALIKE) for value in times):
                labels.append(label)
                break
        else:
            lines.append((sparse, times, [label]))
    for number, (sparse, times, labels) in enumerate(lines):
        marker = _MARKERS[number // 10 % len(_MARKERS)]  # colours begin again after ten
        ax.plot(
            list(times), list(times.values()), "-" if sparse else "--", marker=marker, ms=4, label=", ".join(labels)
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(list(lines[0][1]), [f"{value:g}" for value in lines[0][1]], minor=False)
    ax.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xlabel(heading)
    ax.set_ylabel("ms per iteration (~: the device's work as an order of magnitude)")
    ax.figure.legend(loc="outside lower center", fontsize="x-small", ncols=3)
    return ax.figure

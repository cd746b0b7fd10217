"""The picture of the README: steps of four systems on two links, from the table of ``docs/benchmarks.md``.

    $ python -m lab picture --output docs/images/steps.png

The figures of that table are measured, by the ``python -m lab bench`` commands above it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_safusion.lookup import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Rows of the table, from top to bottom, and how the picture names them.
ROWS = {
    "no exchange (the floor)": "no exchange",
    "`ddp`": "DDP",
    "`ddp-bf16`": "DDP in bf16",
    "`saf-pooled`": "default, 1 %",
}
#: Columns of the table with milliseconds and with the ratio to the floor, and what was measured there.
JOBS = (
    (1, 2, "convolutions, 4.6 M parameters, 100 Mbit/s"),
    (5, 6, "transformer, 22.5 M parameters, 1 Gbit/s"),
)
_COLORS = ("#9aa3ad", "#c8d3de", "#a9bdd1", "#1f5fa8")


def picture(document: str = "docs/benchmarks.md", output: str = "docs/images/steps.png") -> None:
    """Draws the step of four systems on two links.

    Args:
        document: Has the table.
        output: Picture to write.

    Raises:
        ValueError: If a row of the table is missing.
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    need("matplotlib", "plot")
    from matplotlib.figure import Figure

    cells = table(Path(document).read_text(encoding="utf-8"))
    figure = Figure(figsize=(8, 2.5), layout="constrained")
    for axes, (at, ratio, title) in zip(figure.subplots(1, 2), JOBS, strict=True):
        _draw(axes, [(float(row[at]), float(row[ratio])) for row in cells], title)
    unit = "ms per step, two workers, each on a CPU core (and times a step without any exchange)"
    figure.supxlabel(unit, size="small")
    figure.savefig(output, dpi=150)


def table(text: str) -> list[list[str]]:
    """Cells of the rows in :data:`ROWS`, of the first table that has them.

    Raises:
        ValueError: If one is missing.
    """
    found = []
    for name in ROWS:
        row = re.search(rf"^\| {re.escape(name)} \|.*$", text, re.MULTILINE)
        if row is None:
            raise ValueError(f"the document has no row {name!r}")
        found.append([cell.strip() for cell in row[0].strip("|").split("|")])
    return found


def _draw(axes: Axes, figures: Sequence[tuple[float, float]], title: str) -> None:
    places = range(len(figures))
    axes.barh(places, [ms for ms, _ in figures], color=_COLORS, height=0.7)
    for place, (ms, ratio) in zip(places, figures, strict=True):
        axes.annotate(f" {ms:.0f} ms ({ratio:.2f}x)", (ms, place), va="center", fontsize="small")
    axes.set_yticks(places, ROWS.values())
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(ms for ms, _ in figures))
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(title, fontsize="small", loc="left")

"""The pictures of the README and of ``docs/results.md``, from the tables of the documents.

    $ python -m lab picture

The figures of those tables are measured; each stands below its command.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab.svg import BF16, DDP, DEFAULT, FLOOR, chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: How the table of measured steps in ``docs/benchmarks.md`` begins.
STEPS = "| at the default density |"
#: Its rows that are drawn, from top to bottom, and how the picture names them.
ROWS = {
    "no exchange (the floor)": "no exchange",
    "`ddp`": "DDP",
    "`ddp-bf16`": "DDP in bf16",
    "`saf-pooled`": "SAFusion, default",
}
#: Columns of that table with milliseconds and with the ratio to the floor, what was measured there, and the density.
JOBS = (
    (1, 2, "Convolutions, 4.6 M parameters, 100 Mbit/s", "SGD, 10 %"),
    (5, 6, "Transformer, 22.5 M parameters, 1 Gbit/s", "AdamW, 2 %"),
)
#: How the tables of ``docs/results.md`` begin.
ACCURACY, TIMES = "| task |", "| job |"
_COLORS = (FLOOR, DDP, BF16, DEFAULT)
_FURTHEST = 17.0  # per cent that the axis of differences shows on each side
_LENGTHS = ("#9cc3f5", "#6ba1e8", DEFAULT, "#2a5fb0")  # the longer a training, the darker


def picture(documents: Path = Path("docs"), output: Path = Path("docs/images")) -> None:
    """Draws ``steps.svg``, ``accuracy.svg`` and ``times.svg``.

    Args:
        documents: Folder with benchmarks.md and results.md.
        output: Folder for the pictures.

    Raises:
        ValueError: If a table or a row is missing.
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    steps = measured((documents / "benchmarks.md").read_text(encoding="utf-8"))
    results = (documents / "results.md").read_text(encoding="utf-8")
    title = "Milliseconds per step on slow links"
    with chart(output / "steps.svg", (5.2, 4.3), title, described(steps)) as figure:
        for axes, (at, ratio, name, density) in zip(figure.subplots(2, 1), JOBS, strict=True):
            names = [*list(ROWS.values())[:-1], f"{ROWS['`saf-pooled`']}\n({density})"]
            _bars(axes, names, [(float(row[at]), f"{float(row[ratio]):.2f}x") for row in steps], name)
        figure.supxlabel("ms per step (and times a step without exchange)", size="small")
    lengths, *differences = table(results, ACCURACY)
    shown = [row for row in differences if "±" in row[1]]
    about = "Differences of the loss to dense training, with 95 % intervals: the figures of the table on this page."
    with chart(output / "accuracy.svg", (5.2, 5.4), "Loss, default against dense training", about) as figure:
        _forest(figure.subplots(), lengths[1:], shown)
    heads, *jobs = table(results, TIMES)
    about = "Milliseconds per step of each job without exchange, under DDP, DDP in bf16 and the default: the table's."
    with chart(output / "times.svg", (5.2, 1.75 * len(jobs)), "Milliseconds per step", about) as figure:
        for axes, (name, *cells) in zip(figure.subplots(len(jobs), 1), jobs, strict=True):
            bars = [(head, cell) for head, cell in zip(heads[1:5], cells[:4], strict=True) if cell]
            _bars(axes, [head for head, _ in bars], [(float(cell), "") for _, cell in bars], name)


def measured(text: str) -> list[list[str]]:
    """Cells of the rows in :data:`ROWS` of the table :data:`STEPS`.

    Raises:
        ValueError: If the table or one of the rows is missing.
    """
    found = {row[0]: row for row in table(text, STEPS)}
    if missing := [name for name in ROWS if name not in found]:
        raise ValueError(f"the table {STEPS!r} has no row {missing[0]!r}")
    return [found[name] for name in ROWS]


def described(steps: Sequence[Sequence[str]]) -> str:
    """The figures of the README's picture in words, as its alternative text has them.

    Args:
        steps: Of :func:`measured`.
    """
    jobs = []
    for at, _, name, density in JOBS:
        figures = ", ".join(f"{way} {float(row[at]):.0f}" for way, row in zip(ROWS.values(), steps, strict=True))
        jobs.append(f"{name}: {figures} ({density}).")
    return f"Milliseconds per step. {' '.join(jobs)}"


def table(text: str, start: str) -> list[list[str]]:
    """Cells of a table of a document, by row; those of its head come first.

    Args:
        text: The document.
        start: How the table's head begins.

    Raises:
        ValueError: If there is no such table.
    """
    lines = re.search(rf"^{re.escape(start)}.*\n(?:\|.*\n?)+", text, re.MULTILINE)
    if lines is None:
        raise ValueError(f"the document has no table that begins with {start!r}")
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines())
    return [head, *rows]


def _bars(axes: Axes, names: Sequence[str], figures: Sequence[tuple[float, str]], title: str) -> None:
    """Horizontal bars, of one name each; their milliseconds, and what is written behind these."""
    colors = dict(zip(ROWS.values(), _COLORS, strict=True)) | {"default": DEFAULT}
    places = range(len(figures))
    shades = [colors[name.partition("\n")[0]] for name in names]
    axes.barh(places, [ms for ms, _ in figures], color=shades, height=0.7)
    for place, (ms, behind) in zip(places, figures, strict=True):
        note = f"{ms:,.0f} ms ({behind})" if behind else f"{ms:,.0f} ms"
        axes.annotate(note, (ms, place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, names)
    axes.tick_params(length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.55 * max(ms for ms, _ in figures))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.annotate(title, (0.02, 1.03), xycoords=("figure fraction", "axes fraction"), va="bottom", weight="bold")


def _forest(axes: Axes, lengths: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Means and intervals, a block of lines for each task; an arrow where an interval goes on."""
    from matplotlib import rcParams

    height, background = len(lengths) + 1.9, {"facecolor": rcParams["axes.facecolor"], "edgecolor": "none", "pad": 1}
    for block, (task, *cells) in enumerate(rows):
        for line, (cell, color) in enumerate(zip(cells, _LENGTHS, strict=True)):
            mean, half = map(float, cell.split("±"))
            place = block * height + line
            low, high = max(mean - half, -_FURTHEST), min(mean + half, _FURTHEST)
            axes.plot([low, high], [place, place], color=color, linewidth=2, solid_capstyle="butt")
            axes.plot(mean, place, "o", color=color, markersize=6, label=lengths[line] if block == 0 else None)
            for end, marker, beyond in ((low, "<", mean - half < low), (high, ">", mean + half > high)):
                if beyond:
                    axes.plot(end, place, marker, color=color, markersize=7, clip_on=False)
        axes.annotate(task, (-_FURTHEST, block * height - 1), va="center", weight="bold", bbox=background)
    axes.axvline(0, color=DDP, linewidth=1)
    axes.set_xlim(-_FURTHEST, _FURTHEST)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("loss in % of dense training's\nbetter  ←  0  →  worse")
    axes.figure.legend(loc="outside upper left", ncols=len(lengths))

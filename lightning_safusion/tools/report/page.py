"""A page of a run: one file without scripts and without requests, for light and dark screens, wide and narrow ones.

It is made from what the callbacks have written to the run's directory:

- ``overlap.json`` of :class:`~lightning_safusion.callbacks.OverlapProfiler`, which every report needs;
- ``missing_rate.json`` of :class:`~lightning_safusion.callbacks.TensorMissingRateMonitor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_safusion.callbacks.tuner import describe
from lightning_safusion.fusion.replan import Decision
from lightning_safusion.metrics.history import TensorRow, worst_first
from lightning_safusion.profiling import pictures
from lightning_safusion.profiling.figures import PARTS, RankFigures, StepFigures
from lightning_safusion.profiling.overlap_file import FILE as OVERLAP
from lightning_safusion.profiling.overlap_file import Overlap, load_overlap, read_file
from lightning_safusion.profiling.timeline import from_row
from lightning_safusion.tools.report.advice import advise
from lightning_safusion.tools.report.render import is_known, milliseconds, render, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

_MISSING = "missing_rate.json"
#: Ranks that :func:`breakdown` draws.
RANKS = 32
_HEAT_ROWS = 60
_OPEN_ROWS = 24  # longer tables are folded
_LATE = 0.01  # share of the step from which an exposed exchange is mentioned


@dataclass(frozen=True)
class Missing:
    """The file ``missing_rate.json``; its keys are those of ``MissingRateStatistics.summary``."""

    run: float
    samples: int
    steps: tuple[int, ...]
    missing_rate: float
    tensors: tuple[TensorRow, ...]

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Missing:
        """The content of the file."""
        return from_row(cls, {**content, "tensors": [from_row(TensorRow, row) for row in content["tensors"]]})


@dataclass(frozen=True)
class Run:
    """The files of a run."""

    folder: Path  # their directory
    recorded: datetime  # when overlap.json was written
    overlap: Overlap
    missing: Missing | None = None  # None if missing tensors were not sampled in this fit
    stale: tuple[str, ...] = ()  # names of files of another fit, which are not read


def find_overlap(folder: Path) -> Path | None:
    """The directory with ``overlap.json``: this one, or ``safusion`` in it; None if there is none."""
    return next((each for each in (folder, folder / "safusion") if (each / OVERLAP).exists()), None)


def load_run(folder: Path) -> Run:
    """Reads a run directory, or the logger's directory that has it as ``safusion``; raises as :func:`load_overlap`."""
    folder = find_overlap(folder) or folder
    overlap = load_overlap(folder)
    recorded = datetime.fromtimestamp((folder / OVERLAP).stat().st_mtime, timezone.utc)
    missing = read_file(folder / _MISSING, Missing.from_dict)
    if missing is not None and missing.run != overlap.run:
        return Run(folder, recorded, overlap, stale=(_MISSING,))
    return Run(folder, recorded, overlap, missing)


def render_page(run: Run) -> str:
    """The page as HTML."""
    overlap = run.overlap
    tensors = () if run.missing is None else run.missing.tensors
    worst = worst_first(tensors)
    names = {each.name for each in worst[:_HEAT_ROWS]}
    waits = [each.exposed_s for each in overlap.buffers if each.exposed_s > 0]
    return render(
        "page.html",
        run=run,
        overlap=overlap,
        mean=overlap.ranks.mean,
        dense_bytes=None if overlap.costs is None else sum(overlap.costs.dense_bytes),
        remarks=advise(overlap, None if run.missing is None else run.missing.missing_rate),
        late=None if overlap.timeline is None else pictures.longest_wait(overlap.timeline, _LATE),
        longest_s=max(waits, default=None),
        worst=worst,
        drawn=[each for each in tensors if each.name in names],
        pins=" ".join(f"{name.replace('_', '-')}=={version}" for name, version in overlap.versions.items()),
        parts=PARTS,
        colors=pictures.COLORS,
        pictures=pictures,
        breakdown=breakdown,
        drawn_ranks=RANKS,
        plot_times=plot_times,
        open_rows=_OPEN_ROWS,
        reviews=reviews(overlap.decisions),
        handover=handover(overlap.steps) if overlap.plain_ddp is not None else None,
    )


def handover(steps: Mapping[int, StepFigures]) -> tuple[int, StepFigures, StepFigures | None] | None:
    """The last recorded step that was exchanged, and means of the steps up to it and of those after it.

    None if none was exchanged; None for the latter if none was recorded.
    """
    last = max((number for number, each in steps.items() if is_known(each.exposed_s)), default=None)
    if last is None:
        return None
    before, after = ([each for number, each in steps.items() if (number > last) is side] for side in (False, True))
    return last, StepFigures.mean(before), StepFigures.mean(after) if after else None


def reviews(decisions: Sequence[Decision]) -> list[list[str]]:
    """Rows of the table of decisions: window, action, text, predicted and measured gain, window before.

    Reviews in a row that change nothing are one row, with the text of the one that promises most.
    """
    # windows are counted anew where the model is wrapped again
    engines = np.cumsum(np.diff([each.window for each in decisions], prepend=-1) <= 0)

    def alike(place: int) -> tuple[int, ...]:
        each = decisions[place]
        return (each.buffers, each.rival, int(engines[place])) if each.action == "stay" else (place,)

    rows = []
    for _, places in groupby(range(len(decisions)), alike):
        group = [decisions[place] for place in places]
        most = max(group, key=lambda each: each.predicted or 0.0)
        windows = f"{group[0].window:,}" + (f" to {group[-1].window:,}" if len(group) > 1 else "")
        text = describe(most) + (f" (the most in {len(group)} reviews)" if len(group) > 1 and most.predicted else "")
        gains = [_span(group, name, partial(share, sign="+")) for name in ("predicted", "measured")]
        rows.append([windows, most.action, text, *gains, _span(group, "seconds", partial(milliseconds, digits=2))])
    return rows


def _span(group: Sequence[Decision], name: str, form: Callable[[float | None], str]) -> str:
    """The least and the largest of a figure."""
    known = [value for each in group if is_known(value := getattr(each, name))]
    return " to ".join(dict.fromkeys((form(min(known)), form(max(known))))) if known else form(None)


def breakdown(figures: RankFigures) -> Figure | SubFigure:
    """One stacked bar for each of the first ranks: the parts of a step's time."""
    shown = figures.ranks[:RANKS]
    axes = pictures.new_axes(1.4 + 0.36 * len(shown))
    at = np.zeros(len(shown))
    for part, label in PARTS.items():
        lengths = np.nan_to_num([getattr(each, f"{part}_s") * 1e3 for each in shown])
        if lengths.any():
            axes.barh(range(len(shown)), lengths, left=at, color=pictures.COLORS[part], label=label)
        at += lengths
    axes.set_yticks(range(len(shown)), [f"rank {rank}" for rank in range(len(shown))])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    if axes.containers:
        axes.figure.legend(loc="outside lower center", ncols=len(PARTS), fontsize="small", frameon=False)
    return axes.figure


def plot_times(steps: Mapping[int, StepFigures]) -> Figure | SubFigure:
    """Step time and exposed exchange of the recorded steps, over the run."""
    axes = pictures.new_axes(2.6)
    for part, color, label in (
        ("step", pictures.COLORS["backward"], "step"),
        ("exposed", pictures.COLORS["exposed"], PARTS["exposed"]),
    ):
        times = {number: getattr(each, f"{part}_s") * 1e3 for number, each in steps.items()}
        known = {number: time for number, time in times.items() if not np.isnan(time)}
        axes.scatter(list(known), list(known.values()), 9.0, color, label=label)
    axes.set_ylim(bottom=0.0)
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="step", ylabel="ms")
    axes.grid(alpha=0.3)
    axes.figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    return axes.figure

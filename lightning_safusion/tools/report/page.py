"""A page of a run: one file without scripts and without requests, for light and dark screens, wide and narrow ones.

It is made from what the callbacks have written to the run's directory:

- ``overlap.json`` of :class:`~lightning_safusion.callbacks.OverlapProfiler`, which every report needs;
- ``missing_rate.json`` of :class:`~lightning_safusion.callbacks.TensorMissingRateMonitor`.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from io import StringIO
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from lightning_safusion.__about__ import __version__
from lightning_safusion.callbacks.tuner import describe
from lightning_safusion.metrics.history import TensorRow, worst_first
from lightning_safusion.profiling import pictures
from lightning_safusion.profiling.figures import PARTS, RankFigures, StepFigures
from lightning_safusion.profiling.overlap_file import FILE as OVERLAP
from lightning_safusion.profiling.overlap_file import Overlap, read_file
from lightning_safusion.profiling.timeline import from_row
from lightning_safusion.tools.report.advice import advise

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure, SubFigure

FILE = "report.html"

_MISSING = "missing_rate.json"
#: Ranks that :func:`breakdown` draws.
RANKS = 32
_HEAT_ROWS = 60
_OPEN_ROWS = 24  # longer tables are folded
# Names may have control characters, which matplotlib writes as they are and no file of XML 1.0 may hold.
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
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


def load_run(folder: Path) -> Run:
    """Reads a run directory, or the logger's directory that has it as ``safusion``.

    Raises:
        ValueError: If there is no ``overlap.json``, or a file is damaged; the message names the file and the entry.
    """
    if not (folder / OVERLAP).exists() and (folder / "safusion" / OVERLAP).exists():
        folder = folder / "safusion"
    overlap = read_file(folder / OVERLAP, Overlap.from_dict)
    if overlap is None:
        raise ValueError(
            f"no {OVERLAP} in {folder}: train with Trainer(callbacks=[OverlapProfiler()]), which writes it at the "
            "end of a fit, to safusion/ in the logger's directory or to its dirpath"
        )
    recorded = datetime.fromtimestamp((folder / OVERLAP).stat().st_mtime, timezone.utc)
    missing = read_file(folder / _MISSING, Missing.from_dict)
    if missing is not None and missing.run != overlap.run:
        return Run(folder, recorded, overlap, stale=(_MISSING,))
    return Run(folder, recorded, overlap, missing)


def milliseconds(seconds: float | None, digits: int = 1) -> str:
    """Seconds as text; a dash if they are not known."""
    return f"{seconds * 1e3:,.{digits}f} ms" if is_known(seconds) else "–"


def share(value: float | None, digits: int = 1, sign: str = "") -> str:
    """A share in percent, with its sign if ``sign`` is ``"+"``; a dash if it is not known."""
    return f"{value:{sign}.{digits}%}" if is_known(value) else "–"


def counted(number: int, what: str) -> str:
    """A number of things, in the plural unless it is 1."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def is_known(value: float | None) -> TypeGuard[float]:
    """Whether there is such a number."""
    return value is not None and not isnan(value)


def render_page(run: Run) -> str:
    """The page as HTML.

    Raises:
        ModuleNotFoundError: If Jinja2 or matplotlib is missing; names the extra that brings them.
    """
    overlap = run.overlap
    tensors = () if run.missing is None else run.missing.tensors
    worst = worst_first(tensors)
    names = {each.name for each in worst[:_HEAT_ROWS]}
    waits = [each.exposed_s for each in overlap.buffers if each.exposed_s > 0]
    return (
        _environment()
        .get_template("page.html")
        .render(
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
            picture=picture,
            pictures=pictures,
            breakdown=breakdown,
            drawn_ranks=RANKS,
            plot_times=plot_times,
            open_rows=_OPEN_ROWS,
            version=__version__,
        )
    )


def picture(draw: Callable[..., Figure | SubFigure], *args: Any) -> str:
    """A drawing as the address of an image that holds it."""
    from matplotlib import rc_context

    written = StringIO()
    # text stays text, and a name is no formula
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "safusion", "text.parse_math": False}):
        draw(*args).figure.savefig(written, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + b64encode(_NO_XML.sub("\ufffd", written.getvalue()).encode()).decode()


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


def _environment() -> Environment:
    try:
        import matplotlib  # noqa: F401 - the pictures need it
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ModuleNotFoundError as error:
        message = 'reports need Jinja2 and matplotlib: pip install "lightning-safusion[plot]"'
        raise ModuleNotFoundError(message) from error
    loader = PackageLoader("lightning_safusion.tools.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {each.__name__: each for each in (milliseconds, share, counted, describe)}
    environment.tests["known"] = is_known
    return environment


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Writes the :func:`report` of a run and returns its path.

    Raises:
        ModuleNotFoundError: If Jinja2 or matplotlib is missing; names the extra that brings them.
        ValueError: If the directory has no ``overlap.json``, or one of its files is damaged.
    """
    run = load_run(run_dir)
    output = run.folder / FILE if output is None else output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render_page(run), encoding="utf-8")
    return output


def report(run_dir: Path, output: Path | None = None) -> None:
    """Makes a web page of what the callbacks of a run have measured: pictures, the plan, settings, and advice.

    Args:
        run_dir: The directory with ``overlap.json`` (written by OverlapProfiler), or the logger's directory around it.
        output: File to write; ``report.html`` in the run's directory by default.
    """
    print(f"{write_report(run_dir, output)}: open it in a browser")

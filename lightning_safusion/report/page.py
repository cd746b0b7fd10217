"""The page: one file without scripts and without requests, for light and dark screens, wide and narrow ones."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from lightning_safusion.__about__ import __version__
from lightning_safusion.advice import Advice, JobFigures, advise
from lightning_safusion.callbacks.tuner import describe
from lightning_safusion.profiling.figures import PARTS
from lightning_safusion.profiling.picture import COLORS, longest_wait, plot_step
from lightning_safusion.report.load import Run, load_run

if TYPE_CHECKING:
    from jinja2 import Environment

FILE = "report.html"

_HEAT_ROWS = 60
_OPEN_ROWS = 24  # longer tables are folded
_LATE = 0.01  # share of the step from which an exposed exchange is worth a sentence


def milliseconds(seconds: float | None, digits: int = 1) -> str:
    """As text; a dash if it is not known."""
    return f"{seconds * 1e3:,.{digits}f} ms" if is_known(seconds) else "–"


def share(value: float | None, digits: int = 1) -> str:
    """A share in percent; a dash if it is not known."""
    return f"{value:.{digits}%}" if is_known(value) else "–"


def signed(value: float | None) -> str:
    """A gain in percent; a dash if it is not known."""
    return f"{value:+.1%}" if is_known(value) else "–"


def counted(number: int, what: str) -> str:
    """A number of things, in the plural unless it is 1."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def is_known(value: float | None) -> TypeGuard[float]:
    """Whether there is such a number."""
    return value is not None and not isnan(value)


def remarks(run: Run) -> list[Advice]:
    """What the figures say in plain words."""
    overlap, mean = run.overlap, run.overlap.ranks.mean
    if overlap.plain_ddp is not None:
        return [Advice("good", f"Plain DDP exchanges the gradients: {overlap.plain_ddp}.")]
    if isnan(mean.exposed_s) or overlap.density is None:
        return [Advice("warning", "No exchange was recorded: train for more steps, or record more of them.")]
    return advise(
        JobFigures(
            step_s=mean.step_s,
            exposed_s=mean.exposed_s,
            density=overlap.density,
            bytes_sent=mean.bytes_sent,
            missing_rate=None if run.missing is None else run.missing.rate,
            slowest_rank=overlap.ranks.slowest,
            plan=overlap.plan,
            costs=overlap.costs,
        )
    )


def render_page(run: Run) -> str:
    """The whole page as HTML.

    Raises:
        ModuleNotFoundError: If Jinja2 or matplotlib is missing; names the extra that brings them.
    """
    environment = _environment()
    overlap = run.overlap
    absent = [each for each in run.missing.tensors if each.missing > 0] if run.missing is not None else []
    worst = sorted(absent, key=lambda each: (-each.missing, -each.everywhere))
    drawn = {each.name for each in worst[:_HEAT_ROWS]}
    waits = [each.exposed_s for each in overlap.buffers if each.exposed_s > 0]
    return environment.get_template("page.html").render(
        run=run,
        overlap=overlap,
        mean=overlap.ranks.mean,
        dense_bytes=None if overlap.costs is None else sum(overlap.costs.dense_bytes),
        remarks=remarks(run),
        late=None if overlap.timeline is None else longest_wait(overlap.timeline, _LATE),
        longest_s=max(waits, default=None),
        worst=worst,
        drawn=[each for each in absent if each.name in drawn],
        pins=" ".join(f"{name.replace('_', '-')}=={version}" for name, version in overlap.versions.items()),
        parts=PARTS,
        colors=COLORS,
        open_rows=_OPEN_ROWS,
        version=__version__,
    )


def _environment() -> Environment:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined

        from lightning_safusion.report import pictures
    except ModuleNotFoundError as error:
        message = 'reports need Jinja2 and matplotlib: pip install "lightning-safusion[plot]"'
        raise ModuleNotFoundError(message) from error
    loader = PackageLoader("lightning_safusion.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {each.__name__: each for each in (milliseconds, share, signed, counted, describe)}
    environment.tests["known"] = is_known
    environment.globals |= {"pictures": pictures, "plot_step": plot_step}
    return environment


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Writes the report of a run.

    Args:
        run_dir: Where the callbacks have left their files, or the directory that has it as ``safusion``.
        output: File to write; ``report.html`` in the run's directory by default.

    Returns:
        The file.

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

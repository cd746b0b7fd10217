"""The page: one file without scripts and without requests, for light and dark screens, wide and narrow ones."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from string import Template

from lightning_safusion.__about__ import __version__
from lightning_safusion.report import sections
from lightning_safusion.report.elements import counted
from lightning_safusion.report.load import Run, load_run
from lightning_safusion.report.markup import Markup, element, join

FILE = "report.html"


def render_page(run: Run) -> str:
    """The whole page as HTML."""
    parts = (
        sections.headline,
        sections.advice,
        sections.timeline,
        sections.breakdown,
        sections.plan,
        sections.tuning,
        sections.missing,
        sections.settings,
        sections.reproduce,
    )
    footer = element("footer", element("p", f"lightning-safusion {__version__}"))
    body = join([_header(run), element("main", *(part(run) for part in parts)), footer])
    template = Template(files("lightning_safusion.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(title=join([f"SAFusion report: {run.folder.resolve().name}"]), body=body)


def _header(run: Run) -> Markup:
    overlap = run.overlap
    density = "" if overlap.density is None else f", density {overlap.density:g}"
    workers = counted(overlap.world_size, "worker")
    recorded = f"recorded {run.recorded:%d %B %Y, %H:%M} UTC"
    about = element("p", f"System {overlap.system}{density}, {workers} ({overlap.device}), {recorded}")
    return element("header", element("h1", "Where the exchange goes"), about, element("p", str(run.folder)))


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Writes the report of a run.

    Args:
        run_dir: Where the callbacks have left their files, or the directory that has it as ``safusion``.
        output: File to write; ``report.html`` in the run's directory by default.

    Returns:
        The file.

    Raises:
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

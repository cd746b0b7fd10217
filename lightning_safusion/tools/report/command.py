"""The ``report`` command: a page of one run, or of several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_safusion.literal import first_of
from lightning_safusion.profiling.overlap_file import FILE as OVERLAP
from lightning_safusion.tools.report.curves import RUNS, render_curves
from lightning_safusion.tools.report.metrics_file import FILE as METRICS
from lightning_safusion.tools.report.metrics_file import Logged, find_metrics, read_metrics
from lightning_safusion.tools.report.page import find_overlap, load_run, render_page


def report(runs: Sequence[Path], output: Path | None = None) -> None:
    """Makes a web page of a run that OverlapProfiler has measured, or of the loss and the figures that one or several
    trainings have logged with Lightning's CSVLogger, side by side.

    Args:
        runs: Folders of loggers, or files metrics.csv. One that has overlap.json of OverlapProfiler: times, plan and
            advice. Several: how the first differs from each of the others (SAFusion, then DDP).
        output: File to write. By default report.html, or comparison.html of several runs, in the first run's folder.
    """
    if len(runs) > RUNS:
        raise ValueError(f"a page has room for {RUNS} runs, got {len(runs)}")
    profiled = find_overlap(runs[0]) if len(runs) == 1 else None
    if profiled is not None:
        folder, page = profiled, render_page(load_run(profiled))
    else:
        logged = [_read(run, alone=len(runs) == 1) for run in runs]
        if len({each.path.resolve() for each in logged}) < len(logged):
            raise ValueError(f"a run is given twice: {', '.join(map(str, runs))}")
        folder = logged[0].path.parent
        page, words = render_curves(logged)
        for text in words:
            print(text)
    output = output or folder / ("report.html" if len(runs) == 1 else "comparison.html")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    print(f"{output}: open it in a browser")


def _read(run: Path, alone: bool) -> Logged:
    path = find_metrics(run)
    if path is not None:
        return read_metrics(path)
    if not run.exists():
        raise ValueError(f"there is no {run}" + (f". Did you mean --output {run}?" if run.suffix == ".html" else ""))
    if run.is_file():
        raise ValueError(f"{run} is no CSV: give {METRICS} of CSVLogger, or the folder around it")
    below = sorted(str(each.parent) for each in (*run.glob(f"*/{METRICS}"), *run.glob(f"*/*/{METRICS}")))
    if below:
        raise ValueError(f"{run} holds several runs: name those to show, of {first_of(below, 6)}")
    logs = f"Trainer(logger=CSVLogger('logs')), which writes {METRICS}"
    if alone:
        raise ValueError(
            f"no {OVERLAP} and no {METRICS} in {run}: train with {logs}, or with "
            f"Trainer(callbacks=[OverlapProfiler()]), which writes {OVERLAP} at the end of a fit, to safusion/ in the "
            "logger's folder or to its dirpath"
        )
    has = f" (only {OVERLAP}, which says nothing of the loss)" if find_overlap(run) else ""
    raise ValueError(f"no {METRICS} in {run}{has}: runs are compared by it; train with {logs}")

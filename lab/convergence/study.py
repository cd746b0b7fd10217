"""Runs the convergence laboratory, and makes its table and pictures.

    $ python -m lab convergence --output runs/convergence              # everything: hours on two cores
    $ python -m lab convergence --output runs/short --preset short     # whether it works: a minute
    $ python -m lab convergence --output runs/convergence --only 'bytes-transformer/pooled*' --seeds 0
    $ python -m lab convergence --output runs/mine --tasks digits-resnet --schemes 'dense,pooled[density=0.02]'
    $ python -m lab convergence --list

A run that is in ``results.jsonl`` is not run again: after an interruption, start the same command again. Needs the
extras ``examples`` and ``plot``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console

from lab.convergence import ranks
from lab.convergence.pictures import save_pictures
from lab.convergence.plan import CONTENDERS, FOUR_BITS, PRESETS, SCOPES, SMALL_DENSE, STUDIES
from lab.convergence.scheme import parse_scheme
from lab.convergence.summary import Summary, summarize, table
from lab.convergence.training import Run, read_results, results_of
from lab.processes import run_missing
from lab.tasks import parse_task
from lightning_safusion.lookup import look_up


def convergence(
    preset: str = "full",
    study: str | None = None,
    only: str = "*",
    tasks: Sequence[str] = (),
    schemes: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    processes: int = os.cpu_count() or 1,
    output: Path = Path("convergence"),
    list: bool = False,
    report: bool = False,
) -> None:
    """Trains tasks under schemes with virtual workers, and reports on all that has been run.

    Args:
        preset: "full", or "short" for whether everything works.
        study: Only the configurations of one study, such as scopes, remedies or observation-1.
        only: Only configurations whose names match this pattern.
        tasks: In place of the preset, with schemes: these tasks, such as "digits-resnet,bytes-transformer[steps=1200]".
        schemes: With tasks: schemes of your own, as in "dense,pooled[density=0.02,memory=residual[decay=0.9]]".
        seeds: Of weights and batches.
        processes: How many runs are under way at the same time.
        output: Folder of results and pictures.
        list: Print the names of the configurations, and run nothing.
        report: Only make table and pictures of what has been run.

    Raises:
        ValueError: If there is no such preset, study, task or scheme, or no configuration matches.
        RuntimeError: If a run has failed or was stopped.
    """
    if tasks or schemes:
        own = [(parse_task(name), parse_scheme(text)) for name in tasks for text in schemes]
        runs = [Run(task, scheme, seed) for seed in seeds for task, scheme in own]
    else:
        runs = look_up("preset", preset, PRESETS)(seeds)
    chosen = _chosen(runs, study, only)
    if not chosen:
        raise ValueError(f"no configuration matches only={only!r}, tasks and schemes: --list prints their names")
    if list:
        print(*dict.fromkeys(run.config for run in chosen), sep="\n")
        return
    ledger = read_results(output / "results.jsonl")
    complete = report or run_missing("runs", chosen, Run.train, ledger, processes, Console())
    results = results_of(ledger, runs)
    if results:
        write_report(summarize(runs, results), results, output)
    if not complete:
        raise RuntimeError("not all runs have been done: start the same command again")


def write_report(summaries: Sequence[Summary], results: ranks.Results, folder: Path) -> None:
    """Prints the tables, and saves them (``table.md``), the same figures (``summary.json``) and the pictures."""
    contests = [ranks.standings(results, each) for each in (CONTENDERS, SCOPES, FOUR_BITS, {**SCOPES, **SMALL_DENSE})]
    standings = [contest for contest in contests if contest]
    tables = [table(summaries), *map(ranks.table, standings)]
    text = "\n\n".join(tables)
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    figures = {
        "configurations": [summary.figures() for summary in summaries],
        "standings": [[row.figures() for row in contest] for contest in standings],
    }
    (folder / "summary.json").write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    files = save_pictures(summaries, folder)
    print(text)
    print(f"\nsaved: {', '.join(str(file) for file in [folder / 'table.md', folder / 'summary.json', *files])}")


def _chosen(runs: Sequence[Run], study: str | None, pattern: str) -> list[Run]:
    """The runs of a study whose names match a pattern of the shell, in which brackets mean a set of letters."""
    members = {(task.name, scheme) for task, scheme in look_up("study", study, STUDIES)} if study is not None else None
    return [
        run
        for run in runs
        if (run.config == pattern or fnmatchcase(run.config, pattern))
        and (members is None or (run.task.name, run.scheme) in members)
    ]

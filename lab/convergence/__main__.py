"""Runs the convergence laboratory, and makes its table and pictures.

    $ python -m lab.convergence --output runs/convergence              # everything: hours on two cores
    $ python -m lab.convergence --output runs/short --preset short     # whether it works: a minute
    $ python -m lab.convergence --output runs/convergence --only 'bytes-transformer/pooled*' --seeds 0
    $ python -m lab.convergence --list

A run that is in ``results.jsonl`` is not run again: after an interruption, start the same command again. Needs the
extras ``examples`` and ``plot``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console

from lab.convergence import ranks
from lab.convergence.pictures import save_pictures
from lab.convergence.plan import CONTENDERS, FOUR_BITS, PRESETS, SCOPES, SMALL_DENSE, STUDIES
from lab.convergence.runner import run_all
from lab.convergence.store import Run, Store
from lab.convergence.summary import Summary, markdown, summarize


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="full")
    parser.add_argument("--study", choices=list(STUDIES), help="only the configurations of one study")
    parser.add_argument("--only", metavar="GLOB", default="*", help="only configurations whose names match")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=Path("convergence"), help="folder of results and pictures")
    parser.add_argument("--list", action="store_true", help="print the names of the configurations")
    parser.add_argument("--report", action="store_true", help="only make table and pictures of what has been run")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, then reports on all that there is.

    Returns:
        0 if all chosen runs have been done.
    """
    args = _arguments(argv)
    console = Console()
    runs = PRESETS[args.preset]([int(seed) for seed in args.seeds.split(",")])
    chosen = _chosen(runs, args.study, args.only)
    if args.list:
        for config in dict.fromkeys(run.config for run in chosen):
            print(config)
        return 0
    if not chosen:
        print(f"no configuration matches {args.only!r}; --list prints their names", file=sys.stderr)
        return 2
    store = Store(args.output / "results.jsonl")
    complete = args.report or run_all(chosen, store, args.processes, console)
    results = store.results(runs)
    if results:
        report(summarize(runs, results), results, args.output)
    return 0 if complete else 1


def report(summaries: Sequence[Summary], results: ranks.Results, folder: Path) -> None:
    """Prints the tables, and saves them (``table.md``), the same figures (``summary.json``) and the pictures."""
    contests = [ranks.standings(results, each) for each in (CONTENDERS, SCOPES, FOUR_BITS, {**SCOPES, **SMALL_DENSE})]
    standings = [contest for contest in contests if contest]
    tables = [markdown(summaries), *map(ranks.markdown, standings)]
    text = "\n\n".join(tables)
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    figures = {
        "configurations": [summary.figures() for summary in summaries],
        "standings": [[asdict(row) for row in contest] for contest in standings],
    }
    (folder / "summary.json").write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    files = save_pictures(summaries, folder)
    print(text)
    print(f"\nsaved: {', '.join(str(file) for file in [folder / 'table.md', folder / 'summary.json', *files])}")


def _chosen(runs: Sequence[Run], study: str | None, pattern: str) -> list[Run]:
    """The runs of a study whose names match a pattern of the shell."""
    members = {(task.name, scheme) for task, scheme in STUDIES[study]} if study is not None else None
    return [
        run
        for run in runs
        if fnmatchcase(run.config, pattern) and (members is None or (run.task.name, run.scheme) in members)
    ]


if __name__ == "__main__":
    sys.exit(main())

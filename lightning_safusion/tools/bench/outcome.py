"""The results of a benchmark of a user's own job: table, picture, JSON, CSV, verdict, and the files it leads to."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_safusion.literal import literal, plural
from lightning_safusion.systems import DEFAULT, SYSTEMS, sharded_names
from lightning_safusion.tools.bench.files import with_strategy
from lightning_safusion.tools.bench.forecast import Recorded, simulated_as, turning_point
from lightning_safusion.tools.bench.job import Job
from lightning_safusion.tools.bench.results import Rounds, SystemFigures, machine, plot_tables, summarize
from lightning_safusion.tools.bench.rows import FLOOR, IN_STEP, YOURS
from lightning_safusion.tools.bench.verdict import Verdict, best_strategy, decide, judge, sends_all
from lightning_safusion.tools.tables import RowName, plain_table


@dataclass(frozen=True)
class JobConditions:
    """What was measured."""

    job: str  # name of the user's module
    workers: int
    machines: int
    device: str  # of the first process
    parameters: int  # elements whose gradients are exchanged
    replicas: int | None = None  # of a model that is sharded inside of them; None with DDP

    def named(self, text: str) -> str:
        """A text about rows, with their names in this job."""
        return text if self.replicas is None else sharded_names(text)

    @property
    def title(self) -> str:
        """All of it in a line."""
        on = f"on {self.machines} machines" if self.machines > 1 else "on one machine"
        workers = f"{plural(self.workers, 'worker')} {on} ({self.device})"
        if self.replicas is not None:
            workers += f", {plural(self.replicas, 'replica')}"
        return f"{self.job}, {self.parameters / 1e6:.3g} M parameters; {workers}"


def write(
    conditions: JobConditions,
    turns: Rounds,
    failures: Mapping[str, str],
    recorded: Recorded | str,
    job: Job,
    output: Path,
    console: Console,
) -> None:
    """Prints table and verdict, and writes all files. ``turns``: all that was measured; ``failures``: why rows are left
    out; ``recorded``: trace and costs, or why there are none."""
    named = conditions.named
    for row, reason in failures.items():
        console.print(literal(f"{named(row)} {'has failed later' if row in turns else 'is left out'}: {reason}"))
    if "ddp" not in turns:
        console.print(named("Stopped before a step of DDP was measured: there is no table."))
        return
    figures = summarize(turns)
    verdict = _verdict(figures, turns, recorded)
    strategy = best_strategy(verdict, job.ddp_options, YOURS in failures, job.sharded)
    figures = [replace(row, system=named(row.system)) for row in figures]
    console.print(table_of(figures, conditions))
    console.print()
    sentences = [named(sentence) for sentence in verdict.sentences]
    for number, sentence in enumerate(sentences):
        console.print(literal(sentence, "" if number else "bold"))
    written = "Settings"
    if isinstance(recorded, Recorded):
        written = "Settings, trace, costs"
        recorded.trace.save(output / "trace.json")
        recorded.costs.save(output / "calibration.json")
    else:
        console.print(literal(f"Nothing was simulated: {recorded}."))
    (output / "best.yaml").write_text(with_strategy(job.content, strategy), encoding="utf-8")
    best = {"best": named(verdict.row), "baseline": named(verdict.baseline), "verdict": sentences}
    _write_figures(conditions, figures, turns, failures, best, output)
    console.print(literal(f"{written}, table and picture: {output}"))


def _write_figures(
    conditions: JobConditions,
    figures: Sequence[SystemFigures],
    turns: Rounds,
    failures: Mapping[str, str],
    best: Mapping[str, Any],
    output: Path,
) -> None:
    named = conditions.named
    record = {
        "title": conditions.title,
        **asdict(conditions),
        "machine": machine(),
        "systems": [asdict(row) for row in figures],
        "left_out": {named(row): reason for row, reason in failures.items()},
        **best,
    }
    (output / "bench.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    with (output / "steps.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "round", "step", "seconds", "slowest_s", "loading_s"])
        writer.writerows(_steps({named(row): rounds for row, rounds in turns.items()}))
    plot_tables([(conditions.title, figures)]).savefig(output / "bench.png", dpi=120)


def table_of(figures: Sequence[SystemFigures], conditions: JobConditions) -> Table:
    """A line for each row."""
    dense = conditions.named("ddp")
    own = conditions.parameters * (conditions.replicas or conditions.workers) / conditions.workers  # of a worker
    ddp = next(row for row in figures if row.system == dense)
    table = plain_table(
        conditions.title,
        "Medians over the steps of all rounds, without loading; rows take turns in one run. quartiles: of the step. "
        "sent: share of the bytes of fp32 gradients that a worker hands to its collectives. memory: peak beside "
        f"{dense}'s.",
        "row",
        ("step\nms", "quartiles\nms", "over\nfloor", f"times as fast\nas {dense}", "sent", "memory\nMB"),
    )
    for row in figures:
        share = None if row.bytes_sent is None else row.bytes_sent / (4 * own)
        sent = "all" if sends_all(row) else "" if share is None else f"{share:.2%}"
        table.add_row(
            RowName(row.system, after=f" (plain {dense})" * row.by_ddp),
            f"{row.step_s * 1e3:.1f}",
            f"{row.low_s * 1e3:.1f} - {row.high_s * 1e3:.1f}",
            f"{row.over_floor:.2f}",
            f"{1 / row.over_ddp:.2f}",
            sent,
            f"{round((row.peak_bytes - ddp.peak_bytes) / 1e6):+,d}" if row.peak_bytes else "",
        )
    return table


def _verdict(figures: Sequence[SystemFigures], turns: Rounds, recorded: Recorded | str) -> Verdict:
    best, baseline = decide(figures, turns)
    row = best.system
    if best is baseline:  # then of the sparse row that came closest
        sparse = [each for each in figures if each.density is not None or each.system.startswith(DEFAULT)]
        row = min(sparse, key=lambda each: each.step_s).system if sparse else DEFAULT
    point, rival = None, baseline.system
    system = None if row in (FLOOR, IN_STEP, "ddp", YOURS) else simulated_as(row)
    if isinstance(recorded, Recorded) and system is not None and baseline.system in SYSTEMS:
        density = turns[row][0][0].density if row in turns else None
        measured = {each.system for each in figures}
        dense = dict.fromkeys([baseline.system, *({"ddp-bf16"} & measured - {row})])
        points = {name: turning_point(recorded, system, density, name) for name in dense}
        rival = min(points, key=lambda name: points[name][0] or 0.0)  # the first that is as fast
        point = points[rival]
    return judge(figures, turns, point, row, rival)


def _steps(turns: Rounds) -> Iterator[list[Any]]:
    for row, rounds in turns.items():
        for number, ranks in enumerate(rounds, 1):
            columns = zip(*(rank.steps for rank in ranks), strict=True), zip(*(r.loading for r in ranks), strict=True)
            for step, (seconds, loading) in enumerate(zip(*columns, strict=True)):
                if step > 0 and all(map(isfinite, seconds)):  # the first one of a turn does not count
                    yield [row, number, step, fmean(seconds), max(seconds), fmean(loading)]

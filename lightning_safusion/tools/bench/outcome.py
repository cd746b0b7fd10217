"""The results of a benchmark of a user's own job: table, picture, JSON, CSV, verdict, and the files it leads to."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_safusion.integration.parameters import trainable
from lightning_safusion.literal import literal, plural
from lightning_safusion.systems import DEFAULT, SYSTEMS
from lightning_safusion.tools.bench.files import with_strategy
from lightning_safusion.tools.bench.floor import FLOOR, IN_STEP
from lightning_safusion.tools.bench.forecast import Recorded, simulated_as, turning_point
from lightning_safusion.tools.bench.job import Job
from lightning_safusion.tools.bench.meeting import Meeting
from lightning_safusion.tools.bench.results import Block, SystemFigures, machine, plot_tables, summarize
from lightning_safusion.tools.bench.turns import Bench, Turned
from lightning_safusion.tools.bench.verdict import YOURS, Verdict, best_strategy, decide, judge, sends_all
from lightning_safusion.tools.tables import RowName, plain_table


@dataclass(frozen=True)
class JobConditions:
    """What was measured.

    Args:
        job: Name of the user's module.
        workers: Processes.
        machines: Of them.
        device: Of the first process.
        parameters: Elements whose gradients are exchanged.
    """

    job: str
    workers: int
    machines: int
    device: str
    parameters: int

    @property
    def title(self) -> str:
        """All of it in a line."""
        on = f"on {self.machines} machines" if self.machines > 1 else "on one machine"
        workers = f"{plural(self.workers, 'worker')} {on} ({self.device})"
        return f"{self.job}, {self.parameters / 1e6:.3g} M parameters; {workers}"


def conditions_of(bench: Bench, meeting: Meeting, nodes: int) -> JobConditions:
    """The conditions of a benchmark whose turns have ended."""
    count = sum(param.numel() for _, param in trainable(bench.module))
    return JobConditions(type(bench.module).__name__, meeting.workers, nodes, meeting.device.type, count)


@dataclass(frozen=True)
class Outcome:
    """All that was measured.

    Args:
        conditions: Of the measurement.
        turns: Of each row the turns of each round, by rank.
        failures: Rows that are left out, and why.
        recorded: Trace and costs; None if there are none.
        note: Why there are none.
    """

    conditions: JobConditions
    turns: Mapping[str, Sequence[Sequence[Turned]]]
    failures: Mapping[str, str]
    recorded: Recorded | None
    note: str


def write(outcome: Outcome, job: Job, output: Path, console: Console) -> None:
    """Prints table and verdict, and writes all files."""
    for row, reason in outcome.failures.items():
        console.print(literal(f"{row} {'has failed later' if row in outcome.turns else 'is left out'}: {reason}"))
    if "ddp" not in outcome.turns:
        console.print("Stopped before a step of DDP was measured: there is no table.")
        return
    figures = figures_of(outcome.turns)
    console.print(table_of(figures, outcome.conditions))
    verdict = _verdict(figures, outcome)
    console.print()
    for sentence in verdict.sentences:
        console.print(literal(sentence, "bold" if sentence is verdict.sentences[0] else ""))
    written = ["Settings"]
    if outcome.recorded is not None:
        written += ["trace", "costs"]
        outcome.recorded.trace.save(output / "trace.json")
        outcome.recorded.costs.save(output / "calibration.json")
    elif outcome.note:
        console.print(literal(f"Nothing was simulated: {outcome.note}."))
    strategy = best_strategy(verdict, job.ddp_options, YOURS in outcome.failures)
    (output / "best.yaml").write_text(with_strategy(job.content, strategy), encoding="utf-8")
    record = {
        "title": outcome.conditions.title,
        **asdict(outcome.conditions),
        "machine": machine(),
        "systems": [asdict(row) for row in figures],
        "left_out": dict(outcome.failures),
        "best": verdict.row,
        "baseline": verdict.baseline,
        "verdict": list(verdict.sentences),
    }
    (output / "bench.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    _write_steps(outcome.turns, output / "steps.csv")
    plot_tables([(outcome.conditions, figures)]).savefig(output / "bench.png", dpi=120)
    console.print(literal(f"{', '.join(written)}, table and picture: {output}"))


def figures_of(turns: Mapping[str, Sequence[Sequence[Turned]]]) -> list[SystemFigures]:
    """Figures of all rows."""
    blocks = {
        row: [[Block(tuple(t.steps), t.figures, None, t.peak_bytes or 0, t.plan) for t in ranks] for ranks in rounds]
        for row, rounds in turns.items()
    }
    return summarize(blocks)


def table_of(figures: Sequence[SystemFigures], conditions: JobConditions) -> Table:
    """One line per row, in the order given."""
    ddp = next(row for row in figures if row.system == "ddp")
    table = plain_table(
        conditions.title,
        "Medians over the steps of all rounds, without loading; rows take turns in one run. quartiles: of the step. "
        "sent: share of the bytes of fp32 gradients that a worker hands to its collectives. memory: peak beside ddp's.",
        "row",
        ("step\nms", "quartiles\nms", "over\nfloor", "times as fast\nas ddp", "sent", "memory\nMB"),
    )
    for row in figures:
        share = None if row.bytes_sent is None else row.bytes_sent / (4 * conditions.parameters)
        sent = "all" if sends_all(row) else "" if share is None else f"{share:.2%}"
        table.add_row(
            RowName(row.system, after=" (plain ddp)" * row.by_ddp),
            f"{row.step_s * 1e3:.1f}",
            f"{row.low_s * 1e3:.1f} - {row.high_s * 1e3:.1f}",
            f"{row.over_floor:.2f}",
            f"{1 / row.over_ddp:.2f}",
            sent,
            f"{round((row.peak_bytes - ddp.peak_bytes) / 1e6):+,d}" if row.peak_bytes else "",
        )
    return table


def _verdict(figures: Sequence[SystemFigures], outcome: Outcome) -> Verdict:
    """The verdict, with what the simulator says of the row that it is about."""
    best, baseline = decide(figures, outcome.turns)
    row = best.system
    if best is baseline:  # then of the sparse row that came closest
        sparse = [each for each in figures if each.density is not None or each.system.startswith(DEFAULT)]
        row = min(sparse, key=lambda each: each.step_s).system if sparse else DEFAULT
    point, rival = None, baseline.system
    system = None if row in (FLOOR, IN_STEP, "ddp", YOURS) else simulated_as(row)
    if outcome.recorded is not None and system is not None and baseline.system in SYSTEMS:
        turns = outcome.turns.get(row)
        density = turns[0][0].density if turns else None
        measured = {each.system for each in figures}
        dense = dict.fromkeys([baseline.system, *({"ddp-bf16"} & measured - {row})])
        points = {name: turning_point(outcome.recorded, system, density, name) for name in dense}
        rival = min(points, key=lambda name: points[name][0] or 0.0)  # the first that is as fast
        point = points[rival]
    return judge(figures, outcome.turns, point, row, rival)


def _write_steps(turns: Mapping[str, Sequence[Sequence[Turned]]], path: Path) -> None:
    """One line for each row, round and step."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "round", "step", "seconds", "slowest_s", "loading_s"])
        writer.writerows(_lines(turns))


def _lines(turns: Mapping[str, Sequence[Sequence[Turned]]]) -> Iterator[list[Any]]:
    for row, rounds in turns.items():
        for number, ranks in enumerate(rounds, 1):
            columns = zip(*(rank.steps for rank in ranks), strict=True), zip(*(r.loading for r in ranks), strict=True)
            for step, (seconds, loading) in enumerate(zip(*columns, strict=True)):
                if step > 0 and all(map(isfinite, seconds)):  # the first one of a turn does not count
                    yield [row, number, step, fmean(seconds), max(seconds), fmean(loading)]

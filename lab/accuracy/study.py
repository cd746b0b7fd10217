"""``python -m lab accuracy``: how long rows train over a link until they are nearly as good as DDP.

A time is a product of two measurements: the steps until a row is as good, in trainings with virtual workers, one
process each; and the seconds of a step, of real workers on the link, in turns. Both have the same engine and the same
buffers: virtual workers use the plan that the real ones use when their steps are timed, with the collective of each
buffer. (On the link a plan settles in the first few dozen steps, which differ a little in their selections and times.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lab.accuracy.job import TrainedJob, trained_row
from lab.accuracy.reached import RowTimes, summarize
from lab.accuracy.report import Setting, as_record, build_table, plot_rows
from lab.accuracy.training import Curve, Training, check_trainable, train_curve
from lab.bench.links import machines
from lab.bench.measure import REFERENCES, Rhythm, measure
from lab.bench.run import begin, usable_rates
from lab.processes import Ledger, run_missing
from lab.tasks import TASKS, Task
from lightning_safusion.__about__ import __version__
from lightning_safusion.literal import literal
from lightning_safusion.lookup import look_up
from lightning_safusion.tools.bench.results import summarize as summarize_steps
from lightning_safusion.tools.bench.rows import FLOOR

_SYSTEMS = ("ddp-bf16", "powersgd", "saf-naive", "saf-inter", "safusion")


@dataclass(frozen=True)
class Steps:
    """Steps of all rows of one run on a link.

    Args:
        rows: By name, the floor included.
    """

    rows: dict[str, RowTimes]

    @classmethod
    def read(cls, rows: dict[str, dict[str, Any]]) -> Steps:
        """From plain values."""
        return cls({name: RowTimes(**row) for name, row in rows.items()})


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Args:
        task: What is trained.
        systems: Rows, with options; DDP is always one of them.
        density: Of rows that have none of their own.
        workers: Real and virtual ones; they share the task's batch.
        seeds: Of weights and batches.

    Raises:
        ValueError: If the batch cannot be shared, or virtual workers cannot do what a row does.
    """

    task: Task
    systems: tuple[str, ...]
    density: float
    workers: int
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        task, workers = self.task, self.workers
        if task.batch % workers:
            raise ValueError(f"{task.batch} samples per step of {task.name} cannot be shared by {workers} workers")
        for name in self.trained:
            check_trainable(trained_row(name), task)

    @property
    def trained(self) -> list[str]:
        """Rows that are trained."""
        return [name for name in self.measured if name != FLOOR]

    @property
    def measured(self) -> list[str]:
        """Rows whose steps are measured: the floor as well."""
        return list(dict.fromkeys([*REFERENCES, *self.systems]))


def accuracy(
    task: str = "digits-resnet",
    systems: Sequence[str] = _SYSTEMS,
    density: float = 0.01,
    workers: int = 2,
    bandwidth: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    rounds: int = 6,
    block: int = 6,
    warmup: int = 30,
    output: Path = Path("safusion_accuracy"),
) -> None:
    """Time to accuracy: how long systems train over a link until they are nearly as good as DDP at its end.

    Each training is recorded in the output folder when it ends, and not run again. Links need Linux and root; otherwise
    the loopback is measured, and the table says so.

    Args:
        task: What is trained, such as digits-resnet or bytes-transformer.
        systems: Rows, separated by commas; DDP is always one of them. They may change the optimizer:
            "oktopk[memory=ef21,momentum=0]".
        density: Share of the gradient that sparse systems send; rows may have others, as in "[density=0.1]".
        workers: Real and virtual ones; they share the task's batch.
        bandwidth: Of each worker's link, such as 100mbit; several are separated by commas. Without it: the loopback.
        seeds: Of weights and batches, separated by commas.
        rounds: Turns of each system on the link.
        block: Steps of a turn; the first does not count.
        warmup: Steps of each system before the first round.
        output: Folder for accuracy.json, accuracy.png and the logs of the workers.
    """
    if not 0 < density <= 1:
        raise ValueError(f"density is a share in (0, 1], got {density:g}")
    chosen = look_up("task", task, TASKS)
    comparison = Comparison(chosen, tuple(systems), density, workers, tuple(dict.fromkeys(seeds)))
    rhythm, (console, folder) = Rhythm(rounds, block, warmup), begin(workers, output)
    time_to_accuracy(comparison, usable_rates(bandwidth, console), rhythm, folder, console)


def time_to_accuracy(
    comparison: Comparison, rates: Sequence[str | None], rhythm: Rhythm, output: Path, console: Console
) -> list[dict[str, Any]]:
    """Measures steps, trains, and prints, writes and draws the times.

    Args:
        comparison: What is compared.
        rates: Of the links; None for the loopback.
        rhythm: Of the measurement of steps.
        output: Folder of results: what is there is not done again.
        console: Shows progress and tables.

    Returns:
        What is written to ``accuracy.json``: a record of each rate.

    Raises:
        RuntimeError: If a worker or a training fails, or the user has ended the trainings.
    """
    task, seeds = comparison.task, comparison.seeds
    times = {rate: _steps(comparison, rate, rhythm, output, console).rows for rate in rates}
    trainings = {
        (rate, name, seed): Training(
            task, trained_row(name), comparison.density, comparison.workers, seed, rows[name].plan
        )
        for rate, rows in times.items()
        for seed in seeds
        for name in comparison.trained
    }
    ledger = Ledger(output / "curves.jsonl", Curve, "a finished training")
    if not run_missing("trainings", list(trainings.values()), train_curve, ledger, os.cpu_count() or 1, console):
        raise RuntimeError("not all trainings have been done: start the same command again")
    curves = {key: curve for key, each in trainings.items() if (curve := ledger.get(each.settings())) is not None}
    records, figures = [], []
    for rate, measured in times.items():
        own = {name: {seed: curves[rate, name, seed] for seed in seeds} for name in comparison.trained}
        rows = summarize(task, own, measured)
        setting = Setting(task, comparison.workers, rate, comparison.density, seeds)
        console.print(build_table(rows, setting, measured[FLOOR].step_s))
        records.append(as_record(rows, setting, measured[FLOOR].step_s))
        figures.append((setting, rows))
    (output / "accuracy.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
    plot_rows(figures).savefig(output / "accuracy.png", dpi=120)
    console.print(literal(f"written to {output}"))
    return records


def _steps(comparison: Comparison, rate: str | None, rhythm: Rhythm, output: Path, console: Console) -> Steps:
    """Steps of all rows in one run, on workers that train the task's network on its data."""
    task, workers, names = comparison.task, comparison.workers, comparison.measured
    settings = {
        "task": task.name,
        "recipe": task.recipe(),
        "rows": names,
        "density": comparison.density,
        "workers": workers,
        "bandwidth": rate,
        "rounds": rhythm.rounds,
        "block": rhythm.block,
        "warmup": rhythm.warmup,
        "version": __version__,
    }
    ledger = Ledger(output / "steps.jsonl", Steps.read, "a measurement of steps")
    known = ledger.get(settings)
    if known is not None:
        return known
    console.print(f"[bold]steps of {task.name}, {workers} workers, {rate or 'loopback'}[/bold]")
    job = TrainedJob(task.name, "", task.batch // workers, comparison.density, training=task)
    with machines(workers, rate) as place:
        blocks = measure(job, names, place, rhythm, output / "logs", console).blocks
    steps = Steps(
        {
            row.system: RowTimes(row.step_s, row.low_s, row.high_s, row.wire_bytes, blocks[row.system][-1][0].plan)
            for row in summarize_steps(blocks)
        }
    )
    ledger.add(settings, steps)
    return steps

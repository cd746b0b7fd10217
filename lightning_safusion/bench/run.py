"""``safusion bench``: measures systems side by side, and prints, writes and draws what came of it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lightning_safusion.bench.accuracy import Comparison
from lightning_safusion.bench.accuracy import time_to_accuracy as measure_accuracy
from lightning_safusion.bench.calibrate import fit_run
from lightning_safusion.bench.figures import SystemFigures, summarize
from lightning_safusion.bench.links import bits_per_second, why_no_links
from lightning_safusion.bench.progress import step_bars
from lightning_safusion.bench.rows import refuse_training_options, split_rows
from lightning_safusion.bench.session import RECORDS, REFERENCES, Rhythm, machines, measure
from lightning_safusion.bench.table import Conditions, as_record, build_table, plot_tables, write_json
from lightning_safusion.bench.team import Place
from lightning_safusion.bench.workers import REFERENCE_STRATEGIES, Task
from lightning_safusion.bench.workload import scaled
from lightning_safusion.literal import literal
from lightning_safusion.naming import look_up
from lightning_safusion.simulate.trace import resolve_trace
from lightning_safusion.tasks import TASKS

_WIDTH = 120  # of tables in files and pipes
_SYSTEMS = "ddp-bf16,powersgd,saf-naive,saf-inter,safusion"


def run_bench(
    systems: str = _SYSTEMS,
    model: str = "conv",
    size: str = "base",
    batch_size: int = 16,
    density: str = "0.01",
    workers: int = 2,
    bandwidth: str | None = None,
    paced: str | None = None,
    scale: float = 1.0,
    rounds: int = 6,
    block: int = 6,
    warmup: int = 30,
    seed: int = 0,
    calibrate: bool = False,
    time_to_accuracy: str | None = None,
    seeds: str = "0,1,2",
    output: Path = Path("safusion_bench"),
) -> None:
    """Measures systems side by side: steps, exposed exchange, bytes and memory, over links of a given rate.

    The floor (no exchange at all), the floor with workers that wait for each other in every step, and DDP are always
    among the rows. All systems train in one run on the same workers, a few steps each in turn; every worker has one
    thread, and denormals are flushed. Links of a given rate need Linux and root; otherwise the loopback is measured,
    and the table says so.

    Args:
        systems: Names, separated by commas; "safusion systems" lists them. With options: "saf-pooled[wire=q4]".
        model: "conv", "transformer" or "lstm", on random data.
        size: "tiny", "small" or "base".
        batch_size: Samples of one worker.
        density: Share of the gradient that sparse systems send; several are separated by commas.
        workers: Processes that train together.
        bandwidth: Of each worker's link, such as 100mbit; several are separated by commas. Without it: the loopback.
        paced: Workers sleep through this trace (name or file) in place of training a model, so that more of them than
            cores can be measured: schedule and network are real, computation is not.
        scale: With paced: share of the trace's sizes that is exchanged, over links of that share of the bandwidth.
        rounds: Turns of each system.
        block: Steps of a turn; the first does not count.
        warmup: Steps of each system before the first round.
        seed: Of weights and batches.
        calibrate: Also fit the costs of collectives, selection and decoding, and record the trace of the job: files
            for "safusion plan --calibration FILE --trace FILE".
        time_to_accuracy: In place of steps alone: how long training takes until it is nearly as good as DDP's at its
            end. The task, such as digits-resnet or bytes-transformer; its trainings are written down in the output
            folder as they end, and not run again. Rows may change the optimizer: "oktopk[memory=ef21,momentum=0]".
        seeds: With time_to_accuracy: of weights and batches, separated by commas.
        output: Folder for bench.json, bench.png (accuracy.json, accuracy.png) and the logs of the workers.

    Raises:
        ValueError: If a name or number makes no sense.
        RuntimeError: If a worker fails; names its log.
    """
    given, rhythm = split_rows(systems), Rhythm(rounds, block, warmup)
    if workers < 2:
        raise ValueError(f"workers is {workers}: a single worker exchanges nothing, give 2 or more")
    console, tables = Console(width=None if sys.stdout.isatty() else _WIDTH), []
    torch.set_num_threads(1)  # no threads before the workers are forked
    output.mkdir(parents=True, exist_ok=True)
    others = {"model": model, "size": size, "batch_size": batch_size, "paced": paced, "scale": scale}
    if time_to_accuracy is not None:
        _refuse("with time_to_accuracy", others | {"calibrate": calibrate, "seed": seed})
        trained = look_up("task", time_to_accuracy, TASKS)
        comparison = Comparison(trained, tuple(given), _share(density), workers, _seeds(seeds))
        measure_accuracy(comparison, _rates(bandwidth, console), rhythm, output, console)
        return
    _refuse("without time_to_accuracy", {"seeds": seeds})
    refuse_training_options(name for name in given if name not in REFERENCE_STRATEGIES)
    names = list(dict.fromkeys([*REFERENCE_STRATEGIES, *REFERENCES, *given]))
    task = _task(model, size, batch_size, paced, scale, seed)
    for rate in _rates(bandwidth, console):
        with machines(workers, _scaled_rate(rate, scale)) as place:
            for share in _shares(density):
                task = replace(task, density=share)
                conditions = _conditions(task, workers, rate, scale)
                rows = _measure(task, names, place, rhythm, output, console, conditions, calibrate)
                console.print(build_table(rows, conditions))
                tables.append((conditions, rows))
    write_json([as_record(rows, conditions) for conditions, rows in tables], output / "bench.json")
    plot_tables(tables).savefig(output / "bench.png", dpi=120)
    console.print(literal(f"written to {output}"))


def _refuse(when: str, options: Mapping[str, Any]) -> None:
    """Refuses options that a mode could only ignore.

    Raises:
        ValueError: If one has another value than by default.
    """
    defaults = inspect.signature(run_bench).parameters
    for name, value in options.items():
        if value != defaults[name].default:
            raise ValueError(f"{name}={value} has no meaning {when}: leave it out")


def _share(density: str) -> float:
    shares = _shares(density)
    if len(shares) > 1:
        raise ValueError(
            f"time_to_accuracy takes one density, got {density}; rows may have others, as in [density=0.1]"
        )
    return shares[0]


def _seeds(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"seeds are written as in '0,1,2', got {text!r}")
    return tuple(dict.fromkeys(map(int, text.split(","))))


def _task(model: str, size: str, batch_size: int, paced: str | None, scale: float, seed: int) -> Task:
    if paced is None and scale != 1:
        raise ValueError(f"scale={scale:g} scales a trace: give one with paced, or choose a size")
    trace = scaled(resolve_trace(paced), scale) if paced is not None else None
    task = Task(model, size, batch_size, trace=trace, seed=seed)
    if trace is None:
        task.module()  # raises here, if there is no such model
    return task


def _rates(bandwidth: str | None, console: Console) -> list[str | None]:
    if bandwidth is None:
        return [None]
    rates: list[str | None] = [rate.strip() for rate in bandwidth.split(",")]
    for rate in rates:
        bits_per_second(rate or "")
    reason = why_no_links()
    if reason is None:
        return rates
    text = f"Links of {bandwidth} cannot be made: {reason}. The loopback is measured instead."
    console.print(literal(text), style="bold")
    return [None]


def _scaled_rate(rate: str | None, scale: float) -> str | None:
    return rate if rate is None or scale == 1 else f"{bits_per_second(rate) * scale / 1e3:.0f}kbit"


def _shares(density: str) -> list[float]:
    shares = [float(share) for share in density.split(",")]
    for share in shares:
        if not 0 < share <= 1:
            raise ValueError(f"density is a share in (0, 1], got {share:g}")
    return shares


def _conditions(task: Task, workers: int, rate: str | None, scale: float) -> Conditions:
    parameters = sum(param.numel() for param in task.module().parameters())
    job = f"{task.model} ({task.size}), batch {task.batch_size}" if task.trace is None else task.trace.name
    return Conditions(job, workers, rate, task.density, parameters, task.trace is not None, scale)


def _measure(
    task: Task,
    names: Sequence[str],
    place: Place,
    rhythm: Rhythm,
    output: Path,
    console: Console,
    conditions: Conditions,
    calibrate: bool,
) -> list[SystemFigures]:
    """Measures one table, with its progress on the console."""
    totals = {
        name: rhythm.warmup_of(name) + rhythm.rounds * rhythm.block
        for name in [*names, *(RECORDS if calibrate else ())]
    }
    suffix = f"{conditions.bandwidth or 'loopback'}-{conditions.density:g}"
    console.print(f"[bold]{conditions.title}[/bold]")
    with step_bars(totals, console) as tell:
        run = measure(task, names, place, rhythm, output / "logs", tell, record=calibrate)
    if calibrate:
        trace, costs = fit_run(run, rhythm)
        trace.save(output / f"trace-{suffix}.json")
        costs.save(output / f"calibration-{suffix}.json")
        console.print(f"costs and trace of this job on these workers: calibration-{suffix}.json, trace-{suffix}.json")
    return summarize(run.blocks)

"""Systems side by side on CPU workers of this machine, over links of a given rate.

$ python -m lab bench                                     # the loopback
$ sudo python -m lab bench --bandwidth 100mbit,1gbit      # links of a given rate (Linux, iproute2)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from lab.bench.calibrate import fit_run
from lab.bench.links import bits_per_second, machines, why_no_links
from lab.bench.measure import REFERENCES, Rhythm, Task, measure
from lab.bench.table import Conditions, as_record, build_table
from lab.bench.workload import scaled
from lightning_safusion.comm.cost import plain_rate
from lightning_safusion.literal import literal
from lightning_safusion.lookup import need
from lightning_safusion.tools.bench.results import plot_tables, summarize
from lightning_safusion.tools.bench.rows import REFERENCE_STRATEGIES, parse_row
from lightning_safusion.tools.plan.traces import resolve_trace

_WIDTH = 120  # of tables in files and pipes
_SYSTEMS = ("ddp-bf16", "powersgd", "saf-naive", "saf-inter", "safusion")


def bench(
    systems: Sequence[str] = _SYSTEMS,
    model: str = "conv",
    size: str = "base",
    batch_size: int = 16,
    optimizer: str = "sgd",
    density: Sequence[float] = (0.01,),
    workers: int = 2,
    bandwidth: Sequence[str] = (),
    paced: str | None = None,
    scale: float = 1.0,
    slow_motion: float = 1.0,
    rounds: int = 6,
    block: int = 6,
    warmup: int = 30,
    seed: int = 0,
    calibrate: bool = False,
    output: Path = Path("safusion_bench"),
) -> None:
    """Measures systems side by side on CPU workers of this machine, over links of a given rate.

    Links need Linux and root, else the loopback is measured, and the table says so. Every worker has one thread, and
    denormals are flushed. The floor (no exchange at all), the floor with workers that wait for each other in every
    step, and DDP are always among the rows.

    Args:
        systems: Names, separated by commas, with options: "saf-pooled[wire=bf16]".
        model: "conv", "transformer" or "lstm", on random data.
        size: "tiny", "small" or "base".
        batch_size: Samples of one worker.
        optimizer: "sgd", with momentum, or "adamw".
        density: Share of the gradient that sparse systems send; several are separated by commas.
        workers: Processes that train together.
        bandwidth: Of each worker's link, such as 100mbit; several are separated by commas. Without it: the loopback.
        paced: Workers sleep through this trace (name or file) in place of training a model, so that more of them than
            cores can be measured: schedule and network are real, computation is not.
        scale: With paced: share of the trace's sizes that is exchanged, over links of that share of the bandwidth.
        slow_motion: With paced: the computation, and what the links carry, takes so many times as long. What workers do
            for the exchange does not: as if each had so many times the processor.
        rounds: Turns of each system.
        block: Steps of a turn; the first does not count.
        warmup: Steps of each system before the first round, for systems that learn.
        seed: Of weights and batches.
        calibrate: Also fit the costs of collectives, selection and decoding, and record the trace of the job: files
            for "safusion plan --calibration FILE --trace FILE".
        output: Folder for the results: table, picture, logs.

    Raises:
        ValueError: If a name or number makes no sense.
        ModuleNotFoundError: If matplotlib is missing; names the extra.
        RuntimeError: If a worker fails; names its log.
    """
    names, rates = _checked(systems, density, bandwidth, paced, scale, slow_motion)
    rhythm = Rhythm(rounds, block, warmup)
    task = Task(model, size, batch_size, seed=seed, optimizer=optimizer)
    console, output = begin(workers, output)
    trace = scaled(resolve_trace(paced), scale, slow_motion) if paced is not None else None
    task = replace(task, trace=trace)
    parameters = sum(param.numel() for param in task.module().parameters())
    job = f"{model} ({size}), batch {batch_size}, {optimizer}" if trace is None else trace.name
    tables = []
    for rate in usable_rates(rates, console):
        with machines(workers, rate and f"{bits_per_second(rate) * scale / slow_motion / 1e3:.0f}kbit") as place:
            for share in density:
                conditions = Conditions(job, workers, rate, share, parameters, trace is not None, scale, slow_motion)
                console.print(literal(conditions.title, "bold"))
                shared = replace(task, density=share)
                run = measure(shared, names, place, rhythm, output / "logs", console, calibrate)
                if calibrate:
                    suffix = f"{rate or 'loopback'}-{share:g}.json"
                    recorded, costs = fit_run(run, rhythm)
                    recorded.save(output / f"trace-{suffix}")
                    costs.save(output / f"calibration-{suffix}")
                    console.print(f"costs and trace of this job on these workers: calibration-{suffix}, trace-{suffix}")
                tables.append((conditions, summarize(run.blocks)))
                console.print(build_table(tables[-1][1], conditions))
    records = [as_record(rows, conditions) for conditions, rows in tables]
    (output / "bench.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
    plot_tables([(conditions.title, rows) for conditions, rows in tables]).savefig(output / "bench.png", dpi=120)
    console.print(literal(f"written to {output}"))


def _checked(
    systems: Sequence[str],
    density: Sequence[float],
    bandwidth: Sequence[str],
    paced: str | None,
    scale: float,
    slow_motion: float,
) -> tuple[list[str], tuple[str, ...]]:
    """All rows, those that are always compared first, and the rates of the links; refuses what makes no sense."""
    for name in systems:
        if name not in (*REFERENCE_STRATEGIES, *REFERENCES):
            parse_row(name)
    if paced is None and scale != 1:
        raise ValueError(f"scale={scale:g} scales a trace: give one with paced, or choose a size")
    if paced is None and slow_motion != 1:
        raise ValueError(f"slow_motion={slow_motion:g} is of a trace: give one with paced")
    for share in density:
        if not 0 < share <= 1:
            raise ValueError(f"density is a share in (0, 1], got {share:g}")
    return list(dict.fromkeys([*REFERENCE_STRATEGIES, *REFERENCES, *systems])), tuple(map(plain_rate, bandwidth))


def begin(workers: int, output: Path) -> tuple[Console, Path]:
    """Prepares a measurement with pictures: checks what it needs, and makes the folder of the results.

    Raises:
        ValueError: If a single worker is to exchange something.
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    if workers < 2:
        raise ValueError(f"workers is {workers}: a single worker exchanges nothing, give 2 or more")
    need("matplotlib")
    torch.set_num_threads(1)  # no threads before the workers are forked
    output.mkdir(parents=True, exist_ok=True)
    return Console(width=None if sys.stdout.isatty() else _WIDTH), output


def usable_rates(bandwidth: Sequence[str], console: Console) -> list[str | None]:
    """The rates of the links; None, for the loopback, where none are given, or (with a message) links cannot be made.

    Raises:
        ValueError: If one is no rate.
    """
    if not bandwidth:
        return [None]
    for rate in bandwidth:
        bits_per_second(rate)
    reason = why_no_links()
    if reason is None:
        return list(bandwidth)
    links = ", ".join(bandwidth)
    console.print(f"Links of {links} cannot be made: {reason}. The loopback is measured instead.", style="bold")
    return [None]

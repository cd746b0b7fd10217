"""``safusion bench``: measures systems side by side, and prints, writes and draws what came of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from lightning_safusion.bench.extras import need
from lightning_safusion.bench.links import bits_per_second, why_no_links
from lightning_safusion.bench.medians import SystemFigures, summarize
from lightning_safusion.bench.progress import step_bars
from lightning_safusion.bench.session import RECORDS, REFERENCES, Rhythm, machines, measure
from lightning_safusion.bench.table import Conditions, as_record, build_table, plot_tables, write_json
from lightning_safusion.bench.team import Place
from lightning_safusion.bench.workers import REFERENCE_STRATEGIES, Task
from lightning_safusion.bench.workload import scaled
from lightning_safusion.literal import literal
from lightning_safusion.simulate.trace import resolve_trace

_WIDTH = 120  # of tables in files and pipes
_SYSTEMS = ("ddp-bf16", "powersgd", "saf-naive", "saf-inter", "safusion")


def run_bench(
    systems: Sequence[str] = _SYSTEMS,
    model: str = "conv",
    size: str = "base",
    batch_size: int = 16,
    density: Sequence[float] = (0.01,),
    workers: int = 2,
    bandwidth: Sequence[str] = (),
    paced: str | None = None,
    scale: float = 1.0,
    rounds: int = 6,
    block: int = 6,
    warmup: int = 30,
    seed: int = 0,
    calibrate: bool = False,
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
        output: Folder for bench.json, bench.png and the logs of the workers.

    Raises:
        ValueError: If a name or number makes no sense.
        ModuleNotFoundError: If matplotlib, or scipy with calibrate, is missing; names the extra that brings it.
        RuntimeError: If a worker fails; names its log.
    """
    rhythm, names = Rhythm(rounds, block, warmup), list(dict.fromkeys([*REFERENCE_STRATEGIES, *REFERENCES, *systems]))
    task = _task(model, size, batch_size, paced, scale, seed)
    console, output = begin(workers, output)
    if calibrate:
        need("scipy", "examples")
    for share in density:
        if not 0 < share <= 1:
            raise ValueError(f"density is a share in (0, 1], got {share:g}")
    tables = []
    for rate in usable_rates(bandwidth, console):
        with machines(workers, _scaled_rate(rate, scale)) as place:
            for share in density:
                task = replace(task, density=share)
                conditions = _conditions(task, workers, rate, scale)
                rows = _measure(task, names, place, rhythm, output, console, conditions, calibrate)
                console.print(build_table(rows, conditions))
                tables.append((conditions, rows))
    write_json([as_record(rows, conditions) for conditions, rows in tables], output / "bench.json")
    plot_tables(tables).savefig(output / "bench.png", dpi=120)
    console.print(literal(f"written to {output}"))


def begin(workers: int, output: Path) -> tuple[Console, Path]:
    """Prepares a measurement with pictures: asks for what it will need, and makes the folder of the results.

    Raises:
        ValueError: If a single worker is to exchange something.
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    if workers < 2:
        raise ValueError(f"workers is {workers}: a single worker exchanges nothing, give 2 or more")
    need("matplotlib", "plot")
    torch.set_num_threads(1)  # no threads before the workers are forked
    output.mkdir(parents=True, exist_ok=True)
    return Console(width=None if sys.stdout.isatty() else _WIDTH), output


def _task(model: str, size: str, batch_size: int, paced: str | None, scale: float, seed: int) -> Task:
    if paced is None and scale != 1:
        raise ValueError(f"scale={scale:g} scales a trace: give one with paced, or choose a size")
    trace = scaled(resolve_trace(paced), scale) if paced is not None else None
    task = Task(model, size, batch_size, trace=trace, seed=seed)
    if trace is None:
        task.module()  # raises here, if there is no such model
    return task


def usable_rates(bandwidth: Sequence[str], console: Console) -> list[str | None]:
    """The rates of the links; None, for the loopback, where there are none or links cannot be made, which is said.

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


def _scaled_rate(rate: str | None, scale: float) -> str | None:
    return rate if rate is None or scale == 1 else f"{bits_per_second(rate) * scale / 1e3:.0f}kbit"


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
        from lightning_safusion.bench.calibrate import fit_run  # scipy is an extra

        trace, costs = fit_run(run, rhythm)
        trace.save(output / f"trace-{suffix}.json")
        costs.save(output / f"calibration-{suffix}.json")
        console.print(f"costs and trace of this job on these workers: calibration-{suffix}.json, trace-{suffix}.json")
    return summarize(run.blocks)

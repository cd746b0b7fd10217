"""``safusion bench``: measures systems side by side, and prints, writes and draws the figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from lightning_safusion.bench.links import bits_per_second, why_no_links
from lightning_safusion.bench.measure import REFERENCE_STRATEGIES, REFERENCES, Rhythm, Task, measure
from lightning_safusion.bench.results import Conditions, as_record, build_table, plot_tables, summarize
from lightning_safusion.bench.rows import parse_row
from lightning_safusion.bench.team import machines
from lightning_safusion.bench.workload import scaled
from lightning_safusion.comm.cost import plain_rate
from lightning_safusion.literal import literal
from lightning_safusion.lookup import need
from lightning_safusion.simulate.trace import resolve_trace

_WIDTH = 120  # of tables in files and pipes
_SYSTEMS = ("ddp-bf16", "powersgd", "saf-naive", "saf-inter", "safusion")


def run_bench(
    systems: Sequence[str] = (),
    config: Sequence[str] = (),
    model: str = "conv",
    data: str | None = None,
    cli: str | None = None,
    size: str | None = None,
    batch_size: int | None = None,
    density: Sequence[float] = (),
    workers: int | None = None,
    bandwidth: Sequence[str] = (),
    paced: str | None = None,
    scale: float = 1.0,
    slow_motion: float = 1.0,
    rounds: int | None = None,
    block: int = 6,
    warmup: int | None = None,
    minutes: float | None = None,
    keep_callbacks: Sequence[str] = (),
    seed: int = 0,
    calibrate: bool | None = None,
    output: Path = Path("safusion_bench"),
) -> None:
    """Measures systems side by side, in a job of yours or on links of a given rate.

    A job of yours: "safusion bench --config config.yaml" (a file of LightningCLI) or "safusion bench --model
    package.module:Class --data package.module:Class", plain, under torchrun or under srun, on GPUs or CPUs. All rows
    train a few steps in turn on the same processes, from the same weights. It ends with a verdict, and with settings
    in best.yaml. Nothing is written to your loggers and checkpoints.

    Otherwise: networks of this package on CPU workers of this machine, over links of a given rate; they need Linux and
    root, else the loopback is measured, and the table says so. Every worker has one thread, and denormals are flushed.

    The floor (no exchange at all), the floor with workers that wait for each other in every step, and DDP are always
    among the rows.

    Args:
        systems: Names, separated by commas; "safusion systems" lists them. With options: "saf-pooled[wire=bf16]".
        config: File of LightningCLI: the job to measure. Several are separated by commas; later ones win.
        model: "conv", "transformer" or "lstm", on random data; or a LightningModule, package.module:Class.
        data: A LightningDataModule, package.module:Class; of a job of yours.
        cli: A LightningCLI of yours that links or adds arguments, package.module:Class.
        size: "tiny", "small" or "base" (default) of this package's networks.
        batch_size: Samples of one worker, 16 by default, of this package's networks.
        density: Share of the gradient that sparse systems send; several are separated by commas. 0.01 by default. Of a
            job of yours: densities of the default system that are compared, 0.02 and 0.1.
        workers: Processes that train together on this machine: 2 by default; of a job of yours as its trainer or its
            launcher says.
        bandwidth: Of each worker's link, such as 100mbit; several are separated by commas. Without it: the loopback.
        paced: Workers sleep through this trace (name or file) in place of training a model, so that more of them than
            cores can be measured: schedule and network are real, computation is not.
        scale: With paced: share of the trace's sizes that is exchanged, over links of that share of the bandwidth.
        slow_motion: With paced: the computation, and what the links carry, takes so many times as long. What workers do
            for the exchange does not: as if each had so many times the processor.
        rounds: Turns of each system: 6; of a job of yours 4.
        block: Steps of a turn; the first does not count.
        warmup: Steps of each system before the first round: 30; of a job of yours 45, for systems that learn.
        minutes: No round of a job of yours begins after so many minutes, but for the first: 10.
        keep_callbacks: Classes of a job's callbacks that train with it. All others are left out, but for those of
            Lightning that change a training step and write nothing.
        seed: Of weights and batches.
        calibrate: Also fit the costs of collectives, selection and decoding, and record the trace of the job: files
            for "safusion plan --calibration FILE --trace FILE". True of a job of yours, else false.
        output: Folder for the results: table, picture, settings, logs.

    Raises:
        ValueError: If a name or number makes no sense, or an option does not go with the kind of job.
        ModuleNotFoundError: If matplotlib, or scipy where costs are to be fitted, is missing; names the extra.
        RuntimeError: If a worker fails; names its log.
    """
    if config or data is not None or any(mark in model for mark in ".:"):
        laboratory: dict[str, object] = {"size": size, "batch_size": batch_size, "paced": paced}
        laboratory |= {"bandwidth": bandwidth or None, "scale": None if scale == 1 else scale}
        laboratory["slow_motion"] = None if slow_motion == 1 else slow_motion
        _refuse(laboratory, "is of this package's networks, not of your job")
        from lightning_safusion.bench.job import JobOptions
        from lightning_safusion.bench.own import ROWS, run_own
        from lightning_safusion.systems import DEFAULT

        for share in density:
            if not 0 < share <= 1:
                raise ValueError(f"density is a share in (0, 1], got {share:g}")
        rows = tuple(systems) or tuple(row for row in ROWS if not density or "[density" not in row)
        options = JobOptions(
            config=tuple(config),
            model=model if any(mark in model for mark in ".:") else None,
            data=data,
            cli=cli,
            systems=(*rows, *(f"{DEFAULT}[density={share:g}]" for share in density)),
            workers=workers,
            keep_callbacks=tuple(keep_callbacks),
            rounds=4 if rounds is None else rounds,
            block=block,
            warmup=45 if warmup is None else warmup,
            minutes=10.0 if minutes is None else minutes,
            calibrate=calibrate is not False,
            seed=seed,
            output=str(output),
        )
        run_own(options)
        return
    own = {"minutes": minutes, "keep_callbacks": keep_callbacks or None, "cli": cli}
    _refuse(own, "is of a job of yours: give config or model")
    _run_laboratory(
        Task(model, size or "base", 16 if batch_size is None else batch_size, seed=seed),
        systems or _SYSTEMS,
        Rhythm(6 if rounds is None else rounds, block, 30 if warmup is None else warmup),
        (density or (0.01,), bandwidth, paced, scale, slow_motion),
        2 if workers is None else workers,
        bool(calibrate),
        output,
    )


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raises ValueError for an option that was given."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} {why}")


def _run_laboratory(
    task: Task,
    systems: Sequence[str],
    rhythm: Rhythm,
    over: tuple[Sequence[float], Sequence[str], str | None, float, float],
    workers: int,
    calibrate: bool,
    output: Path,
) -> None:
    """Measures networks of this package on workers of this machine.

    Args:
        task: The network.
        systems: Rows.
        rhythm: Of the turns.
        over: Densities, rates of the links, the trace that workers sleep through, its scale and slow motion.
        workers: Processes.
        calibrate: Fit costs.
        output: Folder for the results.
    """
    density, bandwidth, paced, scale, slow_motion = over
    bandwidth = tuple(map(plain_rate, bandwidth))
    names = list(dict.fromkeys([*REFERENCE_STRATEGIES, *REFERENCES, *systems]))
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
    if calibrate:
        need("scipy", "cli")
    console, output = begin(workers, output)
    trace = scaled(resolve_trace(paced), scale, slow_motion) if paced is not None else None
    task = replace(task, trace=trace)
    parameters = sum(param.numel() for param in task.module().parameters())
    job = f"{task.model} ({task.size}), batch {task.batch_size}" if trace is None else trace.name
    tables = []
    for rate in usable_rates(bandwidth, console):
        with machines(workers, rate and f"{bits_per_second(rate) * scale / slow_motion / 1e3:.0f}kbit") as place:
            for share in density:
                conditions = Conditions(job, workers, rate, share, parameters, trace is not None, scale, slow_motion)
                console.print(literal(conditions.title, "bold"))
                shared = replace(task, density=share)
                run = measure(shared, names, place, rhythm, output / "logs", console, calibrate)
                if calibrate:
                    from lightning_safusion.bench.calibrate import fit_run  # scipy is an extra

                    suffix = f"{rate or 'loopback'}-{share:g}.json"
                    recorded, costs = fit_run(run, rhythm)
                    recorded.save(output / f"trace-{suffix}")
                    costs.save(output / f"calibration-{suffix}")
                    console.print(f"costs and trace of this job on these workers: calibration-{suffix}, trace-{suffix}")
                tables.append((conditions, summarize(run.blocks)))
                console.print(build_table(tables[-1][1], conditions))
    records = [as_record(rows, conditions) for conditions, rows in tables]
    (output / "bench.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
    plot_tables(tables).savefig(output / "bench.png", dpi=120)
    console.print(literal(f"written to {output}"))


def begin(workers: int, output: Path) -> tuple[Console, Path]:
    """Prepares a measurement with pictures: checks what it needs, and makes the folder of the results.

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

"""A benchmark of rows in turns against each row alone: whether the company of other rows changes what is measured.

    $ sudo python -m lab turns                          # a network that the processor computes
    $ sudo python -m lab turns --paced bert-large       # workers sleep in place of computing

``safusion bench`` measures a user's job on the same workers and links, with all rows in turns, and then with each row
alone: beside it are only the rows that every run has, those without an exchange and DDP. This is repeated; every other
time the rows come alone first. Printed are a row's step over that of the floor, and over DDP's, both of the same run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from lightning.pytorch import LightningDataModule
from rich.console import Console
from torch.utils.data import DataLoader

from lab.bench.links import machines
from lab.bench.run import begin, usable_rates
from lab.bench.workload import Classifier, Paced, Workload, scaled
from lab.markdown import markdown
from lab.processes import run_workers
from lightning_safusion.tools.bench.job import JobOptions
from lightning_safusion.tools.bench.rows import FLOOR
from lightning_safusion.tools.bench.run import ALWAYS, checked_rows, run_own
from lightning_safusion.tools.plan.traces import resolve_trace
from lightning_safusion.tools.team import Place

#: By how much the ratio of a row may differ.
LIMIT = 0.05
#: Keys of what a step is compared with, and their names.
OVER = {"over_floor": "the floor", "over_ddp": "DDP"}

#: Of each row the figures of ``bench.json``.
Figures = Mapping[str, Mapping[str, Any]]


class Sleeper(Paced):
    """Sleeps through a trace.

    Args:
        trace: Name or file.
        scale: Share of its sizes.
    """

    def __init__(self, trace: str, scale: float) -> None:
        super().__init__(scaled(resolve_trace(trace), scale))


class Repeated(LightningDataModule):
    """The batch of one worker's module, again and again.

    Args:
        batches: Of an epoch.
    """

    def __init__(self, batches: int = 1000) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        module = self.trainer.lightning_module
        assert isinstance(module, Workload)
        batches: Any = [module.batch()] * self.batches
        return DataLoader(batches, batch_size=None)


def turns(
    systems: Sequence[str] = ("ddp-bf16", "powersgd", "saf-pooled"),
    model: str = "conv",
    size: str = "small",
    batch_size: int = 32,
    paced: str | None = None,
    scale: float = 0.003,
    workers: int = 2,
    bandwidth: str | None = "100mbit",
    repeats: int = 5,
    rounds: int = 4,
    warmup: int = 45,
    output: Path = Path("safusion_turns"),
) -> None:
    """A benchmark of rows in turns against each row alone: a row's step over that of the floor, and over DDP's.

    Args:
        systems: Rows, with options.
        model: "conv", "transformer" or "lstm".
        size: "tiny", "small" or "base".
        batch_size: Samples of one worker; the longer a step, the less it is disturbed by what else the machine does.
        paced: Workers sleep through this trace (name or file) in place of training a model.
        scale: With paced: share of the trace's sizes that is exchanged.
        workers: Processes.
        bandwidth: Of the link of each; without root, or with null, the loopback is measured.
        repeats: Benchmarks in turns, and of each row alone.
        rounds: Turns of a row in a benchmark.
        warmup: Steps of a row before them.
        output: Folder for what the benchmarks write.

    Raises:
        ValueError: If a name or number makes no sense, or nothing is compared.
        RuntimeError: If a worker, or a row, fails.
    """
    rows = [row for row in dict.fromkeys(systems) if row not in ALWAYS]
    if not rows or repeats < 1:
        raise ValueError(f"give rows besides {', '.join(ALWAYS)}, and 1 repeat or more, got {rows} and {repeats}")
    arguments: dict[str, Any] = {"kind": model, "size": size, "batch_size": batch_size}
    arguments = arguments if paced is None else {"trace": paced, "scale": scale}
    module = (Classifier if paced is None else Sleeper)(**arguments)
    console, output = begin(workers, output)
    config = written(type(module), arguments, workers, output / "config.yaml")
    options = partial(JobOptions, (str(config),), rounds=rounds, warmup=warmup, calibrate=False)
    checked_rows(options(systems=tuple(rows)))
    (rate,) = usable_rates([bandwidth] if bandwidth else [], console)
    together, alone = [], {row: list[Figures]() for row in rows}
    with machines(workers, rate) as place:
        for repeat in range(repeats):
            for several in (True, False) if repeat % 2 == 0 else (False, True):
                if several:
                    together.append(bench(place, options, rows, output / f"{repeat + 1}-in-turns", console))
                    continue
                for row in rows:
                    alone[row].append(bench(place, options, [row], output / f"{repeat + 1}-{row}", console))
    count = sum(parameter.numel() for parameter in module.parameters())
    link = f"links of {rate}" if rate else "loopback"
    job = ", ".join(f"{name} {value}" for name, value in arguments.items())
    print(f"\n{job}; {count / 1e6:.1f} M parameters, {workers} workers, {link}\n\n{report(rows, together, alone)}")


def written(kind: type[Workload], arguments: Mapping[str, Any], workers: int, path: Path) -> Path:
    """Writes the job as a user has it: a file of LightningCLI."""
    trainer = {"accelerator": "cpu", "devices": 1, "num_nodes": workers, "strategy": "ddp", "logger": False}
    job = {
        "trainer": trainer | {"use_distributed_sampler": False},
        "model": {"class_path": f"{kind.__module__}.{kind.__name__}", "init_args": dict(arguments)},
        "data": {"class_path": f"{__name__}.{Repeated.__name__}"},
    }
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


def bench(place: Place, options: Any, rows: Sequence[str], output: Path, console: Console) -> Figures:
    """Runs ``safusion bench`` with these rows on new workers, and returns the figures of all rows."""
    console.print(f"{output.name} ...", markup=False)
    given: JobOptions = options(systems=tuple(rows), output=str(output))

    def work(rank: int, pipe: Connection) -> None:
        run_own(given)

    list(run_workers(place, work))
    return figures_of(output)


def figures_of(output: Path) -> Figures:
    """The figures of all rows that a benchmark has written.

    Raises:
        RuntimeError: If one was left out.
    """
    record = json.loads((output / "bench.json").read_text(encoding="utf-8"))
    if record["left_out"]:
        raise RuntimeError(f"rows have failed: {record['left_out']}")
    return {row["system"]: row for row in record["systems"]}


def report(rows: Sequence[str], together: Sequence[Figures], alone: Mapping[str, Sequence[Figures]]) -> str:
    """A table of medians over the repeats, with their range, and how many differ by less than the limit.

    Args:
        rows: Their names.
        together: Of each repeat, in turns.
        alone: Of each row and repeat.
    """
    lines, within = [], 0
    for over, name in OVER.items():
        for row in rows:
            here, there = ([each[row][over] for each in runs] for runs in (together, alone[row]))
            pairs = [100 * (a / b - 1) for a, b in zip(here, there, strict=True)]
            difference = 100 * (median(here) / median(there) - 1)
            within += abs(difference) <= 100 * LIMIT
            cells = (spread(here, "{:.3f}"), spread(there, "{:.3f}"), f"{difference:+.1f} %", spread(pairs, "{:+.1f}"))
            lines.append((f"`{row}`", name, *cells))
    steps = [1e3 * each[FLOOR]["step_s"] for runs in (together, *alone.values()) for each in runs]
    heads = ("row", "over", "in turns", "alone", "difference of medians", "of single repeats, %")
    return (
        f"{markdown(heads, lines, 2)}\n\n{within} of {len(lines)} medians of {len(together)} repeats differ by "
        f"{LIMIT:.0%} or less; a step without any exchange took {spread(steps, '{:.0f}')} ms"
    )


def spread(values: Sequence[float], form: str) -> str:
    """Median, least and largest."""
    middle, *ends = (form.format(value) for value in (median(values), min(values), max(values)))
    return f"{middle} ({' to '.join(ends)})"

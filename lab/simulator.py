"""The simulator against measurement: the same job, the same workers, the same links.

    $ sudo python -m lab simulator                        # 2 workers, a network; 4 workers, paced
    $ sudo python -m lab simulator --jobs conv --rates 100mbit

For every job and rate the systems are measured in turns. In turn with them, separate teams record the job without any
exchange, and the costs of the engine. From these records alone the simulator predicts the systems. Printed: step times,
the error of each prediction, and whether every pair of systems whose measured steps are more than 15 % apart is
predicted in the same order. Ends with 1 if an error exceeds 15 % or a pair is swapped.

Measurements, costs and traces are kept in the folder given by --output, a folder for each job and rate, and read from
there the next time: pieces can be measured one after the other, and predictions repeated without measuring.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import torch
from rich.console import Console

from lab.bench.calibrate import fit_run
from lab.bench.links import machines
from lab.bench.measure import REFERENCES, Rhythm, Task, measure
from lab.bench.workload import scaled
from lab.clock.cores import run_system
from lab.clock.costs import HostCluster, HostCosts, HostJob
from lab.markdown import markdown
from lightning_safusion.lookup import look_up
from lightning_safusion.profiling.trace import Trace
from lightning_safusion.tools.bench.results import summarize
from lightning_safusion.tools.bench.rows import FLOOR
from lightning_safusion.tools.plan.traces import resolve_trace

SYSTEMS = ("ddp", "wfbp", "saf-inter", "syncea", "safusion")
RATES = ("100mbit", "300mbit", "1gbit")
LIMIT = 0.15
_RUN = "run.pickle"  # all measurements, so that costs can be fitted again
_SCALE = 0.01  # of the paced job: BERT-base with 1.1 M elements


@dataclass(frozen=True)
class Comparison:
    """One system on one link.

    Args:
        job: The trained job.
        workers: Workers.
        rate: Of the link of each.
        system: Its name.
        measured: Median step, seconds.
        predicted: By the simulator, seconds.
    """

    job: str
    workers: int
    rate: str
    system: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of the measurement."""
        return self.predicted / self.measured - 1


def known_jobs() -> dict[str, tuple[int, Task]]:
    """Workers and tasks by name."""
    return {
        "conv": (2, Task("conv", "small", 16)),
        "paced": (4, Task(trace=scaled(resolve_trace("bert-base"), _SCALE))),
    }


def predict(system: str, trace: Trace, costs: HostCosts, density: float) -> float:
    """Seconds of a step."""
    if system == FLOOR:
        return trace.seconds
    known = costs.calibration
    job = HostJob(trace, HostCluster.of(costs, known.workers), density, known.entry_bytes)
    return run_system(system, job).seconds


def record(name: str, rate: str, systems: Sequence[str], rhythm: Rhythm, folder: Path) -> None:
    """Measures one job on one link, and keeps the measurements."""
    workers, task = look_up("job", name, known_jobs())
    with machines(workers, rate) as place:
        run = measure(task, list(dict.fromkeys([*REFERENCES, *systems])), place, rhythm, folder, Console(), record=True)
    (folder / _RUN).write_bytes(pickle.dumps((run, rhythm)))


def compare(name: str, rate: str, folder: Path) -> list[Comparison]:
    """Predicts the measured steps of one job on one link."""
    workers, task = look_up("job", name, known_jobs())
    run, rhythm = pickle.loads((folder / _RUN).read_bytes())  # noqa: S301 (written by this benchmark)
    trace, costs = fit_run(run, rhythm)
    trace.save(folder / "trace.json")
    costs.save(folder / "calibration.json")
    label = f"{name}: {task.trace.name}" if task.trace is not None else name
    return [
        Comparison(label, workers, rate, row.system, row.step_s, predict(row.system, trace, costs, task.density))
        for row in summarize(run.blocks)
    ]


def swapped(rows: Sequence[Comparison]) -> list[tuple[str, str]]:
    """Pairs of systems whose measured steps are more than the limit apart, and predicted the other way round."""
    pairs = []
    for one, other in combinations(rows, 2):
        fast, slow = sorted((one, other), key=lambda row: row.measured)
        if slow.measured > (1 + LIMIT) * fast.measured and slow.predicted <= fast.predicted:
            pairs.append((fast.system, slow.system))
    return pairs


def report(rows: Sequence[Comparison]) -> bool:
    """Prints a markdown table of one job on one link; returns whether everything is within the limits."""
    first, wrong = rows[0], swapped(rows)
    print(f"\n{first.job}, {first.workers} workers, links of {first.rate}\n")
    cells = [
        (row.system, f"{1e3 * row.measured:.1f}", f"{1e3 * row.predicted:.1f}", f"{100 * row.error:+.0f} %")
        for row in rows
    ]
    print(markdown(("system", "measured, ms", "predicted, ms", "error"), cells))
    print(f"\npairs more than {LIMIT:.0%} apart and swapped: {wrong or 'none'}", flush=True)
    # the floor is no prediction: it is the recorded trace
    return not wrong and all(abs(row.error) <= LIMIT for row in rows if row.system != FLOOR)


def simulator(
    jobs: Sequence[str] = ("conv", "paced"),
    rates: Sequence[str] = RATES,
    systems: Sequence[str] = SYSTEMS,
    rounds: int = 16,
    warmup: int = 20,
    again: bool = False,
    output: Path = Path("safusion_simulator"),
) -> None:
    """The simulator against measurement: the same job, the same workers, the same links; ends with 1 if it is off.

    Args:
        jobs: "conv" (2 workers that train it) and "paced" (4 workers that sleep through BERT-base's times).
        rates: Of the links.
        systems: Measured and predicted systems.
        rounds: Turns of each system.
        warmup: Steps of each before the first round.
        again: Measure again where the folder has measurements.
        output: Folder for all files.

    Raises:
        RuntimeError: If an error exceeds the limit, or a pair of systems is swapped.
    """
    torch.set_num_threads(1)  # no threads before workers are forked
    rhythm, within = Rhythm(rounds, 6, warmup), True
    rows: list[Comparison] = []
    for name in jobs:
        for rate in rates:
            folder = output / f"{name}-{rate}"
            if again or not (folder / _RUN).is_file():
                record(name, rate, systems, rhythm, folder)
            rows += (now := compare(name, rate, folder))
            within = report(now) and within
    content = [asdict(row) | {"error": row.error} for row in rows]
    (output / "simulator.json").write_text(json.dumps(content, indent=1))
    good = sum(abs(row.error) <= LIMIT for row in rows if row.system != FLOOR)
    print(f"\n{good} of {sum(row.system != FLOOR for row in rows)} within {LIMIT:.0%}")
    if not within:
        raise RuntimeError(f"a prediction is off by more than {LIMIT:.0%}, or a pair of systems is swapped")

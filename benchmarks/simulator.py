"""The simulator against measurement: the same job, the same workers, the same links.

    $ sudo python -m benchmarks.simulator                        # 2 workers, a network; 4 workers, paced
    $ sudo python -m benchmarks.simulator --jobs conv --rates 100mbit

For every job and rate the systems are measured in turns; in turn with them two teams of their own record the job
without any exchange and what the engine costs it. From those alone the simulator predicts the systems. Printed: step
times, the error of each prediction, and whether every pair of systems whose measured steps are more than 15 % apart is
predicted in the same order. Ends with 1 if an error exceeds 15 % or a pair is swapped.

Measurements, costs and traces are kept in the folder given by --output, a folder for each job and rate, and taken from
there the next time: one piece can be measured after the other, and predictions made anew without measuring.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import torch

from lightning_safusion.bench.calibrate import fit_run
from lightning_safusion.bench.figures import summarize
from lightning_safusion.bench.session import REFERENCES, Rhythm, machines, measure
from lightning_safusion.bench.workers import FLOOR, Task
from lightning_safusion.bench.workload import scaled
from lightning_safusion.simulate.calibration import Calibration
from lightning_safusion.simulate.comparison import run_system
from lightning_safusion.simulate.job import Job
from lightning_safusion.simulate.trace import Trace, resolve_trace

SYSTEMS = ("ddp", "wfbp", "saf-inter", "syncea", "safusion")
RATES = ("100mbit", "300mbit", "1gbit")
LIMIT = 0.15
_RUN = "run.pickle"  # all that was measured, so that costs can be fitted anew
_SCALE = 0.01  # of the paced job: BERT-base with 1.1 M elements


@dataclass(frozen=True)
class Comparison:
    """One system on one link.

    Args:
        job: What was trained.
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


def jobs() -> dict[str, tuple[int, Task]]:
    """Workers and tasks by name."""
    return {
        "conv": (2, Task("conv", "small", 16)),
        "paced": (4, Task(trace=scaled(resolve_trace("bert-base"), _SCALE))),
    }


def predict(system: str, trace: Trace, costs: Calibration, density: float) -> float:
    """Seconds of a step."""
    if system == FLOOR:
        return trace.seconds
    job = Job(trace, costs.cluster(costs.workers), density, costs.entry_bytes)
    return run_system(system, job).seconds


def record(name: str, rate: str, systems: Sequence[str], rhythm: Rhythm, folder: Path) -> None:
    """Measures one job on one link, and keeps what came of it."""
    workers, task = jobs()[name]
    with machines(workers, rate) as place:
        run = measure(task, list(dict.fromkeys([*REFERENCES, *systems])), place, rhythm, folder, record=True)
    (folder / _RUN).write_bytes(pickle.dumps((run, rhythm)))


def compare(name: str, rate: str, folder: Path) -> list[Comparison]:
    """Predicts what was measured of one job on one link."""
    workers, task = jobs()[name]
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
    print("| system | measured, ms | predicted, ms | error |\n| --- | ---: | ---: | ---: |")
    for row in rows:
        print(f"| {row.system} | {1e3 * row.measured:.1f} | {1e3 * row.predicted:.1f} | {100 * row.error:+.0f} % |")
    print(f"\npairs more than {LIMIT:.0%} apart and swapped: {wrong or 'none'}", flush=True)
    # the floor is no prediction: it is the trace, recorded in turns with it
    return not wrong and all(abs(row.error) <= LIMIT for row in rows if row.system != FLOOR)


def main() -> None:
    """Compares all jobs and rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=list(jobs()), default=list(jobs()))
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--again", action="store_true", help="measure also what is in the folder already")
    parser.add_argument("--output", type=Path, default=Path("safusion_simulator"), help="folder for all that is made")
    args = parser.parse_args()
    torch.set_num_threads(1)  # no threads before workers are forked
    rhythm, within = Rhythm(args.rounds, 6, args.warmup), True
    rows: list[Comparison] = []
    for name in args.jobs:
        for rate in args.rates:
            folder = args.output / f"{name}-{rate}"
            if args.again or not (folder / _RUN).is_file():
                record(name, rate, args.systems, rhythm, folder)
            rows += (now := compare(name, rate, folder))
            within = report(now) and within
    content = [asdict(row) | {"error": row.error} for row in rows]
    (args.output / "simulator.json").write_text(json.dumps(content, indent=1))
    good = sum(abs(row.error) <= LIMIT for row in rows if row.system != FLOOR)
    print(f"\n{good} of {sum(row.system != FLOOR for row in rows)} within {LIMIT:.0%}")
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()

"""Long trainings: memory, open files and threads stay level, replicas stay equal.

$ python -m lab soak --steps 50000 --jobs callbacks --output soak
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lab.attack.job import CLASSES, INPUTS, Recipe, Tiny, train
from lab.attack.workers import End, Job
from lab.probe import ConvergenceProbe
from lightning_safusion.callbacks import (
    BufferSizeTuner,
    OverlapProfiler,
    ReplicaConsistencyCheck,
    TensorMissingRateMonitor,
    TraceRecorder,
)
from lightning_safusion.literal import literal

#: KiB that a worker may grow by in 1,000 steps.
LEVEL_KIB = 20.0
_READINGS, _STEP_LIMIT_S = 100, 0.5


class Dropping(Tiny):
    """Leaves out layers at random, on each worker others: gradients of these are missing."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first, self.last = nn.Linear(INPUTS, 64), nn.Linear(64, CLASSES)
        self.net = nn.Sequential()  # unused
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.draws: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        if self.draws is None:
            self.draws = torch.Generator().manual_seed(self.global_rank)
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            if float(torch.rand(1, generator=self.draws)) > 0.3 or not self.training:
                x = x + torch.tanh(layer(x))
        scores: Tensor = self.last(x)
        return scores


def _callbacks(folder: Path) -> list[Callback]:
    """All that there are, as often as by default."""
    profiles = OverlapProfiler(dirpath=folder, progress_bar=False, table=False)
    tensors = TensorMissingRateMonitor(per_tensor=True, dirpath=folder)
    return [profiles, tensors, ReplicaConsistencyCheck(), TraceRecorder(None), BufferSizeTuner(), ConvergenceProbe()]


@dataclass(frozen=True)
class Soaked:
    """A job that trains for long.

    Args:
        what: In the table.
        recipe: Of its training.
        callbacks: Made in each worker, of a folder.
        model: Makes the network.
    """

    what: str
    recipe: Recipe
    callbacks: Callable[[Path], list[Callback]] = lambda _: []
    model: Callable[..., Tiny] = Tiny


_UNUSED = {"find_unused_parameters": True}
JOBS = {
    "callbacks": Soaked("all-gather, all callbacks", Recipe("allgather", 0), _callbacks),
    "default": Soaked("the default", Recipe("default", 0)),
    "dropped": Soaked(
        "shards, layers dropped at random, `find_unused_parameters`",
        Recipe("sharded", 0, strategy=_UNUSED),
        model=Dropping,
    ),
    "ddp": Soaked("plain DDP", Recipe("ddp", 0)),
    "ddp-dropped": Soaked("plain DDP, layers dropped", Recipe("ddp", 0, strategy=_UNUSED), model=Dropping),
}


class _Readings(Callback):
    """Reads what the process holds, so and so often in a training.

    Args:
        steps: Of the training.
        told: Takes ``"readings"``: lists of the step, KiB of memory, open files and threads.
    """

    def __init__(self, steps: int, told: dict[str, Any]) -> None:
        self.every = max(1, steps // _READINGS)
        self.readings: list[tuple[int, int, int, int]] = []
        told["readings"] = self.readings

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Reads."""
        if trainer.global_step % self.every == 0:
            gc.collect()
            files = len(os.listdir("/proc/self/fd"))
            self.readings.append((trainer.global_step, _own_kib(), files, threading.active_count()))


def _own_kib() -> int:
    """Memory of this process alone."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0])


def growth(readings: Sequence[Sequence[int]]) -> float:
    """KiB in 1,000 steps, over the second half of the readings: what is kept at first is kept once.

    Fits a line to the least of every tenth of them, since what is about to be freed is not what is kept.
    """
    late = np.array(readings[len(readings) // 2 :], float)
    tenths = [tenth[tenth[:, 1].argmin()] for tenth in np.array_split(late, 10) if len(tenth)]
    steps, kib = np.array(tenths)[:, :2].T
    return float(np.polyfit(steps, kib, 1)[0]) * 1000


def problem(ends: Sequence[End], steps: int) -> str | None:
    """What did not stay level."""
    if bad := [end for end in ends if end.how != "finished" or end.told["step"] != steps]:
        return f"rank {bad[0].rank}: {bad[0].how}: {bad[0].said:.200}"
    if len({end.told["digest"] for end in ends}) > 1:
        return "replicas differ"
    for end in ends:
        if (kib := growth(end.told["readings"])) > LEVEL_KIB:
            return f"rank {end.rank} grows by {kib:.0f} KiB in 1,000 steps"
        for at, things in ((2, "files"), (3, "threads")):
            half = [reading[at] for reading in end.told["readings"][_READINGS // 2 :]]
            if max(half) > max(half[: len(half) // 2]):
                return f"rank {end.rank} has ever more {things}"
    return None


def soak(
    steps: int = 50_000, jobs: str = "callbacks,default,dropped,ddp,ddp-dropped", output: Path = Path("soak")
) -> None:
    """Trains for long in two worker processes, and shows by how much they grow.

    Args:
        steps: Of each training.
        jobs: Names, with commas between them.
        output: Folder.

    Raises:
        ValueError: If no job has such a name.
        SystemExit: With 1 if something did not stay level.
    """
    if unknown := [name for name in jobs.split(",") if name not in JOBS]:
        raise ValueError(f"no job is called {unknown[0]!r}; there are: {', '.join(JOBS)}")
    torch.set_num_threads(1)  # no threads before workers are forked
    made = Table(box=box.MARKDOWN)
    for heading in ("job", "steps", "KiB in 1,000 steps, by rank", "held", "open files", "threads"):
        made.add_column(heading, overflow="fold")
    wrong = []
    for name in jobs.split(","):
        job, folder = JOBS[name], output / name
        ends = _soaked(job, steps, folder)
        wrong += [f"{name}: {found}"] if (found := problem(ends, steps)) else []
        readings = [end.told.get("readings") or [(0, 0, 0, 0)] for end in ends]
        grown = " and ".join(f"{growth(each):+.1f}" for each in readings)
        last = readings[0][-1]
        made.add_row(job.what, f"{steps:,}", grown, "no" if found else "yes", str(last[2]), str(last[3]))
    console = Console()
    console.print(made)
    for each in wrong:
        console.print(literal(each, "red"))
    if wrong:
        sys.exit(1)


def _soaked(job: Soaked, steps: int, folder: Path) -> list[End]:
    def work(rank: int, told: dict[str, Any]) -> None:
        recipe = Recipe(
            job.recipe.system, steps, workers=2, strategy=job.recipe.strategy, trainer={"val_check_interval": 1.0}
        )
        train(recipe, [_Readings(steps, told), *job.callbacks(folder)], told, job.model)

    return Job(work, 2, folder).run(60 + _STEP_LIMIT_S * steps)

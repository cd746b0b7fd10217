"""Experiment 1: four tasks trained by five systems, and their accuracy over steps and over time."""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from typing_extensions import override

from examples.workloads.cli import CONFIGS, WorkloadCLI
from lab.bench.links import machines
from lab.bench.run import usable_rates
from lab.papers.claims import PAPERS
from lab.papers.figures import write
from lab.papers.workloads import WORKERS, files, is_first, prepare
from lab.processes import run_workers

DENSE = "dense"
RIVALS = ("oktopk", "omgs", "cupcake")
SYSTEMS = (DENSE, *RIVALS, PAPERS)
CLAIM = (
    "on images (ResNet-152, VGG-19) slightly below the training without compression, and above other systems; on "
    "language (LSTM, BERT-large) the same as without compression"
)
#: "Slightly below" and "the same" in figures, which the slides do not give: a share of the dense metric.
CLOSE = 0.02
RATE = "100mbit"  # of links between workers of this machine
_OPTION = "--trainer.strategy.init_args"


@dataclass(frozen=True)
class Task:
    """One that is trained.

    Args:
        metric: That it validates with.
        images: What the slides claim: they rank systems on images only.
    """

    metric: str
    images: bool = False

    @property
    def higher_is_better(self) -> bool:
        """Of the metric."""
        return "perplexity" not in self.metric


TASKS = {
    "resnet152_cifar100": Task("val_top1", images=True),
    "vgg19_cifar100": Task("val_top1", images=True),
    "lstm_wikitext2": Task("val_perplexity"),
    "bert_large_squad": Task("val_f1"),
}


@dataclass(frozen=True)
class Point:
    """A validation.

    Args:
        task, system: What was trained.
        step: Optimizer steps until then.
        seconds: Training until then, without validations.
        metric: Value of the task's metric.
    """

    task: str
    system: str
    step: int
    seconds: float
    metric: float


class Validations(Callback):
    """Keeps the points of a training in a file.

    Args:
        task, system: What is trained.
        path: File; the first worker writes it when the training ends.
    """

    def __init__(self, task: str, system: str, path: Path) -> None:
        self._start = Point(task, system, 0, 0.0, 0.0)
        self._path = path
        self._points: list[Point] = []
        self._seconds = self._began = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.perf_counter()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seconds += time.perf_counter() - self._began

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metric = float(trainer.callback_metrics[TASKS[self._start.task].metric])
        self._points.append(replace(self._start, step=trainer.global_step, seconds=self._seconds, metric=metric))
        self._began = time.perf_counter()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            write(self._path, self._points)


def read(path: Path) -> list[Point]:
    """The points of a training."""
    with path.open(encoding="utf-8") as file:
        return [
            Point(row["task"], row["system"], int(row["step"]), float(row["seconds"]), float(row["metric"]))
            for row in csv.DictReader(file)
        ]


def arguments(task: str, system: str, tiny: bool, config: Sequence[str], logs: Path) -> list[str]:
    """What ``python -m examples.workloads`` is given for a training."""
    given = [*files(task, tiny, logs), *config]
    own = [] if system == DENSE else [f"{_OPTION}.system={system}"]
    if system == "oktopk":  # it has parts of its own
        own += [f"{_OPTION}.compressor=null", f"{_OPTION}.collective=null"]
    given += [str(CONFIGS / "dense.yaml")] * (system == DENSE)
    options = [part for path in given for part in ("--config", path)]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.logger=false"]
    unsaved = ["--trainer.callbacks=[]", "--trainer.enable_checkpointing=false", "--trainer.num_sanity_val_steps=0"]
    often = ["--trainer.val_check_interval=0.25"] if tiny else []
    return ["fit", *options, *own, *quiet, *unsaved, *often]


def train(tiny: bool, bandwidth: Sequence[str], config: Sequence[str], logs: Path) -> tuple[list[Point], str] | None:
    """Trains what has not been trained into the folder yet.

    Args:
        tiny: In the tiny configurations, on two workers of this machine; else on the workers of the launcher.
        bandwidth: Of the links with ``tiny``; one.
        config: Laid over the configuration of each task.
        logs: Folder of the trainings' points, by the link and the names of ``config``; all workers must see it.

    Returns:
        All points, and where they were trained; None on all workers but the first.

    Raises:
        ValueError: If no launcher has started this process, and it is not tiny.
        RuntimeError: If a worker fails; names its log.
    """
    prepare(tiny, logs)
    console = Console()
    rate = usable_rates(bandwidth or (RATE,), console)[0] if tiny else None
    where = "this network" if not tiny else f"links of {rate}" if rate else "the loopback"
    folder = logs / ", ".join([where, *(Path(each).stem for each in config)])
    folder.mkdir(exist_ok=True)
    paths = {(task, system): folder / f"{task} {system}.csv" for task in TASKS for system in SYSTEMS}
    for (task, system), path in paths.items():
        if path.exists():
            continue
        work = partial(_train, arguments(task, system, tiny, config, logs), task, system, path)
        if tiny:
            console.print(f"{task}: {system} ...", markup=False)
            with machines(WORKERS, rate) as place:
                list(run_workers(place, lambda rank, pipe, work=work: work()))  # type: ignore[misc]  # bound now
        else:
            work()
    if not is_first():
        return None
    points = [point for path in paths.values() for point in read(path)]
    return points, f"{WORKERS} CPU workers, {where}" if tiny else where


def _train(given: Sequence[str], task: str, system: str, path: Path) -> None:
    WorkloadCLI(given, trainer_defaults={"callbacks": [Validations(task, system, path)]})

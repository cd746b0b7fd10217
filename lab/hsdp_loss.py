"""The loss of transformers that are sharded inside of nodes, with a dense and with a sparse exchange between nodes.

$ python -m lab hsdp-loss      # twenty minutes of two cores; what is in results.jsonl is not run again
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lab.markdown import markdown
from lab.processes import Ledger, run_missing, run_workers
from lab.tasks import Task, evaluate, loss, parse_task
from lab.tasks.optimizers import for_use
from lab.virtual.training import set_rate, step_along
from lightning_safusion import Attached, attach
from lightning_safusion.lookup import look_up
from lightning_safusion.tools.team import Place

#: Rows by name: replicas, and shards of each; 0: in DDP. The first one has FSDP2's own exchange, the others ours.
ROWS = {
    "hsdp": (2, 2),
    "saf-hsdp": (2, 2),
    "saf-ddp-2": (2, 0),
    "saf-ddp-4": (4, 0),
    "saf-hsdp-2x1": (2, 1),
    "saf-hsdp-2x4": (2, 4),
}
_DENSE = "hsdp"
_USUAL = ("hsdp", "saf-hsdp", "saf-ddp-2", "saf-ddp-4")
# What trainings of this file do not do.
_NOT_HERE = ("accumulate", "precision", "sam", "ema", "swa")
_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class Trained:
    """What a training has come to.

    Args:
        metric: Held-out loss after the last step; None if it is not finite.
        bytes_mean: Bytes that the workers of a replica send in a step, mean over all steps; 0 of the dense row.
        bytes_median: The same, of a usual step.
        dense_bytes: What the gradients of a replica have in float32.
        seconds: Of the training.
    """

    metric: float | None
    bytes_mean: float
    bytes_median: float
    dense_bytes: int
    seconds: float


@dataclass(frozen=True)
class Training:
    """One training.

    Args:
        task: What is trained.
        row: One of :data:`ROWS`.
        density: Share of the elements that is sent; None: the default.
        seed: Of the weights and the batches.
    """

    task: Task
    row: str
    density: float | None
    seed: int

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.row}, seed {self.seed}"

    @property
    def workers(self) -> int:
        """Processes; they share the global batch."""
        replicas, shards = ROWS[self.row]
        return replicas * max(1, shards)

    def settings(self) -> dict[str, Any]:
        """All that decides the result; plain values."""
        recipe, density = self.task.recipe(), None if self.row == _DENSE else self.density
        return {"task": self.task.name, "recipe": recipe, "row": self.row, "density": density, "seed": self.seed}

    def run(self) -> Trained:
        """Trains once, in processes of its own; a RuntimeError if one has failed."""
        begin = time.perf_counter()
        ends = list(run_workers(Place(self.workers), partial(_work, self)))
        sent = [sum(step) / ROWS[self.row][0] for step in zip(*(sent for _, sent in ends), strict=True)]
        metric, seconds = ends[0][0], round(time.perf_counter() - begin, 2)
        dense_bytes = sum(4 * param.numel() for param in self.task.model().parameters())
        return Trained(metric if math.isfinite(metric) else None, fmean(sent), median(sent), dense_bytes, seconds)


def _wrapped(training: Training, model: nn.Module) -> tuple[nn.Module, list[torch.optim.Optimizer], Attached | None]:
    """The model of a row, its optimizers, and what exchanges its gradients sparse."""
    task, (replicas, shards) = training.task, ROWS[training.row]
    options: dict[str, Any] = {"density": training.density, "collective": "allgather"}  # sparse at any cost
    if shards:
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        over = mesh if training.row == _DENSE else mesh["shard"]
        for block in [each for each in model.modules() if isinstance(each, _BLOCKS)]:
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)
        options["replicate_mesh"] = mesh["replicate"]
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    optimizers = task.make_optimizers(model.parameters(), task.lr)
    return model, optimizers, None if training.row == _DENSE else attach(model, optimizers, **options)


def _work(training: Training, rank: int, pipe: Connection) -> None:
    """Trains on one worker; sends the metric, and the bytes that it has sent in every step."""
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo")
    task, sent = training.task, []
    torch.manual_seed(training.seed)
    model, data = task.model(), task.data(training.seed, task.batch)
    model, optimizers, handle = _wrapped(training, model)
    for step in range(task.steps):
        set_rate(task, optimizers, task.lr, step)
        loss(model, *data.shards(step, training.workers)[rank]).backward()
        step_along(task, list(model.parameters()), optimizers)
        sent.append(0 if handle is None else handle.figures()["bytes_sent"])
    if handle is not None and handle.plain_ddp is not None:
        raise RuntimeError(f"{training.row} was not sparse: {handle.plain_ddp}")
    with for_use(optimizers):
        pipe.send((evaluate(task, model, data), sent))
    dist.barrier()
    dist.destroy_process_group()


def hsdp_loss(
    task: str = "headers-transformer",
    seeds: Sequence[int] = (0, 1, 2),
    rows: Sequence[str] = _USUAL,
    density: float | None = None,
    output: Path = Path("hsdp_loss"),
) -> None:
    """Trains a task on two replicas of two shards, with FSDP2's exchange between them and with ours, and on DDP.

    All workers are processes of this machine, and share one global batch. Dense training is always among the rows.

    Args:
        task: A transformer of the convergence laboratory, also with options: "headers-transformer[steps=1200]".
        seeds: Of weights and batches.
        rows: Of "hsdp" (dense), "saf-hsdp", "saf-ddp-2" and "saf-ddp-4" (DDP with two and four workers); also
            "saf-hsdp-2x1" and "saf-hsdp-2x4" (two replicas of one and of four shards).
        density: Share of the elements that is sent; by default the one that suits the optimizer.
        output: Folder of the results.

    Raises:
        RuntimeError: If a training has failed.
        ValueError: If there is no such task or row, or this command cannot train it.
    """
    chosen, names = parse_task(task), list(dict.fromkeys((_DENSE, *rows)))
    for name in names:
        look_up("row", name, ROWS)
    changed = [name for name in _NOT_HERE if getattr(chosen, name) != Task.__dataclass_fields__[name].default]
    if chosen.metric != "loss" or changed:
        reason = f"is trained with {', '.join(changed)}" if changed else "has no loss for its metric"
        raise ValueError(f"task {task!r} {reason}: hsdp-loss trains plainly, and compares losses. Choose another task.")
    ledger = Ledger(output / "results.jsonl", Trained, "a finished training")
    trainings = [Training(chosen, name, density, seed) for seed in seeds for name in names]
    if not run_missing("trainings", trainings, Training.run, ledger, 1, Console()):
        raise RuntimeError("not all trainings have been done: start the same command again")
    results = {(each.row, each.seed): done for each in trainings if (done := ledger.get(each.settings())) is not None}
    print(table(results, names, seeds))


def table(results: dict[tuple[str, int], Trained], rows: Sequence[str], seeds: Sequence[int]) -> str:
    """Losses, in per cent above those of dense training seed by seed, and bytes of a replica; in markdown."""
    headings = [*(f"loss, seed {seed}" for seed in seeds), *(f"%, seed {seed}" for seed in seeds), "%, mean"]
    losses = {run: math.nan if done.metric is None else done.metric for run, done in results.items()}
    cells = []
    for row in rows:
        beside = [""] * (len(seeds) + 3)
        if row != _DENSE:
            done = [results[row, seed] for seed in seeds]
            above = [100 * (losses[row, seed] / losses[_DENSE, seed] - 1) for seed in seeds]
            sent = fmean(each.bytes_mean for each in done), fmean(each.bytes_median for each in done)
            beside = [f"{each:+.2f}" for each in (*above, fmean(above))]
            beside += [f"{done[0].dense_bytes / each:.0f}" for each in sent]
        cells.append([row, *(f"{losses[row, seed]:.4f}" for seed in seeds), *beside])
    return markdown(["row", *headings, "fp32 over bytes, all steps", "a usual step"], cells)

"""Tasks as jobs of a benchmark: rows may change the optimizer, and workers train the task's network on its data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lab.tasks import Task, loss
from lightning_safusion.bench import workers
from lightning_safusion.bench.rows import Row, parse_row
from lightning_safusion.bench.workload import Sample, Workload

#: Options of the optimizer, in place of those of the task that is trained.
TRAINING_OPTIONS = ("lr", "momentum", "beta2")


def trained_row(name: str) -> Row:
    """Reads a row that is trained: ``oktopk[memory=ef21,momentum=0]``.

    Raises:
        ValueError: If there is no such system or option, or an option has a value that it cannot have.
    """
    return parse_row(name, TRAINING_OPTIONS)


class Learner(Workload):
    """A task's network on one of its batches, again and again: steps take as long as those of its training.

    The learning rate is zero: gradients stay what they are, and finite.

    Args:
        task: Network, data, and the optimizer with its clipping.
        batch_size: Samples of one worker.
        options: Of the task's optimizer, in place of its own.
    """

    def __init__(self, task: Task, batch_size: int, **options: float) -> None:
        super().__init__()
        self.task, self.batch_size = task, batch_size
        self.net = task.model()
        self._options = options | {"lr": 0.0}

    @override
    def batch(self) -> Sample:
        """A batch of the task, by torch's seed."""
        return Sample(*self.task.data(torch.initial_seed(), self.batch_size).samples(0))

    @override
    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        return loss(self.net, *batch)

    @override
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        if self.task.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters(), self.task.clip)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.task.make_optimizer(self.parameters(), **self._options)


@dataclass(frozen=True)
class TrainedJob(workers.Task):
    """A job of a benchmark that trains a task.

    Args:
        training: The task.
    """

    training: Task = field(kw_only=True)

    @override
    def row(self, system: str) -> Row:
        return trained_row(system)

    @override
    def module(self, system: str = "ddp") -> Workload:
        torch.manual_seed(self.seed)
        options = {} if system in workers.REFERENCE_STRATEGIES else dict(trained_row(system).training)
        return Learner(self.training, self.batch_size, **options)

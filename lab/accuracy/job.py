"""Tasks as jobs of a benchmark: rows may change the optimizer, and workers train the task's network on its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from typing_extensions import override

from lab.bench import measure
from lab.bench.workload import Batch, Workload
from lab.tasks import Task, loss
from lightning_safusion.notation import read, typed
from lightning_safusion.tools.bench.rows import Row, parse_row

#: Options of the optimizer, in place of those of the task that is trained.
_OPTIONS = {"lr": float, "momentum": float, "beta2": float}


@dataclass(frozen=True)
class TrainedRow(Row):
    """A row that is trained.

    Args:
        training: Options of the optimizer.
    """

    training: Mapping[str, float]


def trained_row(name: str) -> TrainedRow:
    """Reads a row that is trained: ``oktopk[memory=ef21,momentum=0]``.

    Raises:
        ValueError: If there is no such system or option, or an option cannot have its value.
    """
    bare, options = _parted(name)
    row = parse_row(bare)
    return TrainedRow(name, row.system, row.options, options)


def _parted(name: str) -> tuple[str, dict[str, float]]:
    """The row without options of the optimizer, and those."""
    system, options = read(name)
    others = [f"{option}={text}" for option, text in options.items() if option not in _OPTIONS]
    training = {option: text for option, text in options.items() if option in _OPTIONS}
    return f"{system}[{','.join(others)}]" if others else system, typed(name, training, _OPTIONS)


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
    def batch(self) -> Batch:
        """A batch of the task, by torch's seed."""
        return self.task.data(torch.initial_seed(), self.batch_size).samples(0)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss(self.net, *batch)

    @override
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        if self.task.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters(), self.task.clip)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        (optimizer,) = self.task.make_optimizers(self.parameters(), **self._options)
        return optimizer


@dataclass(frozen=True)
class TrainedJob(measure.Task):
    """A job of a benchmark that trains a task.

    Args:
        training: The task.
    """

    training: Task = field(kw_only=True)

    @override
    def strategy(self, system: str) -> DDPStrategy:
        return super().strategy(_parted(system)[0])

    @override
    def module(self, system: str = "ddp") -> Workload:
        torch.manual_seed(self.seed)
        return Learner(self.training, self.batch_size, **_parted(system)[1])

"""Trainers that share one process group, with data that depend on the step alone: what resuming is tested with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import ClusterEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.models import trainer, weights


class InGroup(ClusterEnvironment):
    """Processes that have a process group already: several Trainers can run in it, one after another."""

    creates_processes_externally = True
    main_address = "localhost"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


class StepModel(LightningModule):
    """A channels-last convolution, a norm and two linear layers; every batch is a function of step and rank."""

    def __init__(self, momentum: float = 0.9, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.LayerNorm(32)
        self.hidden, self.head = nn.Linear(32, 64), nn.Linear(64, 4)
        self.momentum, self.lr = momentum, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.global_step + self.global_rank)
        x = torch.randn(6, 3, 4, 4, generator=generator)
        y = torch.randint(4, (6,), generator=generator)
        return nn.functional.cross_entropy(self.head(self.hidden(self.norm(self.conv(x).flatten(1))).relu()), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", -float(self.global_step), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=self.momentum)


class At(Callback):
    """Calls a function with the trainer when a step has been made; step 0 is the start."""

    def __init__(self, step: int, fn: Callable[[Trainer], None]) -> None:
        self.step, self.fn = step, fn

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == self.step:
            self.fn(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.fn(trainer)


def saving(path: Path | str, step: int) -> At:
    return At(step, lambda trainer: trainer.save_checkpoint(path))


def run(
    strategy: Any,
    steps: int,
    *callbacks: Callback,
    ckpt: Any = None,
    model: LightningModule | None = None,
    **options: Any,
) -> Trainer:
    """Trains for ``steps`` steps in all, from a checkpoint if one is given; call it on all ranks of a process group."""
    defaults: dict[str, Any] = {
        "devices": dist.get_world_size(),
        "max_steps": steps,
        "max_epochs": -1,
        "use_distributed_sampler": False,
        "callbacks": list(callbacks),
        "limit_val_batches": 0,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    }
    job = trainer(strategy, **(defaults | options))
    data: DataLoader[Any] = DataLoader(range(6))
    job.fit(StepModel() if model is None else model, data, DataLoader(range(1)), ckpt_path=ckpt)
    return job


def parameters(job: Trainer) -> list[Tensor]:
    return weights(job.lightning_module)


def part_file(folder: Path, rank: int) -> Path:
    (found,) = folder.glob(f"rank_{rank:05d}-*.pt")
    return found


def held_back(folder: Path, rank: int) -> dict[str, Tensor]:
    return torch.load(part_file(folder, rank), weights_only=True)["memory"]["residual"]


def mass(folder: Path, world_size: int) -> dict[str, Tensor]:
    parts = [held_back(folder, rank) for rank in range(world_size)]
    return {name: sum(part[name].double() for part in parts) / world_size for name in parts[0]}

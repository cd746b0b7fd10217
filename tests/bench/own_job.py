"""A small job as a user writes it, and ways in which it fails."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_safusion import SAFusionStrategy


class Net(LightningModule):
    """Two layers; says what every fit began with.

    Args:
        width: Of the hidden layer.
        optimizer: Name of a class of torch.optim.
    """

    def __init__(self, width: int = 64, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(nn.Linear(32, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))
        self.began: list[float] = []
        self.set_up = 0

    def setup(self, stage: str) -> None:
        self.set_up += 1

    def configure_callbacks(self) -> list[Callback]:
        return [ModelCheckpoint("checkpoints of the module")]

    def on_train_start(self) -> None:
        self.began.append(float(next(self.parameters()).detach().double().sum()))
        assert self.logger is not None
        self.logger.experiment.add_scalar("a", 1.0)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=1e-3)


class FailsOnOne(Net):
    """Runs out of memory in one of the rows, on one worker alone."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        strategy = self.trainer.strategy
        if isinstance(strategy, SAFusionStrategy) and batch_idx == 2 and self.global_rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().training_step(batch, batch_idx)


class Interrupted(Net):
    """Its user stops the benchmark in the fifth turn."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if len(self.began) == 5 and batch_idx == 1 and self.global_rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)


class Data(LightningDataModule):
    """Random batches.

    Args:
        batches: For each worker of two.
    """

    def __init__(self, batches: int = 40) -> None:
        super().__init__()
        self.batches = batches
        self.set_up = 0

    def setup(self, stage: str) -> None:
        self.set_up += 1
        generator = torch.Generator().manual_seed(0)
        count = 2 * 8 * self.batches
        self.samples = TensorDataset(
            torch.randn(count, 32, generator=generator), torch.randint(10, (count,), generator=generator)
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, 8, shuffle=True)


class Writes(Callback):
    """A callback of a user, which writes."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with open("written by a callback", "w") as file:
            file.write("x")


class Counts(Callback):
    """A callback of a user, which only counts."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.counted = getattr(pl_module, "counted", 0) + 1

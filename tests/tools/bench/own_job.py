"""A small job as a user writes it, and ways in which it fails."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
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


class ShardedNet(Net):
    """The same, sharded inside of replicas."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.net, mesh=self.device_mesh["shard"])


class FailsOnOne(Net):
    """Runs out of memory in one of the rows, on one worker alone."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        strategy = self.trainer.strategy
        if isinstance(strategy, SAFusionStrategy) and batch_idx == 2 and self.global_rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().training_step(batch, batch_idx)


class FailsLater(Net):
    """DDP runs out of memory in its second turn, on one worker alone."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if type(self.trainer.strategy) is DDPStrategy and len(self.began) > 4 and self.global_rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().training_step(batch, batch_idx)


class Awkward(Net):
    """Does what would break or change later turns: state of its own, freezing, files, schedules that end."""

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.trainer.log_dir is not None
        assert self.logger is not None
        Path(self.logger.log_dir, "drawing").write_text("x")  # type: ignore[arg-type]
        self.average = copy.deepcopy(self.net)  # as callbacks that average weights do
        self.average.requires_grad_(False)
        self.moments = [int(s["step"]) for o in self.trainer.optimizers for s in o.state.values()]
        self.frozen = [param.requires_grad for param in self.net.parameters()]
        self.seen = [*getattr(self, "seen", []), (self.moments, self.frozen)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.ones(3))
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.net[0].requires_grad_(False)
        self.trainer.save_checkpoint("written by the module")


class Scheduled(Net):
    """Its schedule follows from the trainer's limits."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.trainer.max_steps)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        schedules = [{"scheduler": cycle, "interval": "step"}, {"scheduler": plateau, "monitor": "val_loss"}]
        return [optimizer], schedules


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


class TornDown(Data):
    """Frees its samples when a fit has ended."""

    def teardown(self, stage: str) -> None:
        del self.samples


class RunsOut(Data):
    """Batches that come once."""

    def train_dataloader(self) -> Any:
        if not hasattr(self, "left"):
            self.left = iter(super().train_dataloader())
        return self.left


class Linked(LightningCLI):
    """Takes the width of the model from the data, as users' own command lines do."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.init_args.batches", "model.init_args.width")


class Named(LightningCLI):
    """Names its classes, and would run."""

    def __init__(self) -> None:
        super().__init__(Net, Data, run=True, save_config_callback=None)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults({"model.width": 24})


class Asks(LightningCLI):
    """Cannot be made without a name."""

    def __init__(self, name: str) -> None:
        super().__init__(Net, Data)


class Writes(Callback):
    """A callback of a user, which writes."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with open("written by a callback", "w") as file:
            file.write("x")


class Counts(Callback):
    """A callback of a user, which only counts."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.counted = getattr(pl_module, "counted", 0) + 1

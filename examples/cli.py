"""LightningCLI: a training whose strategy is chosen in a YAML file or on the command line.

    python cli.py fit --trainer.strategy=safusion --trainer.accelerator=cpu --trainer.devices=2
    python cli.py fit --config configs/parts.yaml --trainer.strategy.density=0.1
    python cli.py fit --trainer.strategy.help=SAFusionStrategy

A small network learns handwritten digits (scikit-learn's). For a model and data of your own,
``LightningCLI(YourModel, YourData)`` is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

import lightning_safusion  # noqa: F401 - registers the names that `--trainer.strategy=...` takes


class Block(nn.Module):
    """Two normalised convolutions and a shortcut.

    Args:
        before: Channels of the input.
        width: Channels of the output.
        stride: 2 halves height and width.
    """

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x) + self.shortcut(x)
        return y.relu()


class DigitsNet(LightningModule):
    """A residual network for 8x8 images.

    Args:
        widths: Channels of each stage; every stage but the first halves the image.
        lr: Learning rate of SGD with momentum, lowered to zero along a cosine.
        steps: Optimizer steps of the whole training.
    """

    def __init__(self, widths: tuple[int, ...], lr: float, steps: int) -> None:
        super().__init__()
        self.lr = lr
        self.steps = steps
        blocks = []
        for stage, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False)):
            blocks += [Block(before, width, 2 if stage else 1), Block(width, width, 1)]
        self.stem = nn.Sequential(nn.Conv2d(1, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], 10)

    def configure_model(self) -> None:
        if self.device_mesh is not None:  # SAFusionModelParallelStrategy has made it
            from torch.distributed.fsdp import fully_shard  # from torch 2.6 on

            for block in self.blocks:
                fully_shard(block, mesh=self.device_mesh["shard"])
            fully_shard(self, mesh=self.device_mesh["shard"])

    def forward(self, x: Tensor) -> Tensor:
        classes: Tensor = self.head(self.blocks(self.stem(x).relu()).mean(dim=(2, 3)))
        return classes

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("val_accuracy", (self(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class DigitsData(LightningDataModule):
    """Images of digits with their classes; a quarter of them is held out.

    Args:
        batch_size: Images per worker and step.
        seed: Of the split.
    """

    def __init__(self, batch_size: int, seed: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
        whole = TensorDataset(images, torch.from_numpy(digits.target).long())
        self.training, self.validation = random_split(whole, (0.75, 0.25), torch.Generator().manual_seed(seed))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.training, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation, batch_size=self.batch_size)


class DigitsCLI(LightningCLI):
    """LightningCLI with defaults for the digits, so that a configuration holds what matters.

    Args:
        args: Arguments; those of the process by default.
        options: Further arguments of LightningCLI.
    """

    def __init__(self, args: Sequence[str] | None = None, **options: Any) -> None:
        super().__init__(DigitsNet, DigitsData, args=None if args is None else list(args), **options)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Gives the model and the data their defaults; the learning rate falls to zero over ``trainer.max_steps``."""
        parser.link_arguments("trainer.max_steps", "model.steps")
        parser.set_defaults(
            {
                "seed_everything": 0,
                "trainer.max_steps": 100,
                "trainer.log_every_n_steps": 10,
                "model.widths": (8, 16, 32),
                "model.lr": 0.1,
                "data.batch_size": 32,
                "data.seed": 0,
            }
        )


if __name__ == "__main__":
    DigitsCLI()

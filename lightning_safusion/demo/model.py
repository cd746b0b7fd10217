"""The demo's network: deep, and uneven: gradient tensors from ten elements to more than a hundred thousand."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override


class ResidualBlock(nn.Module):
    """Two normalised 3x3 convolutions and a shortcut, as in ResNet (He et al., 2016, section 3.3)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    @override
    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


#: Channels of the demo's stages.
WIDTHS = (16, 32, 64, 128)


class DigitsNet(LightningModule):
    """A residual network for 8x8 images, with its training.

    Args:
        widths: Channels of each stage; a stage has two blocks, and every stage but the first halves the image.
        lr: Learning rate of SGD with momentum, lowered to zero along a cosine.
        steps: Optimizer steps of the whole training.
    """

    def __init__(self, widths: tuple[int, ...], lr: float, steps: int) -> None:
        super().__init__()
        self.lr = lr
        self.steps = steps
        blocks: list[nn.Module] = []
        channels = widths[0]
        for stage, width in enumerate(widths):
            blocks += [ResidualBlock(channels, width, 2 if stage else 1), ResidualBlock(width, width, 1)]
            channels = width
        self.stem = nn.Sequential(
            nn.Conv2d(1, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, 10)
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(self(images), labels)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("val_accuracy", self.accuracy)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

"""The demo's job: a residual network on the handwritten digits that ship with scikit-learn."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from typing_extensions import override

from lightning_safusion.lookup import need

#: Training and validation batches.
Loaders = tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
#: Channels of the network's stages.
WIDTHS = (16, 32, 64, 128)
_VALIDATION_SHARE = 0.25


def load_digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Loads the 1797 images of the "Optical Recognition of Handwritten Digits" test set (UCI), and splits them by the
    seed into training and validation sets of ``(image float32 [1, 8, 8] in [0, 1], label int64)``.

    Raises:
        ModuleNotFoundError: If scikit-learn is missing; names the extra that brings it.
    """
    need("sklearn")
    from sklearn import datasets

    digits = datasets.load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out = int(len(labels) * _VALIDATION_SHARE)
    validation, training = order[:held_out], order[held_out:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[validation], labels[validation])


def digits_loaders(seed: int, batch_size: int, workers: int, rank: int) -> Loaders:
    """A worker's training and validation batches, for ``Trainer(use_distributed_sampler=False)``.

    Training batches depend on the seed, the epoch and the worker only; left-over images are dropped. Every worker
    validates on the whole held-out set, so that the accuracy counts each image once for any number of workers.
    """
    training, validation = load_digits(seed)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        training, workers, rank, seed=seed, drop_last=True
    )
    batches = DataLoader(training, batch_size, sampler=sampler, drop_last=True)
    return batches, DataLoader(validation, len(validation))


def _convolution(channels_in: int, channels: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(channels_in, channels, kernel, stride, padding=kernel // 2, bias=False)
    return [layer, nn.BatchNorm2d(channels)]


class ResidualBlock(nn.Module):
    """Two normalised 3x3 convolutions and a shortcut, as in ResNet (He et al., 2016, section 3.3)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        first, second = _convolution(channels_in, channels, 3, stride), _convolution(channels, channels, 3)
        self.body = nn.Sequential(*first, nn.ReLU(), *second)
        same = stride == 1 and channels_in == channels
        self.shortcut = nn.Sequential(*([] if same else _convolution(channels_in, channels, 1, stride)))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class DigitsNet(LightningModule):
    """A deep and uneven residual network: gradient tensors from ten elements to more than a hundred thousand.

    Args:
        widths: Channels of each stage; a stage has two blocks, and every stage but the first halves the image.
        make_optimizer: Of parameters; its learning rate is lowered to zero along a cosine.
        steps: Optimizer steps of the whole training.
    """

    def __init__(self, widths: tuple[int, ...], make_optimizer: MakeOptimizer, steps: int) -> None:
        super().__init__()
        self.make_optimizer = make_optimizer
        self.steps = steps
        blocks: list[nn.Module] = []
        channels = widths[0]
        for stage, width in enumerate(widths):
            blocks += [ResidualBlock(channels, width, 2 if stage else 1), ResidualBlock(width, width, 1)]
            channels = width
        self.stem = nn.Sequential(*_convolution(1, widths[0], 3), nn.ReLU())
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, 10)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self(images), labels)
        self.log("loss", loss)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("val_accuracy", (self(images).argmax(1) == labels).float().mean())

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.make_optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

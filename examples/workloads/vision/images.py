"""What the image data modules share: augmentation, and each worker's share of a data set."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from examples.workloads.sharing import SharedData

Transform = Callable[[Image.Image], Image.Image]


class Images(Dataset[tuple[Tensor, int]]):
    """A data set of images (uint8 [3, height, width]) and the numbers of their classes."""

    @abstractmethod
    def __len__(self) -> int: ...


def to_tensor(image: Image.Image) -> Tensor:
    """An image as uint8 [3, height, width]."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def _uniform(low: float, high: float) -> float:
    # torch's generator: the loader seeds it differently in every one of its processes
    return float(torch.empty(()).uniform_(low, high))


def flip(image: Image.Image) -> Image.Image:
    """Mirrors every other image."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if _uniform(0, 1) < 0.5 else image


def augment_small(image: Image.Image, padding: int = 4, degrees: float = 15) -> Image.Image:
    """Shifts by up to ``padding`` pixels in each direction, mirrors, turns by up to ``degrees``; edges are black."""
    left, top = (int(torch.randint(2 * padding + 1, ())) - padding for _ in range(2))
    shifted = image.crop((left, top, left + image.width, top + image.height))
    return flip(shifted).rotate(_uniform(-degrees, degrees))


def random_crop(image: Image.Image, size: int) -> Image.Image:
    """A part of 8 % to 100 % of the image and of aspect 3:4 to 4:3, scaled to ``size``, mirrored at random."""
    for _ in range(10):
        area = image.width * image.height * _uniform(0.08, 1)
        aspect = math.exp(_uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < width <= image.width and 0 < height <= image.height:
            left = int(torch.randint(image.width - width + 1, ()))
            top = int(torch.randint(image.height - height + 1, ()))
            box = (left, top, left + width, top + height)
            return flip(image.resize((size, size), Image.Resampling.BILINEAR, box))
    return flip(center_crop(image, size))


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """The middle of the image after its shorter side was scaled to 8/7 of ``size`` (256 for 224)."""
    side = min(image.width, image.height) * 7 / 8
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return image.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side))


class ImageData(SharedData):
    """Batches of images (uint8 [batch, 3, height, width]) and labels (int64 [batch]); every worker gets its share.

    Args:
        folder: Where the data set is.
        batch_size: Images per worker.
        loaders: Processes per worker that read images; 0: the worker itself.
    """

    def __init__(self, folder: Path, batch_size: int = 32, loaders: int = 4) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.batch_size = batch_size
        self.loaders = loaders

    @abstractmethod
    def samples(self, train: bool) -> Images:
        """The training set, with augmentation, or the validation set."""

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        reading = {"num_workers": self.loaders, "persistent_workers": self.loaders > 0}
        return self.training_loader(self.samples(train=True), self.batch_size, **reading)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self.held_out_loader(self.samples(train=False), self.batch_size, num_workers=self.loaders)

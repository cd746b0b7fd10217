"""The demo's data: handwritten digits that ship with scikit-learn, split once and shuffled the same for every run."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from typing_extensions import override

from lightning_safusion.bench.extras import need

VALIDATION_SHARE = 0.25


def load_digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Loads the 1797 images of the "Optical Recognition of Handwritten Digits" test set (UCI), and splits them by the
    seed into training and validation sets of ``(image float32 [1, 8, 8] in [0, 1], label int64)``.

    Raises:
        ModuleNotFoundError: If scikit-learn is missing; names the extra that brings it.
    """
    need("sklearn", "examples")
    from sklearn import datasets

    digits = datasets.load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out = int(len(labels) * VALIDATION_SHARE)
    validation, training = order[:held_out], order[held_out:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[validation], labels[validation])


class DigitsData(LightningDataModule):
    """Digits in batches that depend on the seed, the epoch and the worker only.

    Every worker validates on the whole held-out set, so that the accuracy counts each image once whatever the number
    of workers. Use it with ``Trainer(use_distributed_sampler=False)``.

    Args:
        batch_size: Images per worker and step.
        seed: Seed of the split and of the shuffling.
    """

    def __init__(self, batch_size: int, seed: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed
        self.training, self.validation = load_digits(seed)

    def steps_per_epoch(self, workers: int) -> int:
        """Steps in which ``workers`` workers go through the training images once; left-over images are dropped."""
        return len(self.training) // workers // self.batch_size

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        world_size, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
            self.training, world_size, rank, seed=self.seed, drop_last=True
        )
        return DataLoader(self.training, self.batch_size, sampler=sampler, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation, batch_size=len(self.validation))

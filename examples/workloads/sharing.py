"""Every worker's share of a data set: the same for all data modules whose samples stand on their own."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, cast

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

Sample = TypeVar("Sample", covariant=True)


class Samples(Protocol[Sample]):
    """What a DataLoader asks of a data set; a list is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


class SharedData(LightningDataModule):
    """Data of which every worker of the trainer gets a share; without a trainer there is one worker.

    Lightning's own sampler is not used (``use_distributed_sampler=False``): on held-out data it repeats samples until
    all workers have equally many, which counts some of them twice.
    """

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.trainer.world_size if self.trainer else 1

    @property
    def rank(self) -> int:
        """This worker."""
        return self.trainer.global_rank if self.trainer else 0

    def training_loader(self, samples: Samples[Sample], batch_size: int, **options: Any) -> DataLoader[Sample]:
        """Equally many batches for all workers, in another order in every epoch.

        Args:
            samples: The whole training set.
            batch_size: Samples per worker.
            options: Further arguments of DataLoader.

        Raises:
            ValueError: If they do not fill a batch of every worker; Lightning would train on nothing.
        """
        dataset = cast("Dataset[Sample]", samples)
        # Lightning tells the sampler the epoch
        sampler: DistributedSampler[Sample] = DistributedSampler(dataset, self.workers, self.rank, drop_last=True)
        if len(sampler) < batch_size:
            raise ValueError(
                f"{len(samples)} training samples are too few for {self.workers} workers with batch_size={batch_size}"
            )
        pinned = torch.cuda.is_available()
        return DataLoader(dataset, batch_size, sampler=sampler, drop_last=True, pin_memory=pinned, **options)

    def held_out_loader(self, samples: Samples[Sample], batch_size: int, **options: Any) -> DataLoader[Sample]:
        """Every sample once, on one of the workers.

        Args:
            samples: The whole validation or test set.
            batch_size: Samples per worker.
            options: Further arguments of DataLoader.

        Raises:
            ValueError: If there is not one for every worker. Lightning leaves the validation out where there is
                nothing to validate, and the others would wait for that worker's counts.
        """
        if len(samples) < self.workers:
            raise ValueError(f"{len(samples)} held-out samples are too few for {self.workers} workers")
        mine = Subset(cast("Dataset[Sample]", samples), range(self.rank, len(samples), self.workers))
        return DataLoader(mine, batch_size, pin_memory=torch.cuda.is_available(), **options)

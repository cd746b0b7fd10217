"""Workers with different numbers of batches: all end soon, and say who has how many."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_safusion import SAFusionStrategy
from tests.models import TinyClassifier, trainer
from tests.process_group import run_launched


class Stream(IterableDataset[tuple[torch.Tensor, int]]):
    """So many samples, without a length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.samples):
            yield torch.randn(32, generator=generator), 1


class LogsAtTheEnd(TinyClassifier):
    """A figure is reduced at the end of the epoch, over the process group that carries gradients."""

    def on_train_epoch_end(self) -> None:
        self.log("steps", float(self.trainer.global_step), sync_dist=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "batches", "accumulate", "words"),
    [
        ({"collective": "allgather", "quota": "shared"}, (4, 6), 1, "rank 0 has ended epoch 0 after 4 batches; rank 1"),
        ({"collective": "gtopk"}, (6, 4), 1, "rank 0 .*; rank 1 has ended epoch 0 after 4 batches"),
        ({"collective": "sharded"}, (4, 6, 4), 3, "is in batch 4 of epoch 0, its last"),
        ({}, (4, 6, 0), 1, "rank 2 has ended epoch 0 after 0 batches"),
        ({"system": "ddp"}, (4, 6), 1, "rank 0 has ended epoch 0 after 4 batches; rank 1"),
        ({"system": "ddp"}, (6, 4), 1, "rank 0 .*; rank 1 has ended epoch 0 after 4 batches"),
    ],
)
def test_all_are_told_who_has_how_many(
    options: dict[str, Any], batches: tuple[int, ...], accumulate: int, words: str
) -> None:
    def run(rank: int) -> None:
        strategy = SAFusionStrategy(timeout=timedelta(minutes=30), **options)
        job = trainer(strategy, devices=len(batches), max_epochs=2, accumulate_grad_batches=accumulate)
        job.fit(LogsAtTheEnd(), DataLoader(Stream(4 * batches[rank]), batch_size=4))

    with pytest.raises(RuntimeError) as caught:
        run_launched(len(batches), run)
    said = re.findall(r"OutOfStepError: (workers wait for each other in different places: .*)", str(caught.value))
    assert len(said) == len(batches)
    for each in said:
        assert re.search(f"{words}.* The numbers of batches differ between workers", each)

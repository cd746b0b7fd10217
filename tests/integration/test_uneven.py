"""Trainings with different numbers of batches, and with batches of different sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics import MetricCollection, MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassPrecision

from lightning_safusion import SAFusionStrategy
from tests.models import TakeTurns, TinyClassifier, equal, trainer, weights
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


class StopsOne(Callback):
    """Tells one worker to stop."""

    def on_train_batch_end(self, trainer: Trainer, *others: Any) -> None:
        trainer.should_stop = trainer.global_rank == 1 and trainer.global_step == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "callbacks", "words"),
    [
        ((4, 6), [], "after batch 4 of epoch 0, its last; .* The numbers of batches differ between workers"),
        ((6, 4), [], "after batch 4 of epoch 0, its last. The numbers of batches differ between workers"),
        ((6, 6), [StopsOne()], r"after batch 2 of epoch 0. One was told to stop \(trainer.should_stop\)"),
    ],
)
def test_all_are_told_where_the_first_to_end_an_epoch_validates(
    batches: tuple[int, ...], callbacks: list[Callback], words: str
) -> None:
    def run(rank: int) -> None:
        job = trainer(SAFusionStrategy(timeout=timedelta(minutes=30)), callbacks=callbacks)
        job.fit(Counts(), DataLoader(Stream(4 * batches[rank]), batch_size=4), DataLoader(Stream(4), batch_size=4))

    with pytest.raises(RuntimeError) as caught:
        run_launched(len(batches), run)
    assert len(re.findall(f"OutOfStepError: .* is at the beginning of validation.*{words}", str(caught.value))) == 2


BATCHES = (4, 2, 0)  # Lightning rounds the mean of the workers' numbers of samples


def data(rank: int, samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(rank)
    return TensorDataset(torch.randn(samples, 32, generator=generator), torch.arange(samples) % 10)


class Sequence(IterableDataset[Any]):
    """A dataset, without its length."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[i] for i in range(len(self.dataset)))  # type: ignore[arg-type]


class Counts(TinyClassifier):
    """Every batch is to count once: in a mean over the epoch, and in metrics of the module."""

    def __init__(self) -> None:
        super().__init__(lr=0.05)
        self.scores = MetricCollection([MulticlassAccuracy(10), MulticlassPrecision(10)])
        self.seen: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss.detach(), on_epoch=True, on_step=False, sync_dist=True)
        self.scores(self(batch[0]), batch[1])
        return loss

    def on_train_epoch_end(self) -> None:
        for metric in self.scores.values(copy_state=False):  # type: Any
            self.seen.append(float((metric.tp + metric.fn).sum()))
        self.scores.reset()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


class Wrapped(TinyClassifier):
    """Metrics that compute what others of them need, and gather lists; the number of steps is asked for early."""

    def __init__(self) -> None:
        super().__init__()
        self.extremes, self.curve = MinMaxMetric(MulticlassAccuracy(10)), MulticlassAUROC(10)

    def setup(self, stage: str) -> None:
        self.steps = self.trainer.estimated_stepping_batches

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        for metric in (self.extremes, self.curve):
            metric(self(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        for metric in (self.extremes, self.curve):
            metric.compute()


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 8), (3, 4)])
def test_joined_workers_train_the_mean_of_those_that_have_a_batch(accumulate: int, steps: int) -> None:
    def run(rank: int) -> tuple[list[Tensor], list[float], float, int]:
        model = Counts()
        dataset = data(rank, 4 * BATCHES[rank])
        loader = DataLoader(dataset if rank < 2 else Sequence(dataset), batch_size=4)
        strategy = SAFusionStrategy(density=1.0, uneven_inputs="join", timeout=timedelta(seconds=30))
        options = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
        job = trainer(strategy, devices=3, use_distributed_sampler=False, **options)
        job.fit(model, loader)
        return weights(model), model.seen, float(job.callback_metrics["loss"]), job.global_step

    found = run_launched(3, run)
    model = Counts()
    optimizer: Any = model.configure_optimizers()
    for _ in range(2):
        losses = []
        for number in range(max(BATCHES)):
            batches = [data(rank, 4 * own)[4 * number : 4 * number + 4] for rank, own in enumerate(BATCHES)]
            present = [nn.functional.cross_entropy(model(x), y) for x, y in batches if len(x)]
            (torch.stack(present).mean() / accumulate).backward()
            if number % accumulate == accumulate - 1 or number == max(BATCHES) - 1:
                optimizer.step()
                optimizer.zero_grad()
            losses += [float(loss.detach()) for loss in present]
    for rank, (own, seen, loss, made) in enumerate(found):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(own, weights(model), strict=True))
        assert (seen, made) == ([4.0 * BATCHES[rank]] * 4, steps)
        assert loss == pytest.approx(sum(losses) / len(losses))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "settings", "model"),
    [
        ({}, {"val_check_interval": 2}, Counts),
        ({"collective": "sharded", "density": 0.1}, {"accumulate_grad_batches": 3}, Counts),
        ({"collective": "allgather", "quota": "shared", "weighting": "world"}, {"max_epochs": 3}, Counts),
        ({"density": 0.1, "weighting": "samples", "find_unused_parameters": True}, {}, TakeTurns),
        ({"system": "ddp"}, {"precision": "bf16-mixed"}, Counts),
        ({"system": "powersgd"}, {"limit_train_batches": 3}, Counts),
        ({"find_unused_parameters": True}, {"gradient_clip_val": 0.1}, Counts),
        ({"uneven_inputs": "stop"}, {}, Counts),
        ({}, {"max_epochs": 1}, Wrapped),
    ],
)
def test_uneven_trainings_end_with_equal_replicas(
    options: dict[str, Any], settings: dict[str, Any], model: type[TinyClassifier]
) -> None:
    stops = options.get("uneven_inputs") == "stop"
    batches = (5, 3, 2, 4, 2) if stops else (5, 3, 0, 4, 1)

    def run(rank: int) -> tuple[list[Tensor], int]:
        strategy = SAFusionStrategy(**{"uneven_inputs": "join", "timeout": timedelta(seconds=60), **options})
        module = model()
        job = trainer(strategy, devices=5, use_distributed_sampler=False, **({"max_epochs": 2} | settings))
        job.fit(module, DataLoader(Sequence(data(rank, 4 * batches[rank])), batch_size=4), DataLoader(data(9, 8)))
        return weights(module), job.fit_loop.total_batch_idx + 1

    found = run_launched(5, run, timeout=120.0)
    together = min(settings.get("limit_train_batches", 5), 2 if stops else 5)
    assert all(done == settings.get("max_epochs", 2) * together for _, done in found)
    assert all(equal(a, b) for own, _ in found for a, b in zip(own, found[0][0], strict=True))


@pytest.mark.slow
def test_a_joined_training_is_resumed(tmp_path: Path) -> None:
    def run(rank: int, epochs: int, path: Path | None) -> list[Tensor]:
        model = Counts()
        saves = ModelCheckpoint(tmp_path, "last", save_top_k=1, every_n_epochs=1)
        strategy = SAFusionStrategy(uneven_inputs="join", memory="residual", density=0.1, timeout=timedelta(seconds=60))
        options = {"devices": 2, "max_epochs": epochs, "enable_checkpointing": True, "callbacks": [saves]}
        job = trainer(strategy, use_distributed_sampler=False, **options)
        job.fit(model, DataLoader(Sequence(data(rank, 4 * (2 + rank))), batch_size=4), ckpt_path=path)
        return weights(model)

    whole = run_launched(2, run, 3, None)
    (tmp_path / "last.ckpt").unlink()
    run_launched(2, run, 2, None)
    resumed = run_launched(2, run, 3, tmp_path / "last.ckpt")
    assert all(equal(a, b) for a, b in zip(whole[0], resumed[1], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("automatic", [True, False])
def test_batches_weighted_by_samples_train_as_one_worker_with_all(automatic: bool) -> None:
    sizes = (8, 24)

    def run(rank: int, workers: int) -> list[Tensor]:
        both = data(0, 3 * 32)
        rows = [i for i in range(len(both)) if workers == 1 or (i % 32 < 8) == (rank == 0)]
        part = TensorDataset(*both[rows])
        strategy = SAFusionStrategy(density=1.0, weighting="samples", find_unused_parameters=not automatic)
        model = TinyClassifier() if automatic else TakeTurns()
        job = trainer(strategy, devices=workers, use_distributed_sampler=False)
        job.fit(model, DataLoader(part, batch_size=sizes[rank] if workers > 1 else 32))
        return weights(model)

    two, alone = run_launched(2, run, 2), run_launched(1, run, 1)
    assert all(torch.allclose(a, b, atol=1e-6) for own in two for a, b in zip(own, alone[0], strict=True))

"""What a Trainer leaves behind, and what it may do twice: fits, evaluations, exceptions, several trainers in one
process."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_safusion import SAFusionStrategy
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.hook import DDPHook
from tests.ledger import HeldBack
from tests.models import TinyClassifier, classification, distance, equal, fit, trainer, weights
from tests.process_group import run_launched
from tests.quick import quick_of

SPARSE: dict[str, Any] = {"density": 0.1, "collective": "allgather"}


class Evaluated(TinyClassifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def alive(*kinds: type) -> list[int]:
    """Objects of each kind; one look at all there are, which takes seconds with everything that is imported."""
    gc.collect()
    types = Counter(map(type, gc.get_objects()))
    return [sum(count for each, count in types.items() if issubclass(each, kind)) for kind in kinds]


def test_nothing_is_left_after_training() -> None:
    def run(rank: int) -> list[int]:
        held = []
        for system, make in (("saf-pooled", torch.optim.AdamW), ("saf-naive", None)):
            model = Evaluated(make=make)
            run = trainer(SAFusionStrategy(system=system, **SPARSE), limit_train_batches=6)
            run.fit(model, classification(), classification())
            held += [weakref.ref(model), weakref.ref(run.optimizers[0])]
            groups = len(dist.distributed_c10d._world.pg_map)
            hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
            del run, model
        counts = alive(Engine, DDPHook, DistributedDataParallel)
        return [*counts, groups, hooks, sum(ref() is not None for ref in held), threading.active_count()]

    for counts in run_launched(2, run):
        assert counts == [0, 0, 0, 1, 0, 0, 1]


def test_fit_twice_and_evaluate_in_between() -> None:
    def run(rank: int) -> tuple[list[Tensor], int]:
        model = Evaluated()
        strategy = SAFusionStrategy(**SPARSE)
        run = trainer(strategy, limit_train_batches=5)
        data = classification()
        run.validate(model, data, verbose=False)
        assert strategy.figures()["windows"] == 0  # without an engine
        run.fit(model, data, data)
        assert strategy.figures()["windows"] == 5
        run.test(model, data, verbose=False)
        assert len(run.predict(model, data)) == 20
        run.fit_loop.max_epochs = 3
        run.fit(model, data, data)
        return weights(model), strategy.figures()["windows"]

    (first, windows), (second, _) = run_launched(2, run)
    assert windows == 10
    assert equal(first, second)


@pytest.mark.slow
def test_a_trainer_is_copied_and_pickled_after_training(tmp_path: Path) -> None:
    def run(rank: int) -> list[Any]:
        job, model = trainer(SAFusionStrategy(**SPARSE), limit_train_batches=3), TinyClassifier()
        job.fit(model, classification())
        ended = []
        for number, each in enumerate((copy.deepcopy(job), pickle.loads(pickle.dumps(job)))):  # noqa: S301 (our own)
            assert each.strategy.figures()["windows"] == 3
            each.save_checkpoint(tmp_path / f"{number}.ckpt")
            each.fit_loop.max_epochs = 2
            trained = copy.deepcopy(model)
            each.fit(trained, classification())
            ended.append(weights(trained))
        return ended

    (copied, pickled), others = run_launched(2, run)
    assert equal([copied, pickled], others)
    assert equal(copied, pickled)
    # residuals stay in their process
    assert [(tmp_path / f"{number}.ckpt.safusion").exists() for number in range(2)] == [True, False]


class Failing(TinyClassifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 3:
            raise ArithmeticError("on purpose")


def test_a_trainer_after_one_that_failed() -> None:
    def run(rank: int) -> tuple[int, list[Tensor]]:
        with pytest.raises(ArithmeticError, match="on purpose"):
            fit(SAFusionStrategy(**SPARSE), Failing())
        (left,) = alive(DDPHook)
        return left, fit(SAFusionStrategy(**SPARSE), limit_train_batches=5).weights

    (left, first), (_, second) = run_launched(2, run)
    assert left <= 1  # what the exception's traceback still holds
    assert equal(first, second)


#: What a Trainer can be asked for, made anew for every training; and the steps that it then takes.
FEATURES: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "swa": (lambda: {"callbacks": [callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)]}, 12),
    "ema": (lambda: {"callbacks": [callbacks.EMAWeightAveraging(decay=0.9)]}, 12),
    "accumulation scheduler": (lambda: {"callbacks": [callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]}, 9),
    "barebones": (lambda: {"barebones": True}, 12),
    "anomaly detection": (lambda: {"detect_anomaly": True}, 12),
    "overfit_batches": (lambda: {"overfit_batches": 3}, 6),
    "fast_dev_run": (lambda: {"fast_dev_run": 3}, 3),
    "max_time": (lambda: {"max_time": {"seconds": 4}}, 4),
    "max_steps": (lambda: {"max_steps": 7}, 7),
    "limit_batches": (lambda: {"limit_train_batches": 0.4, "limit_val_batches": 0.1}, 16),
    "sanity check": (lambda: {"num_sanity_val_steps": -1}, 12),
    "val_check_interval": (lambda: {"val_check_interval": 2}, 12),
    "val_check_interval as a time": (lambda: {"val_check_interval": {"hours": 1}}, 12),
}
#: The others are slow tests.
QUICK = ("max_steps",)


class Clock:
    """A second passes whenever rank 0 asks; on other ranks time stands still."""

    def __init__(self, rank: int) -> None:
        self.rank, self.now = rank, 0.0

    def monotonic(self) -> float:
        self.now += self.rank == 0
        return self.now


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("feature", quick_of(FEATURES, QUICK))
def test_features_of_the_trainer(monkeypatch: pytest.MonkeyPatch, feature: str) -> None:
    make, steps = FEATURES[feature]

    def train(rank: int, strategy: Any) -> list[Tensor]:
        monkeypatch.setattr("lightning.pytorch.callbacks.timer.time", Clock(rank))
        model, data = Evaluated(), classification()
        run = trainer(strategy, **({"limit_train_batches": 6, "max_epochs": 2} | make()))
        run.fit(model, data, data)
        assert run.global_step == steps
        return [*weights(model), torch.tensor(model.losses), *run.callback_metrics.values()]

    def run(rank: int) -> tuple[float, list[Tensor]]:
        whole, plain = train(rank, SAFusionStrategy(density=1.0, collective="allgather")), train(rank, "ddp")
        return distance(whole, plain), train(rank, SAFusionStrategy(**SPARSE))[:7]

    (difference, first), (other, second) = run_launched(2, run)
    assert difference <= 2e-6
    assert other <= 2e-6
    assert equal(first, second)
    assert all(bool(torch.isfinite(each).all()) for each in first)


class FromTheStep(TinyClassifier):
    """Its data depend on step and rank only: a loader that begins anew changes nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(2 * self.trainer.global_step + self.global_rank)
        x = torch.randn(16, 32, generator=generator)
        return nn.functional.cross_entropy(self(x), x[:, :10].argmax(1))


class Searches(callbacks.LearningRateFinder):
    """Searches when the fit starts, or within it, as Lightning's documentation shows."""

    def __init__(self, when: str) -> None:
        super().__init__(num_training_steps=8, update_attr=False)
        self.when = when

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.when == "fit start":
            self.lr_find(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.when == "second epoch" and trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


@pytest.mark.parametrize("when", quick_of(("before", "fit start", "second epoch"), ("before",)))
def test_the_learning_rate_finder_leaves_no_trace(tmp_path: Path, when: str) -> None:
    def train(strategy: Any, search: bool) -> tuple[list[Tensor], int]:
        model, held, finder = FromTheStep(), HeldBack(), Searches(when if search else "never")
        options = {"max_epochs": 2, "callbacks": [held]}
        if when != "before":
            options = {"max_epochs": 3, "callbacks": [held, finder]}
        run = trainer(strategy, limit_train_batches=6, default_root_dir=tmp_path, **options)
        found = None
        if search and when == "before":
            found = Tuner(run).lr_find(model, classification(), num_training=8, update_attr=False)
        run.fit(model, classification())
        found = found or finder.optimal_lr
        return [*weights(model), *held.held.values()], len(found.results["loss"]) if found is not None else 0

    def run(rank: int) -> list[tuple[int, int]]:
        seen = []
        for make in (lambda: "ddp", lambda: SAFusionStrategy(**SPARSE)):
            (plain, none), (searched, steps) = train(make(), False), train(make(), True)
            assert none == 0
            seen.append((steps, sum(torch.equal(a, b) for a, b in zip(plain, searched, strict=True))))
        return seen

    # within a fit Lightning 2.6 ends the search after one step
    steps = 1 if when == "second epoch" else 8
    # seven parameters; then seven and the residual of each
    assert run_launched(2, run) == [[(steps, 7), (steps, 14)]] * 2

"""What a Trainer leaves behind, and what it may do twice: fits, evaluations, exceptions, several trainers in one
process."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_safusion import SAFusionStrategy
from lightning_safusion.fusion.controller import Controller
from lightning_safusion.fusion.ddp import DDPHook
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched

SPARSE: dict[str, Any] = {"density": 0.1, "collective": "allgather"}


class Evaluated(TinyClassifier):
    """Also validates, tests and predicts."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def alive(kind: type) -> int:
    gc.collect()
    return sum(issubclass(type(thing), kind) for thing in gc.get_objects())


def test_nothing_is_left_after_training() -> None:
    def run(rank: int) -> list[int]:
        models = []
        for system in ("safusion", "saf-naive"):
            model = Evaluated()
            models.append(weakref.ref(model))
            run = trainer(SAFusionStrategy(system=system, **SPARSE), limit_train_batches=6)
            run.fit(model, classification(), classification())
            groups = len(dist.distributed_c10d._world.pg_map)
            hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
            del run, model
        counts = [alive(kind) for kind in (Controller, DDPHook, DistributedDataParallel)]
        return [*counts, groups, hooks, sum(ref() is not None for ref in models), threading.active_count()]

    for counts in run_launched(2, run):
        assert counts == [0, 0, 0, 1, 0, 0, 1]


def test_fit_twice_and_evaluate_in_between() -> None:
    def run(rank: int) -> tuple[list[Tensor], int]:
        model = Evaluated()
        strategy = SAFusionStrategy(**SPARSE)
        run = trainer(strategy, limit_train_batches=5)
        data = classification()
        run.validate(model, data, verbose=False)
        run.fit(model, data, data)
        assert strategy.report()["windows"] == 5
        run.test(model, data, verbose=False)
        assert len(run.predict(model, data)) == 20
        run.fit_loop.max_epochs = 3
        run.fit(model, data, data)
        return [p.detach() for p in model.parameters()], strategy.report()["windows"]

    (first, windows), (second, _) = run_launched(2, run)
    assert windows == 10
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Failing(Evaluated):
    """Fails in one step on every rank."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 3:
            raise ArithmeticError("on purpose")


def test_a_trainer_after_one_that_failed() -> None:
    def run(rank: int) -> tuple[int, list[Tensor]]:
        with pytest.raises(ArithmeticError, match="on purpose"):
            trainer(SAFusionStrategy(**SPARSE)).fit(Failing(), classification())
        left = alive(DDPHook)
        model = Evaluated()
        trainer(SAFusionStrategy(**SPARSE), limit_train_batches=5).fit(model, classification())
        return left, [p.detach() for p in model.parameters()]

    (left, first), (_, second) = run_launched(2, run)
    assert left <= 1  # what the exception's traceback still holds
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", ["swa", "ema", "barebones", "anomaly", "scheduler"])
def test_features_that_look_at_weights_and_gradients(what: str) -> None:
    def run(rank: int) -> list[Tensor]:
        callbacks: list[Callback] = []
        options: dict[str, Any] = {"limit_train_batches": 6, "max_epochs": 2}
        if what == "swa":
            callbacks = [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)]
        elif what == "ema":
            callbacks = [EMAWeightAveraging(decay=0.9)]
        elif what == "scheduler":
            from lightning.pytorch.callbacks import GradientAccumulationScheduler

            callbacks = [GradientAccumulationScheduler({0: 1, 1: 2})]
        elif what == "anomaly":
            options["detect_anomaly"] = True
        if what == "barebones":
            from lightning.pytorch import Trainer

            fitted = Trainer(
                accelerator="cpu", devices=2, strategy=SAFusionStrategy(**SPARSE), barebones=True, **options
            )
        else:
            fitted = trainer(SAFusionStrategy(**SPARSE), callbacks=callbacks, **options)
        model = TinyClassifier()
        fitted.fit(model, classification())
        return [p.detach() for p in model.parameters()]

    first, second = run_launched(2, run)
    assert all(torch.equal(a, b) and bool(torch.isfinite(a).all()) for a, b in zip(first, second, strict=True))


def test_the_learning_rate_finder_leaves_no_trace() -> None:
    def run(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        results = []
        for search in (False, True):
            model = TinyClassifier()
            fitted = trainer(SAFusionStrategy(**SPARSE), limit_train_batches=6)
            if search:
                Tuner(fitted).lr_find(model, classification(), num_training=8, update_attr=False)
            fitted.fit(model, classification())
            results.append([p.detach() for p in model.parameters()])
        return results[0], results[1]

    for plain, searched in run_launched(2, run):
        assert all(torch.equal(a, b) for a, b in zip(plain, searched, strict=True))

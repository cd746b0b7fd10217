"""What the strategy says of its own steps, and what a second fit of the same job knows from the first."""

from __future__ import annotations

import copy
import csv
import pickle
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_safusion import OverlapProfiler, SAFusionStrategy
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.integration.history import FitHistory
from lightning_safusion.tools.report.advice import advise
from lightning_safusion.tools.report.page import load_run
from tests.models import Lines, TinyClassifier, classification, equal, fit, trainer, weights
from tests.process_group import run_launched

SPARSE = {"collective": "allgather", "density": 0.05}


def test_after_its_first_review_it_says_what_a_step_takes_and_would_take() -> None:
    def run(rank: int) -> tuple[list[str], list[Any], dict[str, Any]]:
        said, steps = Lines(), []
        strategy = SAFusionStrategy(**SPARSE)
        watch = LambdaCallback(on_train_batch_end=lambda *_: steps.append(strategy.figures()["step_s"]))
        trainer(strategy, callbacks=[watch], max_epochs=2).fit(TinyClassifier(), classification())
        return [line for line in said.lines if "under DDP" in line], steps, strategy.figures()

    (said, steps, report), (silent, others, _) = run_launched(2, run)
    assert len(said) == 1
    assert silent == []
    assert "% of the bytes of fp32 gradients are sent" in said[0]
    assert steps[:5] == [None] * 5
    assert report["step_s"] > 0
    assert report["ddp_step_s"] > 0
    assert sum(step is None for step in steps) == sum(step is None for step in others)


def test_what_a_fit_has_done_is_copied_and_pickled_without_its_engine() -> None:
    history, engine = FitHistory(), object()
    history.last, history.ended = engine, {"windows": 3}  # type: ignore[assignment]
    assert copy.deepcopy(history).last is engine  # not copied: a Trainer is, after training
    pickled = pickle.loads(pickle.dumps(history))  # noqa: S301  our own bytes
    assert pickled.last is None
    assert pickled.ended == {"windows": 3}


class Burdened(TinyClassifier):
    """Takes so many seconds longer in its forward pass; asleep, or it would slow the other rank where cores are few."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


@pytest.mark.slow
def test_a_worker_that_computes_longer_is_named_and_its_link_is_not_slower(tmp_path: Path) -> None:
    """Of the time that the others wait, less than half may pass for that of all messages of a step.

    Those take a few milliseconds on a busy machine. ``tests/fusion/test_slowest.py`` says how much, with its own clock.
    """

    def run(rank: int) -> tuple[list[str], dict[str, Any], GroupCosts, Plan]:
        said, found = Lines(), []
        strategy = SAFusionStrategy(**SPARSE)
        profiler = OverlapProfiler(every_n_steps=30, dirpath=tmp_path, table=False)
        watch = LambdaCallback(on_train_end=lambda *_: found.append((strategy.costs, strategy.plan)))
        logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
        job = trainer(strategy, callbacks=[profiler, watch], max_epochs=2, max_steps=30, logger=logger)
        job.fit(Burdened(0.1 * rank), classification())
        ((costs, plan),) = found
        return [line for line in said.lines if "is slow" in line], strategy.figures(), costs, plan

    (said, figures, costs, plan), (silent, others, *_) = run_launched(2, run)
    assert len(said) == 1
    assert said[0].startswith(f"SAFusion: rank 1 on host {socket.gethostname()} is slow: the others wait")
    assert silent == []
    slow = {name: figures[name] for name in ("slow_rank", "waiting_s", "slow_since")}
    assert slow == {name: others[name] for name in slow}
    assert (slow["slow_rank"], slow["waiting_s"] > 1e-3) == (1, True)
    fixed, per_byte = costs.sparse
    assert fixed * len(plan.groups) + per_byte * sum(costs.sparse_bytes) < slow["waiting_s"] / 2
    assert "is slow: the others wait" in advise(load_run(tmp_path).overlap)[0].text
    (table,) = tmp_path.rglob("metrics.csv")
    assert any(row["safusion/slow_rank"] == "1.0" for row in csv.DictReader(table.open()))


def test_plain_ddp_says_why_and_has_no_figures() -> None:
    said, strategy = Lines(), SAFusionStrategy(system="ddp")
    trainer(strategy, devices=1, max_steps=2).fit(TinyClassifier(), classification())
    assert "SAFusion: DDP without the engine is used, because system='ddp' asks for it." in said.lines
    report = strategy.figures()
    assert (report["plan"], report["collectives"], report["windows"]) == ([], [], 0)
    figures = ("step", "density", "achieved_density", "bytes_sent", "dense_bytes", "exposed_s", "step_s", "ddp_step_s")
    figures += ("slow_rank", "waiting_s", "slow_since", "last_engine_step")
    assert {report[name] for name in figures} == {None}
    assert strategy.slowest is None


def test_the_latest_step_of_the_engine_is_known_after_plain_ddp_has_taken_over() -> None:
    def run(rank: int) -> dict[str, Any]:
        strategy = SAFusionStrategy(**SPARSE)

        def leave(trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int) -> None:
            if index == 2:
                strategy._fit.go_plain("the test says so")

        watch = LambdaCallback(on_train_batch_end=leave)
        trainer(strategy, callbacks=[watch], max_steps=5).fit(TinyClassifier(), classification())
        return strategy.figures()

    for report in run_launched(2, run):
        assert (report["plain_ddp"], report["last_engine_step"], report["windows"]) == ("the test says so", 2, 3)
        assert report["step"] is report["density"] is report["dense_bytes"] is None


def test_a_second_fit_begins_with_what_the_first_has_learned() -> None:
    def run(rank: int) -> tuple[Any, ...]:
        model, learned = TinyClassifier(), []
        watch = LambdaCallback(on_train_end=lambda trainer, _: learned.append(trainer.strategy.learned()))
        first = SAFusionStrategy(**SPARSE)
        trainer(first, callbacks=[watch]).fit(model, classification())
        seen: list[Any] = []
        second = SAFusionStrategy(**SPARSE)
        second.begin_with(learned[0])
        look = LambdaCallback(
            on_train_batch_end=lambda *_: seen.append((second.report()["windows"], len(second.report()["plan"])))
        )
        trainer(second, callbacks=[look]).fit(model, classification())
        return first.report()["windows"], len(first.report()["plan"]), seen[0], learned[0]["plain_ddp"]

    for windows, buffers, begun, plain in run_launched(2, run):
        assert begun == (windows + 1, buffers)
        assert plain is None


def test_that_plain_ddp_is_faster_is_known_to_the_next_fit() -> None:
    def run(rank: int) -> tuple[str | None, list[torch.Tensor]]:
        model, strategy = TinyClassifier(), SAFusionStrategy(density=0.05)
        strategy.begin_with({"plain_ddp": "it was faster before", "engine": None})
        job = trainer(strategy)
        job.fit(model, classification())
        told = strategy.figures()["plain_ddp"]
        job.fit_loop.max_epochs = 2
        job.fit(model, classification())  # and not to the one after it
        assert strategy.figures()["plain_ddp"] != told
        return told, weights(model)

    (first, mine), (second, theirs) = run_launched(2, run)
    assert first == second == "it was faster before"
    assert equal(mine, theirs)


@pytest.mark.parametrize(("optimizer", "expected"), [("NAdam", 1), ("SGD", 0)])
def test_what_costs_accuracy_can_be_read(optimizer: str, expected: int) -> None:
    def run(rank: int) -> tuple[str, ...]:
        model = TinyClassifier(make=partial(getattr(torch.optim, optimizer), lr=0.01))
        strategy = SAFusionStrategy(memory="residual", select_by="gradient", **SPARSE)
        fit(strategy, model, limit_train_batches=2)
        return strategy.cautions

    cautions, _ = run_launched(2, run)
    assert len(cautions) == expected
    assert all("may end with a higher loss" in caution for caution in cautions)

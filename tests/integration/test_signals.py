"""Signals that arrive in the middle of a step of one rank: all ranks act on them before the same batch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

from lightning_safusion import ConstantDensity, SAFusionStrategy
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.comm.exchange import Notice
from lightning_safusion.fusion import build
from lightning_safusion.fusion.window import Notices
from lightning_safusion.integration.signals import DeferredSignals
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """Those that a test has installed are gone after it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ended(job: Trainer, *data: Any) -> str:
    """How a training ends: by SystemExit, for example, or what this version of Lightning ends a terminated run with."""
    try:
        job.fit(*data)
    except BaseException as error:
        return f"{type(error).__name__} {job.global_step}"
    return "ended"


class Signalled(TinyClassifier):
    """Rank 1 is asked to end during its backward pass of batch 7; every rank notes when it learns of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_after_backward(self) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.received_sigterm:
            torch.save(self.trainer.global_step, self.folder / f"heard{self.global_rank}.pt")


class WithAdamW(Signalled):
    """With an optimizer whose first steps send more."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Searches(LearningRateFinder):
    """A training inside of the training, which begins and ends as any other."""

    def on_fit_start(self, *args: Any) -> None:
        """Not yet."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lr_find(trainer, pl_module)


@pytest.mark.parametrize(
    ("model", "collective", "search"),
    [
        (Signalled, "allgather", False),
        (Signalled, "auto", False),
        (Signalled, "allgather", True),
        (WithAdamW, "auto", False),
    ],
)
def test_all_ranks_hear_of_it_before_the_same_batch(
    tmp_path: Path, model: type[Signalled], collective: Any, search: bool
) -> None:
    def train(rank: int) -> str:
        strategy = SAFusionStrategy(density=0.1, collective=collective)
        callbacks = [Searches(num_training_steps=4, update_attr=False)] if search else []
        job = trainer(strategy, callbacks=callbacks, default_root_dir=tmp_path)
        return ended(job, model(tmp_path), classification())

    run_launched(2, train)
    steps = [torch.load(tmp_path / f"heard{rank}.pt") for rank in range(2)]
    # told in the gradients of the next step, acted on before the batch after it
    assert steps == [10, 10]


class Interrupted(TinyClassifier):
    """Rank 1 is asked to end when gradients have been exchanged; all ranks note how much they know at the next stop."""

    def __init__(self, folder: Path, step: int | None) -> None:
        super().__init__()
        self.folder, self.step = folder, step

    def on_after_backward(self) -> None:
        engine = self.trainer.strategy.engine  # type: ignore[attr-defined]
        agreed = engine is not None and engine.planner.dense_for_good
        if self.global_rank == 1 and (agreed if self.step is None else self.trainer.global_step == self.step):
            os.kill(os.getpid(), signal.SIGTERM)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """What is measured does not matter."""

    def on_validation_epoch_start(self) -> None:
        self._note("validation")

    def on_train_batch_end(self, *args: Any) -> None:
        self._note("training")

    def on_fit_end(self) -> None:
        self._note("end")

    def _note(self, where: str) -> None:
        path = self.folder / f"{where}{self.global_rank}.pt"
        if self.trainer.received_sigterm and not path.exists():
            torch.save((self.trainer.global_step, self.trainer.strategy.engine is None), path)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("step", "where"),
    [(6, "validation"), (7, "validation"), (15, "end"), (None, "training")],
    ids=["known to all before validation", "known to one before validation", "at the end", "as plain DDP takes over"],
)
def test_where_no_gradients_carry_notices_ranks_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None, where: str
) -> None:
    costs = {"allgather": LinearCost(1.0, 1.0), "allreduce": LinearCost(1e-6, 1e-12)}
    monkeypatch.setattr(build, "calibrate", lambda transport, device: costs)

    def train(rank: int) -> str:
        strategy = SAFusionStrategy(density=ConstantDensity(0.05), collective="auto" if step is None else "allgather")
        job = trainer(strategy, max_epochs=2 if step else 4, limit_val_batches=1, num_sanity_val_steps=0)
        data = classification(640 if step is None else 256)  # batches of an epoch: 20, or 8
        return ended(job, Interrupted(tmp_path, step), data, data if where == "validation" else None)

    assert len(set(run_launched(2, train))) == 1
    first, second = (torch.load(tmp_path / f"{where}{rank}.pt") for rank in range(2))
    assert first == second
    assert first[1] or step is not None


@pytest.mark.usefixtures("own_handlers")
def test_handlers_are_put_back_and_nothing_is_swallowed() -> None:
    engine: Any = SimpleNamespace(notices=Notices())
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    deferred = DeferredSignals(lambda: engine)
    deferred.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert engine.notices.own == Notice.TERMINATE
    deferred.deliver()
    assert seen == []
    engine.notices.heard = Notice.TERMINATE
    deferred.deliver()
    assert seen == [signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGTERM)
    transport: Any = SimpleNamespace(gather_objects=lambda own: [own, []])
    deferred.hand_over(transport)  # no further step carries the news
    assert seen == [signal.SIGTERM, signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is mine
    seen.pop()
    deferred.install()
    transport.gather_objects = lambda own: [own, [signal.SIGTERM]]
    deferred.hand_over(transport)  # another rank has it
    assert seen == [signal.SIGTERM, signal.SIGTERM]
    deferred.install()
    os.kill(os.getpid(), signal.SIGTERM)
    deferred.remove()  # other ranks are gone, and a handler would wait for them
    assert seen == [signal.SIGTERM, signal.SIGTERM]


@pytest.mark.parametrize(
    ("environment", "deferred"),
    [
        (SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGHUP), True),
        (SLURMEnvironment(auto_requeue=False, requeue_signal=signal.SIGHUP), False),
        (LightningEnvironment(), False),
    ],
)
@pytest.mark.usefixtures("own_handlers")
def test_the_requeue_signal_is_the_cluster_environments(environment: Any, deferred: bool) -> None:
    engine: Any = SimpleNamespace(notices=Notices())
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    signals = DeferredSignals(lambda: engine, environment)
    signals.install()
    os.kill(os.getpid(), signal.SIGHUP)
    signals.remove()
    assert engine.notices.own == (Notice.REQUEUE if deferred else 0)


@pytest.mark.usefixtures("own_handlers")
def test_a_second_interrupt_ends_at_once_and_one_that_is_passed_on_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = SimpleNamespace(notices=Notices(), transport=SimpleNamespace(rank=1))
    now = iter([0.0, 0.5, 2.0])
    clock = SimpleNamespace(monotonic=lambda: next(now))  # not that of all modules: other threads look at it
    monkeypatch.setattr("lightning_safusion.integration.signals.time", clock)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    deferred = DeferredSignals(lambda: engine)
    deferred.install()
    os.kill(os.getpid(), signal.SIGINT)  # of the terminal
    os.kill(os.getpid(), signal.SIGINT)  # of the launcher
    assert engine.notices.own == Notice.INTERRUPT
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    engine.notices.heard = Notice.INTERRUPT
    with pytest.raises(KeyboardInterrupt):
        deferred.deliver()
    deferred.remove()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Stopped(Signalled):
    """Rank 1 gets a Ctrl-C in a backward pass."""

    def on_after_backward(self) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["allgather", "sharded"])
def test_what_is_saved_after_an_interrupt_has_the_residuals(tmp_path: Path, collective: Any) -> None:
    def train(rank: int) -> str:
        saves = OnExceptionCheckpoint(str(tmp_path), "stopped")
        strategy = SAFusionStrategy(density=0.1, collective=collective)
        job = trainer(strategy, callbacks=[saves], enable_checkpointing=True)
        return ended(job, Stopped(tmp_path), classification())

    ends = run_launched(2, train)
    assert len(set(ends)) == 1
    assert ends[0] != "ended"
    assert torch.load(tmp_path / "stopped.ckpt", weights_only=False)["safusion"]["engine"]["windows"] > 7
    assert len(list((tmp_path / "stopped.ckpt.safusion").iterdir())) == 2


def test_a_module_that_only_validates_installs_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    model: LightningModule = TinyClassifier()
    model.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]  # validates nothing
    trainer(SAFusionStrategy(), devices=1).validate(model, classification(), verbose=False)
    assert signal.getsignal(signal.SIGTERM) == before

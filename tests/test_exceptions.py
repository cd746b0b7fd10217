"""An error that ends training on one rank, or on all: it is the one that is seen, and what can be saved is saved."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint

from lightning_safusion import SAFusionStrategy
from lightning_safusion.comm.transport.torch_backend import TorchTransport
from lightning_safusion.integration import meeting
from tests.models import TinyClassifier, classification, fit, trainer
from tests.process_group import run_launched


class Fails(Callback):
    """Some ranks fail before batch 5, or the process of one ends."""

    def __init__(self, ranks: tuple[int, ...], dies: bool = False) -> None:
        self.ranks, self.dies = ranks, dies

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank in self.ranks and batch_idx == 5:
            if self.dies:
                os._exit(1)
            raise ArithmeticError("a bad sample")


class Keeps(OnExceptionCheckpoint):
    """Leaves its file when the trainer ends."""

    def teardown(self, *args: Any) -> None: ...


def strategy(collective: Any = "allgather") -> SAFusionStrategy:
    return SAFusionStrategy(density=0.05, collective=collective, timeout=timedelta(seconds=8))


def failed(callbacks: list[Callback], chosen: SAFusionStrategy) -> str:
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    with pytest.raises((ArithmeticError, RuntimeError)) as caught:
        fit(chosen, callbacks=callbacks, enable_checkpointing=saves)
    return type(caught.value).__name__


@pytest.mark.parametrize(("rank", "dies"), [(0, False), pytest.param(1, False, marks=pytest.mark.slow), (1, True)])
def test_rank_0_saves_what_plain_ddp_would_where_others_do_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, dies: bool
) -> None:
    monkeypatch.setattr(meeting, "_PATIENCE", 2.0)
    seen = tmp_path / "seen"
    seen.mkdir()

    def run(own: int) -> None:
        (seen / str(own)).write_text(failed([Fails((rank,), dies), Keeps(tmp_path)], strategy()))

    if dies:
        with pytest.raises(RuntimeError, match="died without a report"):
            run_launched(2, run)
    else:
        run_launched(2, run)
        assert (seen / str(rank)).read_text() == "ArithmeticError"
    assert dies or (seen / str(1 - rank)).read_text() == "WorkerLostError"
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert saved["global_step"] == 5
    assert "safusion" not in saved

    def resume(own: int) -> int:
        job = trainer(strategy(), max_steps=7)
        job.fit(TinyClassifier(), classification(), ckpt_path=tmp_path / "on_exception.ckpt")
        return job.global_step

    assert run_launched(2, resume) == [7, 7]


def test_residuals_are_saved_where_all_ranks_fail_alike(tmp_path: Path) -> None:
    def run(rank: int) -> str:
        saves = ModelCheckpoint(tmp_path, filename="last", save_on_exception=True, every_n_epochs=9)
        return failed([Fails((0, 1)), saves], strategy())

    assert run_launched(2, run) == ["ArithmeticError"] * 2
    (saved,) = tmp_path.glob("*.ckpt")
    assert torch.load(saved, weights_only=True)["safusion"]["engine"]["windows"] == 5
    assert len(list(Path(f"{saved}.safusion").iterdir())) == 2


def test_an_error_waits_for_no_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL destroys one only when all of its ranks do."""

    def run(rank: int) -> tuple[str, int, int]:
        made, destroyed = [], []
        split, destroy = TorchTransport.split, dist.destroy_process_group
        monkeypatch.setattr(TorchTransport, "split", lambda *args, **options: made.append(1) or split(*args, **options))
        monkeypatch.setattr(dist, "destroy_process_group", lambda *args: destroyed.append(1) or destroy(*args))
        return failed([Fails((0, 1))], strategy("sharded")), len(made), len(destroyed)

    for error, made, destroyed in run_launched(2, run):
        assert error == "ArithmeticError"
        assert made > 0
        assert destroyed == 0

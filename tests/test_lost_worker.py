"""A worker that is killed outside of a backward pass: the others are told what the job was doing, and end."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_safusion import SAFusionStrategy
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.transport.interface import WorkerLostError, during
from lightning_safusion.fusion.quota import Shares
from tests.models import TinyClassifier, fit
from tests.process_group import run_launched

PLACES = {
    "configure_model": "during the barrier 'set-up begins' of Lightning in step 0, epoch 0",
    "setup": "during the barrier 'post_setup' of Lightning in step 0, epoch 0",
    "configure_optimizers": "during set-up, when workers compare their settings",
    "on_train_epoch_start": "during the beginning of epoch 1, when workers compare their trainable parameters",
    "on_save_checkpoint": r"during .*(save|broadcast|barrier|wait).* in step \d+, epoch 0",
    "on_train_end": "during the end of training in step 4, epoch 2",
}


def kill_in(owner: Any, method: str, now: Callable[[], bool]) -> None:
    """Lets a call of a method of an object or a class kill this process, if it is time."""
    own = getattr(owner, method)

    def killing(*args: Any, **kwargs: Any) -> Any:
        if now():
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*args, **kwargs)

    setattr(owner, method, killing)


@pytest.mark.parametrize("hook", PLACES)
def test_the_others_are_told_what_the_job_was_doing(hook: str, tmp_path: Path) -> None:
    def run(rank: int) -> None:
        model = TinyClassifier()
        kill_in(model, hook, lambda: rank == 1 and (hook != "on_train_epoch_start" or model.current_epoch == 1))
        strategy = SAFusionStrategy(collective="allgather", timeout=timedelta(seconds=20))
        options = {"max_epochs": 2, "limit_train_batches": 2, "enable_checkpointing": True}
        fit(strategy, model, default_root_dir=tmp_path, **options)

    with pytest.raises(RuntimeError, match="rank 0 of 2 failed") as caught:
        run_launched(2, run)
    assert re.search(f"WorkerLostError: a worker was lost {PLACES[hook]}", str(caught.value))


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="^no room$") as caught, during("a step"):
        raise RuntimeError("no room")
    assert not isinstance(caught.value, WorkerLostError)
    with pytest.raises(WorkerLostError, match=r"lost during a step: .*\(store\)"), during("a step"):
        raise torch.distributed.DistStoreError("store")
    with pytest.raises(WorkerLostError, match="lost during a step: "), during("a job"), during("a step"):
        raise torch.distributed.DistStoreError("store")


@pytest.mark.parametrize("name", ["reduce", "all_gather"])
def test_what_lightning_reduces_has_a_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def lost(*args: Any, **kwargs: Any) -> None:
        raise torch.distributed.DistStoreError("gone")

    monkeypatch.setattr(DDPStrategy, name, lost)
    with pytest.raises(WorkerLostError, match="lost during an? .* of Lightning in set-up"):
        getattr(SAFusionStrategy(), name)(torch.ones(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "fails", "said"),
    [
        ((1,), False, r"rank 1 \(process \d+ on {host}\) has ended\."),
        ((0,), False, r"rank 0 \(process \d+ on {host}\) has ended(\.|, or does not answer: the store)"),
        ((1, 2), False, r"rank 1 \(process \d+ on {host}\) has ended; rank 2 \(process \d+ on {host}\) has ended\."),
        ((1,), True, r"rank 1 \(process \d+ on {host}\) has ended with ArithmeticError: a bad sample\."),
    ],
)
@pytest.mark.parametrize("collective", ["allgather", "sharded"])
def test_all_survivors_name_the_lost_workers(
    lost: tuple[int, ...], fails: bool, said: str, collective: str, tmp_path: Path
) -> None:
    workers = max(3, 2 + len(lost))

    class Losing(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank in lost and batch_idx == 3:
                if fails:
                    raise ArithmeticError("a bad sample")
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(batch, batch_idx)

    def run(rank: int) -> None:
        strategy = SAFusionStrategy(collective=collective, timeout=timedelta(seconds=6))
        with pytest.raises((WorkerLostError, ArithmeticError)) as caught:
            fit(strategy, Losing(), limit_train_batches=8, devices=workers)
        (tmp_path / str(rank)).write_text(f"{caught.type.__name__}: {caught.value}")

    with suppress(RuntimeError):  # processes that died without a report
        run_launched(workers, run)
    survivors = [rank for rank in range(workers) if rank not in lost]
    pattern = f"^WorkerLostError: .*{said.format(host=re.escape(socket.gethostname()))}"
    for rank in survivors:
        assert re.search(pattern, (tmp_path / str(rank)).read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "owner", "method", "place"),
    [
        ({"collective": "allgather", "quota": "shared"}, Shares, "review", "review of shared quotas after"),
        ({"collective": "sharded"}, ShardedExchange, "_pack", "exchange of the buffer with .* failed in step|during"),
        ({}, TinyClassifier, "training_step", "during|failed in step"),
        ({"system": "ddp"}, TinyClassifier, "training_step", "during"),
    ],
)
def test_every_wait_within_a_step_has_a_name(options: dict[str, Any], owner: type, method: str, place: str) -> None:
    def run(rank: int) -> None:
        calls = count()
        kill_in(owner, method, lambda: rank == 1 and next(calls) == 1)
        fit(SAFusionStrategy(timeout=timedelta(seconds=20), **options), limit_train_batches=8)

    with pytest.raises(RuntimeError, match=f"WorkerLostError: .*{place}"):
        run_launched(2, run)

"""A worker that is killed outside of a backward pass: the others are told what the job was doing, and end.

Covers: set-up, before and after the model is wrapped; the first gathering of an epoch; a save; the end, where
    the ranks meet; what is no failure of a process group stays as it is.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_safusion import SAFusionStrategy
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.transport.interface import WorkerLostError, during
from lightning_safusion.fusion.shares import Shares
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched

PLACES = {
    "setup": "during the barrier 'post_setup' of Lightning in step 0, epoch 0",
    "configure_optimizers": "during set-up, when workers compare their settings",
    "on_train_epoch_start": "during the beginning of epoch 1, when workers compare their trainable parameters",
    "on_save_checkpoint": r"during .*(save|broadcast|barrier|wait).* in step \d+, epoch 0",
    "on_train_end": "during the end of training in step 4, epoch 2",
}


class Killed(TinyClassifier):
    """A worker that is killed where a hook is called."""

    def __init__(self, hook: str, rank: int) -> None:
        super().__init__()
        own = getattr(self, hook)

        def killing(*args: Any, **kwargs: Any) -> Any:
            if rank == 1 and (hook != "on_train_epoch_start" or self.current_epoch == 1):
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*args, **kwargs)

        setattr(self, hook, killing)


@pytest.mark.parametrize("hook", PLACES)
def test_the_others_are_told_what_the_job_was_doing(hook: str, tmp_path: Path) -> None:
    def run(rank: int) -> None:
        strategy = SAFusionStrategy(collective="allgather", timeout=timedelta(seconds=20))
        options = {"max_epochs": 2, "limit_train_batches": 2, "enable_checkpointing": True}
        trainer(strategy, default_root_dir=tmp_path, **options).fit(Killed(hook, rank), classification())

    with pytest.raises(RuntimeError, match="rank 0 of 2 failed") as caught:
        run_launched(2, run)
    said = str(caught.value)
    assert "WorkerLostError: a worker was lost during" in said
    with pytest.raises(WorkerLostError, match=PLACES[hook]):
        raise WorkerLostError(said)


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="^no room$") as caught, during("a step"):
        raise RuntimeError("no room")
    assert not isinstance(caught.value, WorkerLostError)
    with pytest.raises(WorkerLostError, match=r"lost during a step: .*\(store\)"), during("a step"):
        raise torch.distributed.DistStoreError("store")
    with pytest.raises(WorkerLostError, match="lost during a step: "), during("a job"), during("a step"):
        raise torch.distributed.DistStoreError("store")


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
        own, calls = getattr(owner, method), count()

        def killing(*args: Any, **kwargs: Any) -> Any:
            if rank == 1 and next(calls) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*args, **kwargs)

        setattr(owner, method, killing)
        strategy = SAFusionStrategy(timeout=timedelta(seconds=20), **options)
        trainer(strategy, limit_train_batches=8).fit(TinyClassifier(), classification())

    with pytest.raises(RuntimeError, match=f"WorkerLostError: .*{place}"):
        run_launched(2, run)

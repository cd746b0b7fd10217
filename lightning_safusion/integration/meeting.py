"""Where all workers meet besides their exchanges: at the end of an epoch, and at a save that an error has caused."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_safusion.comm.transport.lockstep import Lockstep

# Seconds for the slowest rank: an error that all have, such as Ctrl-C, reaches them within a step.
_PATIENCE = 10.0
_POLL = 0.02
_NUMBERS = count()


class EpochEnd(Callback):
    """Has all workers meet before anything else at the end of an epoch, of which Lightning tells callbacks but not
    strategies. Metrics that are reduced would wait for ever for workers that have more batches, or be taken for their
    gradients.
    """

    def __init__(self) -> None:
        self._lockstep: Lockstep | None = None
        self._callbacks: list[Callback] = []

    def attach(self, trainer: Trainer, lockstep: Lockstep) -> None:
        """Becomes the first callback of the trainer."""
        self.detach()
        self._lockstep = lockstep
        self._callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning's callback connector
        self._callbacks.insert(0, self)

    def detach(self) -> None:
        """Undoes :meth:`attach`."""
        if self in self._callbacks:
            self._callbacks.remove(self)
        self._callbacks, self._lockstep = [], None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._lockstep is not None:
            self._lockstep.end_epoch(trainer.current_epoch, exhausted=not _is_stopped(trainer))


def more_batches(trainer: Trainer) -> bool | None:
    """Whether batches of this epoch follow the present one on this worker; None where all workers stop here."""
    return None if _is_stopped(trainer) else not trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def _is_stopped(trainer: Trainer) -> bool:
    """Whether an epoch ends before its last batch, on all workers alike."""
    return trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step


def all_present(step: int | None) -> bool:
    """Whether all ranks of the default process group come here after the same step; the same on all that come.

    Asked of the group's store. A collective would wait for ranks that are lost, and ranks that are still in an exchange
    would take it for a part of that.

    Args:
        step: After which step this rank comes; None in the middle of one: then they do not.
    """
    if not dist.is_available() or not dist.is_initialized():
        return True
    store: Any = dist.PrefixStore(f"safusion attendance {next(_NUMBERS)}", dist.distributed_c10d._get_default_store())
    ranks = [str(rank) for rank in range(dist.get_world_size())]
    try:
        found = "some"
        if step is not None:
            store.set(str(dist.get_rank()), str(step))
            until = time.monotonic() + _PATIENCE
            while not (come := store.check(ranks)) and not store.check(["found"]) and time.monotonic() < until:
                time.sleep(_POLL)
            if come and len({store.get(rank) for rank in ranks}) == 1:
                found = "all"
        return bool(store.compare_set("found", "", found) == b"all")  # what the first rank has found counts
    except RuntimeError:  # the store has gone with its rank
        return False

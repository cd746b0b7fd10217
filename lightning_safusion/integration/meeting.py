"""Where all workers meet besides their exchanges: process groups, collectives of Lightning, the end of an epoch, a save
after an error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor
from typing_extensions import override

from lightning_safusion.comm.transport.interface import during
from lightning_safusion.comm.transport.lockstep import Lockstep
from lightning_safusion.comm.transport.rounds import apart
from lightning_safusion.comm.transport.torch_backend import end_groups_at_exit, hurry_at_exit

# Seconds for the slowest rank: an error that all have, such as Ctrl-C, reaches them within a step.
_PATIENCE = 10.0
_POLL = 0.02
_NUMBERS = count()


class MeetingStrategy(ParallelStrategy):
    """Before a strategy of Lightning: where a worker is lost in one of its collectives, the error says in which."""

    _timeout: timedelta | None

    @property
    def _place(self) -> str:
        """Where training is, for messages."""
        module = self.lightning_module
        return f"step {module.global_step}, epoch {module.current_epoch}" if module is not None else "set-up"

    @contextmanager
    def _making_groups(self) -> Iterator[None]:
        """While Lightning makes the default process group, unless it was given."""
        given = dist.is_available() and dist.is_initialized()
        with apart(self._timeout):
            yield
        if not given:  # it is ours to end
            end_groups_at_exit()

    def _meet(self, what: str) -> None:
        """A barrier or a broadcast follows."""

    @override
    def barrier(self, name: str | None = None) -> None:
        with during(f"the barrier{f' {name!r}' if name else ''} of Lightning in {self._place}"):
            self._meet(f"barrier {name}")
            super().barrier(name)  # type: ignore[safe-super]  # that of Lightning's strategy

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        with during(f"a broadcast of Lightning in {self._place}"):
            self._meet("broadcast")
            return super().broadcast(obj, src)  # type: ignore[safe-super]  # the same

    @override
    def reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with during(f"a reduction of Lightning in {self._place}"):
            return super().reduce(tensor, *args, **kwargs)  # type: ignore[safe-super]  # the same

    @override
    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with during(f"an all-gather of Lightning in {self._place}"):
            return super().all_gather(tensor, *args, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        hurry_at_exit()
        super().on_exception(exception)


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


def between_batches(trainer: Trainer) -> bool:
    """Whether the latest batch has ended on this worker, with all callbacks that may stop it.

    Not in the validation that follows a batch: what comes later in it may stop this worker as well.
    """
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    return trainer.training and 0 < batches.ready == batches.completed


def validates(trainer: Trainer) -> bool:
    """Whether this worker validates after the latest batch."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


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

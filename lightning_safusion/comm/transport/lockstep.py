"""Whether all workers are at the same place of a job: what waits for ever is told from what is slow."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import count
from threading import Event, Lock, Thread
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_safusion.comm.transport.interface import during, find_lost_with, present_stage
from lightning_safusion.comm.transport.roster import Roster

_LOOK_S = 0.3  # a worker that has not moved for so long looks what others wait for
_SOON_S = 0.02
_STORE_S = 5e-3  # the store is asked no more often, by all workers together
_SLICE = timedelta(seconds=0.1)  # of a wait on the host, after which it asks whether it is in vain
_POLL_S = 2e-4  # where the backend has no such waits
_LEAVE_S = 2.0  # so long who knows of a failure stays for the others to learn of it
_ANSWER_S = 1.0  # so long the store is waited for, whose worker may be the lost one
_GRACE_S = 5.0  # so long a host may still wait for a device that waits for ever
#: Kind of a meeting that follows a batch, in the middle of an epoch or the last one.
VALIDATION = "the beginning of validation"
_EPOCH_END = "end of an epoch"
_ROW = 512  # bytes of a place in a meeting
_NUMBERS = count()


class OutOfStepError(RuntimeError):
    """Workers wait for each other in different places of the job, for ever: one has fewer batches, for example."""


@dataclass(frozen=True)
class _Place:
    """Where a worker is. It changes with every batch and every meeting."""

    rank: int
    batches: int  #: begun in this fit
    meetings: int  #: begun
    kind: str  #: of the meeting; empty in a batch
    where: str  #: a predicate, for messages
    exhausted: bool = False  #: it has run out of batches

    def conflicts(self, other: _Place) -> bool:
        """Whether two workers that have begun equally many meetings wait for each other in vain."""
        return (self.batches, self.kind) != (other.batches, other.kind)


def wait_watchfully(work: dist.Work, check: Callable[[], None], polls: bool = False) -> None:
    """Waits on the host until an operation has ended; meanwhile calls ``check``, whose errors end the wait.

    Args:
        work: The operation.
        check: Called every tenth of a second.
        polls: The backend has no wait with a time limit that leaves the operation as it is (NCCL).
    """
    while polls and not work.is_completed():
        time.sleep(_POLL_S)
        check()
    while True:
        try:
            work.wait() if polls else work.wait(_SLICE)
            return
        except RuntimeError:
            if polls or work.is_completed():
                break
        check()
    work.wait()  # it has failed, or ended since


class Lockstep:
    """Meetings of all workers between their gradient exchanges, on a process group of their own.

    Objects, barriers and broadcasts begin with a meeting. A worker in one, and another that has gone on to a further
    batch without it, wait for each other for ever: all workers of a program come to the same meetings after the same
    batches. A thread finds that out: where the worker does not move on, it asks the store of the process group what
    others wait for. Three times a second it looks there whether somebody asks who is lost (:class:`Roster`).

    Args:
        device: Where small tensors of the process group live.
        timeout: Of the group; None: the backend's.
        more: Whether batches of this epoch follow the present one on this worker; None where that is not known, or
            all workers stop here. Called on the thread, and where validation begins.
        between: Whether the present batch has ended on this worker, with all that may stop it. Called on the thread.
        validates: Whether this worker validates after the present batch. Called on the thread.
    """

    def __init__(
        self,
        device: torch.device,
        timeout: timedelta | None = None,
        more: Callable[[], bool | None] = lambda: None,
        between: Callable[[], bool] = lambda: False,
        validates: Callable[[], bool] = lambda: False,
    ) -> None:
        self.group: Any = dist.new_group(timeout=timeout)  #: of all processes, for objects and control messages
        self.error: OutOfStepError | None = None  #: once it is known that waiting is in vain
        store = dist.distributed_c10d._get_default_store()
        self._store: Any = dist.PrefixStore(f"safusion lockstep {next(_NUMBERS)}", store)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._polls = "cuda:nccl" in dist.get_backend_config(self.group)
        self._device = device if self._polls else torch.device("cpu")
        self._more, self._between, self._validates = more, between, validates
        self._epoch = self._batch = -1
        self._epoch_ended = False  # no batch of the next one has begun
        self._place = _Place(self._rank, 0, 0, "", "is before its first batch")
        self._thread: Thread | None = None
        self._lock = Lock()  # between the meetings and the end of the thread
        self._asked, self._answered, self._told, self._raised = Event(), Event(), Event(), Event()
        self._over, self._until = False, 0.0
        self._look_s = max(_LOOK_S, self._world_size * _STORE_S)
        self._silent = False  # the store has not answered: it is not asked again
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        keeper = f"the launcher on {os.environ.get('MASTER_ADDR')}" if agent else None
        self._roster = Roster(self._store, self._rank, self._world_size, keeper)
        self._start()

    @classmethod
    def of_all(
        cls,
        device: torch.device,
        timeout: timedelta | None,
        more: Callable[[], bool | None],
        between: Callable[[], bool],
        validates: Callable[[], bool],
    ) -> Lockstep | None:
        """One of all processes, collective; None in a process alone, or where the process group has no store."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        if dist.distributed_c10d._get_default_store() is None:
            return None
        return cls(device, timeout, more, between, validates)

    def __deepcopy__(self, memo: dict[int, Any]) -> Lockstep:
        return self  # of a strategy that is copied: a process has one place

    def begin_batch(self, epoch: int, batch: int) -> None:
        """A batch begins, the ``batch``-th of an epoch, from 0. Raises as :meth:`check`."""
        self.check()  # Lightning drops errors of what it broadcasts between two batches
        self._epoch, self._batch, self._epoch_ended = epoch, batch, False
        place = self._place
        where = f"is in batch {batch + 1} of epoch {epoch}"
        self._place = replace(place, batches=place.batches + 1, kind="", where=where, exhausted=False)
        if self._thread is None:
            self._start()

    def end_epoch(self, epoch: int, exhausted: bool) -> None:
        """An epoch has ended; ``exhausted``: for want of batches. Collective; raises as :meth:`meet`."""
        batches = self._batch + 1 if self._epoch == epoch else 0
        with during(f"the end of epoch {epoch}, after {batches} batches"):
            self._meet(_EPOCH_END, f"has ended epoch {epoch} after {batches} batches", exhausted)
        self._epoch_ended = True

    def meet(self, kind: str) -> None:
        """Waits until all workers have come to a meeting of this kind. Collective.

        Raises:
            OutOfStepError: If some are, for ever, somewhere else.
            WorkerLostError: If one has ended.
        """
        batch = f"after batch {self._batch + 1} of epoch {self._epoch}"
        where = f"is at {present_stage() or kind}, {batch if self._batch >= 0 else 'before the first batch'}"
        last = kind == VALIDATION and self._batch >= 0 and self._more_batches() is False
        self._meet(kind, f"{where}, its last" if last else where, last)

    def _meet(self, kind: str, where: str, exhausted: bool = False) -> None:
        with self._lock:
            if self.error is not None:
                self._raise()
            place = self._place
            mine = replace(place, meetings=place.meetings + 1, kind=kind, where=where, exhausted=exhausted)
            self._place = mine
        with self.explained():
            table, work = self._gather(mine)
            wait_watchfully(work, self.check, self._polls)
        places = [_Place(**json.loads(bytes(line))) for line in table.tolist()]
        other = next((each for each in places if each.conflicts(places[0])), None)
        with self._lock:
            if other is not None or self.error is not None:
                self.error = self.error or OutOfStepError(_description([places[0], other or mine]))
                self._raise()
            self._place = replace(mine, kind="", where=f"has left the {kind}", exhausted=False)

    def _gather(self, place: _Place) -> tuple[Tensor, dist.Work]:
        row = torch.tensor(list(_as_row(place)), dtype=torch.uint8, device=self._device)
        table = row.new_empty(self._world_size, _ROW)
        work: Any = dist.all_gather(list(table), row, group=self.group, async_op=True)
        return table, work

    def check(self) -> None:
        """Raises the OutOfStepError, once all workers have been told, or have had the time for it."""
        if self.error is not None and (self._told.is_set() or time.monotonic() > self._until):
            self._raise()

    def _raise(self) -> NoReturn:
        self._raised.set()
        raise OutOfStepError(str(self.error))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Errors of a process group that follow from an OutOfStepError of another worker become one as well."""
        try:
            yield
        except OutOfStepError:
            raise
        except RuntimeError as error:
            if self.error is None and not self._silent and self._thread is not None and self._thread.is_alive():
                # not asked here: a store that does not answer must not keep the error back
                self._answered.clear()
                self._asked.set()
                self._silent = not self._answered.wait(_ANSWER_S)
            if self.error is not None:
                self._raised.set()
                raise OutOfStepError(str(self.error)) from error
            raise

    def _start(self) -> None:
        find_lost_with(self._lost)
        self._over = False
        self._thread = Thread(target=self._watch, name="safusion-lockstep", daemon=True)
        self._thread.start()

    def _lost(self) -> str:
        self._roster.ask()
        self._asked.set()
        said = self._roster.lost(wait=not self._silent)
        self._silent |= not self._roster.known
        return said

    def leave(self, error: BaseException) -> None:
        """Tells the other workers of an error that ends this one; waits a second at most."""
        if self._thread is not None and self._thread.is_alive():
            self._roster.leave(error)
            self._asked.set()
            self._roster.wait_left()

    def rest(self) -> None:
        """Ends the thread, until the next batch."""
        find_lost_with(None)  # it would keep the store, and its port
        thread, self._thread = self._thread, None
        self._over = True
        self._asked.set()
        if thread is not None:
            thread.join(_LOOK_S)

    def close(self) -> None:
        """Ends the thread and destroys the group. May wait for the other workers."""
        self.rest()
        if dist.is_initialized():  # else it was destroyed with the default group
            dist.destroy_process_group(self.group)

    def _watch(self) -> None:
        seen = None
        with suppress(RuntimeError):  # the store has gone with its worker
            while self.error is None:
                # at first soon: who keeps the store must be known before it goes
                asked = self._asked.wait(self._look_s if self._roster.complete else _SOON_S)
                self._asked.clear()
                if self._over:
                    break
                self._roster.look()
                place, seen = seen, self._place
                if seen.batches and (place is seen or asked):
                    self._look(seen)
                self._answered.set()
        if not self._over and self.error is None:
            self._roster.store_has_gone()
        self._answered.set()

    def _look(self, mine: _Place) -> None:
        """Looks whether this worker, which does not move, waits in vain, and tells others where it waits."""
        more = None if mine.kind else self._more_batches()
        if more is False:
            mine = replace(mine, where=f"{mine.where}, its last", exhausted=True)
        if mine.kind or mine.exhausted:
            self._store.set("waiting", json.dumps(asdict(mine)))
        elif self._store.check(["waiting"]):
            other = _Place(**json.loads(self._store.get("waiting")))
            meets = other.meetings == mine.meetings + 1
            longer = bool(more) and mine.batches == other.batches and self._goes_on(other)
            if longer:
                mine = replace(mine, where=f"has more batches after batch {self._batch + 1} of epoch {self._epoch}")
            if (meets and mine.batches > other.batches) or (longer and (meets or other.meetings == mine.meetings)):
                self._store.compare_set("failure", "", _description([other, mine]))
        if self._store.check(["failure"]):
            self._fail(self._store.get("failure").decode(), mine)

    def _more_batches(self) -> bool | None:
        # all have ended the epoch: what is left of the next one says nothing of the batches before
        return None if self._epoch_ended else self._more()

    def _goes_on(self, other: _Place) -> bool:
        """Whether this worker, which has more batches, goes on to the next one, and ``other`` does not."""
        if other.kind == VALIDATION:  # all validate, in the middle of an epoch
            return self._between() and not self._validates()
        return other.exhausted or (other.kind == _EPOCH_END and self._between())

    def _fail(self, description: str, mine: _Place) -> None:
        with self._lock:
            if self.error is not None:
                return
            waits = bool(self._place.kind)
            if f"rank {self._rank} " not in description:
                description += f" (This is rank {self._rank}: it {self._place.where}.)"
            self._until = time.monotonic() + _LEAVE_S
            self.error = OutOfStepError(description)
        if self._polls:
            self._end()
        elif not waits:
            # an operation that is left alone would keep the others from ending their process groups
            wait_watchfully(self._gather(mine)[1], self.check)
            self._told.set()

    def _end(self) -> None:
        """Ends a process whose host waits for a device that waits for ever, as the watchdog of NCCL would later."""
        if not self._raised.wait(_GRACE_S):
            print(f"OutOfStepError: {self.error}", file=sys.stderr, flush=True)
            os._exit(1)


def _as_row(place: _Place) -> bytes:
    texts = {"kind": place.kind[:64], "where": place.where[:240]}
    plain = {key: re.sub(r'[^ -~]|["\\]', "?", text) for key, text in texts.items()}
    return json.dumps(asdict(place) | plain).encode().ljust(_ROW)


def _description(places: list[_Place]) -> str:
    named = "; ".join(f"rank {place.rank} {place.where}" for place in sorted(places, key=lambda place: place.rank))
    if any(place.exhausted for place in places):
        cause = (
            "The numbers of batches differ between workers: let the strategy make them equal (uneven_inputs='join' or "
            "'stop'), or give all the same, with a sampler that pads or drops the rest (DistributedSampler) or with "
            "limit_train_batches."
        )
    elif any(place.kind == _EPOCH_END for place in places) or {place.kind for place in places} == {VALIDATION, ""}:
        cause = (
            "One was told to stop (trainer.should_stop): tell all of them, for example what "
            "trainer.strategy.reduce_boolean_decision returns. Or val_check_interval is "
            "a time: give a number of batches."
        )
    else:
        cause = "Barriers, broadcasts and saves are for all workers: call none on some of them only."
    return f"workers wait for each other in different places: {named}. {cause}"

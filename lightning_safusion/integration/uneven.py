"""Workers with different numbers of batches: all stop with the first, or go on until the last one has none left."""

from __future__ import annotations

import copy
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import count
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len

from lightning_safusion.comm.transport.lockstep import wait_watchfully

#: What happens where workers have different numbers of batches.
UnevenInputs = Literal["error", "stop", "join"]

# What a worker has for the next batch: one of its own, one to repeat, or neither.
_OWN, _REPEATED, _NEITHER = 2, 1, 0
_NOTHING: Any = object()
_NO_LENGTH = -1
_COUNT = "the count of all workers' batches"


class Team:
    """Small numbers and borrowed batches, among all workers of a fit: a gloo group of its own. Collective.

    Args:
        timeout: Of the group; None: the backend's.
        check: Called during waits; its errors end them.
        exchanging: Names where a worker was lost.
    """

    def __init__(
        self,
        timeout: timedelta | None,
        check: Callable[[], None],
        exchanging: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        # not on the device: its numbers would be waited for there
        self._group: Any = dist.new_group(timeout=timeout, backend="gloo")
        self._check, self._exchanging = check, exchanging
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, value: int, what: str) -> Callable[[], list[int]]:
        """Begins to gather a number of every worker; the result waits, and has them by rank."""
        table, row = torch.empty(self.size, 1, dtype=torch.int64), torch.tensor([value], dtype=torch.int64)
        work: Any = dist.all_gather(list(table), row, group=self._group, async_op=True)

        def wait() -> list[int]:
            with self._exchanging(what):
                wait_watchfully(work, self._check)
            return table.view(-1).tolist()

        return wait

    def lend(self, batch: Any, source: int) -> Any:
        """The batch of one worker.

        Raises:
            RuntimeError: On all workers, if it cannot be pickled.
        """
        box: list[Any] = [None, None]
        if self.rank == source:
            try:
                box = [pickle.dumps(batch), None]
            except Exception as error:
                box = [None, f"{type(error).__name__}: {error}"]
        with self._exchanging("the copy of a batch for a worker that has none"):
            dist.broadcast_object_list(box, src=source, group=self._group)
        copied, problem = box
        if problem is not None:
            raise RuntimeError(
                f"A batch of rank {source} cannot be copied to a worker that has none ({problem}): give every worker a "
                "batch, or batches that can be pickled."
            )
        return pickle.loads(copied)  # noqa: S301  # of a worker of this job, as torch's own objects

    def __deepcopy__(self, memo: object) -> Team:
        return self

    def close(self) -> None:
        """Destroys the group. May wait for the other workers."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


def uneven_loader(loader: Iterable[Any], team: Team, joins: bool) -> UnevenLoader:
    """An :class:`UnevenLoader` that has a state if the loader has one. Collective."""
    # Lightning looks for the methods without asking __getattr__
    kind = _StatefulLoader if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") else UnevenLoader
    return kind(loader, team, joins)


def _is_sure(loader: Iterable[Any]) -> bool:
    """Whether the length of a loader is the number of its batches, in all epochs: samplers of others may change."""
    if isinstance(loader, (list, tuple)):
        return True
    parts = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    # a collate function of the user's may give None, for a batch of which nothing is left
    made = [type(part) for part in parts] + [getattr(loader, "collate_fn", None)]
    known = all(str(getattr(part, "__module__", "")).split(".")[0] in ("torch", "lightning") for part in made)
    return known and not has_iterable_dataset(loader) and not hasattr(loader, "load_state_dict")


class UnevenLoader:
    """The batches of a loader on this worker, as many as there are on all; its other attributes are the loader's.

    Making one is collective. So is every batch, unless all workers know how many they have.

    Args:
        loader: Of this worker: anything that can be iterated.
        team: All workers.
        joins: Go on until no worker has a batch of its own: a worker that has none left repeats its last one, and a
            worker that never had any gets one of another. If not, all stop before the first batch that some worker
            does not have.
    """

    lengths: Sequence[int] | None  #: batches of every worker; None where some worker does not know its own
    own: Iterable[Any]  #: the loader
    begun: bool  #: it has been iterated
    _released: bool  # only the loader's own batches
    _team: Team
    _joins: bool
    _counts: bool  # the lengths say who has a batch
    _last: Any  # batch of this worker
    _having: deque[list[bool]]  # by rank, of the batches that have been fetched, and not been asked for
    _ended: bool  # after its last batch

    def __init__(self, loader: Iterable[Any], team: Team, joins: bool) -> None:
        self.own, self._team, self._joins = loader, team, joins
        self.begun = self._released = False
        length = sized_len(loader)
        lengths = team.gather(_NO_LENGTH if length is None else length, _COUNT)()
        self.lengths = None if _NO_LENGTH in lengths else lengths
        self._counts = self.lengths is not None and all(team.gather(int(_is_sure(loader)), _COUNT)())
        self._last, self._having, self._ended = _NOTHING, deque(), False

    def __getattr__(self, name: str) -> Any:
        if name in UnevenLoader.__annotations__:  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in UnevenLoader.__annotations__:
            super().__setattr__(name, value)
        else:  # Lightning sets how workers begin, and forgets iterators
            setattr(self.own, name, value)

    def __len__(self) -> int:
        if self._released:
            return len(self.own)  # type: ignore[arg-type]  # a TypeError is what is wanted
        if self.lengths is None:
            raise TypeError("some worker does not know how many batches it has")
        return max(self.lengths) if self._joins else min(self.lengths)

    def __iter__(self) -> Iterator[Any]:
        self.begun = True
        if self._released:
            return iter(self.own)
        # one that is begun anew when it has ended belongs to a longer one: the batch before may still be asked for
        if not self._ended:
            self._having.clear()
        self._ended = False
        batches = iter(self.own)
        # Lightning would skip None on this worker alone
        return self._batches((batch for batch in batches if batch is not None) if self._joins else batches)

    def having(self) -> list[bool] | None:
        """Which workers have a batch of their own, by rank: of the oldest batch that this was not asked of; None where
        there is none, since all have ended."""
        return self._having.popleft() if self._having else None

    def release(self) -> None:
        """The fit has ended: the loader is one of this worker again."""
        self._released = True

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for number in count():
            if self._counts and number == len(self):
                break
            batch, states = self._next(batches, number)
            having = [state == _OWN for state in states]
            if not any(having) or not (self._joins or all(having)):
                break
            if _NEITHER in states:
                lent = self._team.lend(batch, states.index(_OWN))
                self._last = lent if states[self._team.rank] == _NEITHER else self._last
            if batch is _NOTHING:
                batches = iter(())  # some begin anew when they are asked again
                batch = copy.copy(self._last)
            elif self._joins:
                self._last = copy.copy(batch)  # which a training step may take apart
            if batch is not None:  # else Lightning skips it
                self._having.append(having)
            yield batch
        self._ended = True

    def _next(self, batches: Iterator[Any], number: int) -> tuple[Any, list[int]]:
        """This worker's batch or nothing, and what all workers have."""
        rank = self._team.rank
        if not self._counts or self.lengths is None:
            batch = next(batches, _NOTHING)
            state = _OWN if batch is not _NOTHING else _NEITHER if self._last is _NOTHING else _REPEATED
            return batch, self._team.gather(state, "the count of workers that have another batch")()
        batch = next(batches, _NOTHING) if number < self.lengths[rank] else _NOTHING
        if batch is _NOTHING and number < self.lengths[rank]:
            raise RuntimeError(
                f"The training dataloader of rank {rank} has a length of {self.lengths[rank]}, and only {number} "
                "batches: its sampler has another length than it says."
            )
        absent = _REPEATED if number else _NEITHER
        return batch, [_OWN if number < length else absent for length in self.lengths]


class _StatefulLoader(UnevenLoader):
    def state_dict(self) -> dict[str, Any]:
        """That of the loader, which knows nothing of repeated batches."""
        state: dict[str, Any] = self.own.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes one of :meth:`state_dict`."""
        self.own.load_state_dict(state_dict)  # type: ignore[attr-defined]

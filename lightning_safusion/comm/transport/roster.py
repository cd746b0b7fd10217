"""Who the workers of a job are, and which of them are lost: what survivors can name in their errors."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

# An error waits no longer for the names.
_PATIENCE_S = 1.0
_POLL_S = 0.02
_UNKNOWN = "it has ended, or does not answer"
_SHOWN = 8


@dataclass(frozen=True)
class _Worker:
    rank: int
    process: int
    host: str
    space: int  #: of the numbers of processes: containers have their own

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"

    def is_gone(self, seen_by: _Worker) -> bool:
        """Whether its process has ended; False where ``seen_by`` cannot know."""
        if (self.host, self.space) != (seen_by.host, seen_by.space) or not self.space:
            return False
        try:
            return Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True


class Roster:
    """The workers of a job in the store of its process group, where those that are left answer when one is lost.

    A worker whose collective has failed asks; a thread of every other worker answers (:meth:`look`), and finds out
    itself who does not: so that all know it when the first of them ends, and the store with it.

    Args:
        store: Shared by all workers, of this roster alone.
        rank: This worker.
        world_size: Workers.
        keeper: Who ends with the store; None: rank 0.
    """

    def __init__(self, store: Any, rank: int, world_size: int, keeper: str | None = None) -> None:
        self._store, self._world_size, self._keeper = store, world_size, keeper
        self._me = _Worker(rank, os.getpid(), socket.gethostname(), _process_space())
        self._first = self._me if rank == 0 else None
        self._asked, self._known = Event(), Event()
        self._reason: str | None = None  # why this worker ends
        self._left = Event()
        self._verdict = ""
        store.set(f"worker {rank}", json.dumps(asdict(self._me)))

    # What a worker calls that has failed

    def ask(self) -> None:
        """Has the thread find out who is lost."""
        self._asked.set()

    @property
    def known(self) -> bool:
        """Whether it has been found out who is lost."""
        return self._known.is_set()

    def lost(self, wait: bool = True) -> str:
        """A clause about the workers that are lost, after :meth:`ask`.

        Args:
            wait: For a second at most; not where the store is known not to answer.
        """
        if self._known.wait(_PATIENCE_S if wait else 0.0) or self._keeper is None and not self._me.rank:
            return self._verdict or _UNKNOWN
        return f"{_UNKNOWN}, nor does the store of the job, which {self._keeper or self._first or 'rank 0'} keeps"

    def leave(self, error: BaseException) -> None:
        """This worker is going to end with an error of its own; the thread tells."""
        lines = str(error).strip().splitlines()
        self._reason = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__

    def wait_left(self) -> None:
        """Waits until that has been told, at most a second."""
        self._left.wait(_PATIENCE_S)

    # What the thread calls

    @property
    def complete(self) -> bool:
        """Whether it is known who keeps the store."""
        return self._first is not None

    def look(self) -> None:
        """Answers, and finds out who is lost, where that has been asked; raises RuntimeError if the store has gone."""
        if self._first is None and self._store.check(["worker 0"]):
            self._first = self._worker(0)
        if self._reason is not None and not self._left.is_set():
            self._store.set(f"ended {self._me.rank}", self._reason)
            self._left.set()
        if self._known.is_set():
            return
        if not self._asked.is_set() and not self._store.check(["lost"]):
            return
        self._store.set(f"answer {self._me.rank}", "here")
        self._store.set("lost", "asked")
        self._find()

    def store_has_gone(self) -> None:
        """What is known without the store is all that there will be."""
        keeper = self._keeper or self._first or "rank 0"
        self._verdict = self._verdict or (
            f"{keeper} has ended, or does not answer: the store of the job, which it keeps, has gone"
        )
        self._known.set()

    def _find(self) -> None:
        """Waits until all have answered whose processes may be there, or until somebody else knows."""
        silent = {rank: self._worker(rank) for rank in range(self._world_size) if rank != self._me.rank}
        until, late = time.monotonic() + 0.9 * _PATIENCE_S, False
        while not late and not self._store.check(["verdict"]):
            late = time.monotonic() > until
            silent = {rank: worker for rank, worker in silent.items() if not self._store.check([f"answer {rank}"])}
            gone = {rank: worker for rank, worker in silent.items() if self._is_gone(rank, worker)}
            self._verdict = self._named(silent if late else gone, gone)
            if len(gone) == len(silent):
                break
            time.sleep(_POLL_S)
        found = self._verdict or "all workers answer, so that a link between them may have failed"
        # the same words on all ranks
        self._verdict = self._store.compare_set("verdict", "", found).decode(errors="replace")
        self._known.set()

    def _is_gone(self, rank: int, worker: _Worker | None) -> bool:
        """Whether it is known that a worker has ended, or is about to."""
        return (worker is not None and worker.is_gone(self._me)) or bool(self._store.check([f"ended {rank}"]))

    def _named(self, lost: Mapping[int, _Worker | None], gone: Container[int]) -> str:
        clauses = []
        for rank, worker in list(lost.items())[:_SHOWN]:
            state = "has ended" if rank in gone else "has ended, or does not answer"
            if self._store.check([f"ended {rank}"]):
                state = f"has ended with {self._store.get(f'ended {rank}').decode(errors='replace')}"
            clauses.append(f"{worker or f'rank {rank}'} {state}")
        more = len(lost) - len(clauses)
        return "; ".join(clauses) + (f"; and {more} more" if more else "")

    def _worker(self, rank: int) -> _Worker | None:
        key = f"worker {rank}"
        return _Worker(**json.loads(self._store.get(key))) if self._store.check([key]) else None


def _process_space() -> int:
    """0 where that is not known."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0

"""Worker processes that may be killed, stopped or lost: how each has ended, when, and what it has said."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_safusion.tools.team import Place, die_with_parent

_POLL_S = 0.02
_SHOWN = 2000
_HIT = "hit"


@dataclass(frozen=True)
class End:
    """How a worker has ended.

    Args:
        rank: Of it.
        code: Its exit code, negative for a signal; None: it hung, and was killed.
        at: ``time.monotonic()`` when it had ended.
        told: What its work has told.
        raised: Class of the exception that ended it, and of its bases; empty if none did.
        said: The message of that exception.
    """

    rank: int
    code: int | None
    at: float
    told: Mapping[str, Any] = field(default_factory=dict)
    raised: Sequence[str] = ()
    said: str = ""

    @property
    def how(self) -> str:
        """In a word."""
        if self.code is None:
            return "hung"
        if self.code < 0:
            return signal.Signals(-self.code).name
        return self.raised[0] if self.raised else "finished" if self.code == 0 else f"exit code {self.code}"


@dataclass(frozen=True)
class Job:
    """Workers of one job, on this machine.

    Args:
        work: Called in each process with its rank, and a table for plain values to tell, however it ends.
        workers: How many.
        nodes: On so many pretended nodes, equally.
        folder: For logs, results, and the moment of the attack.
        place: Where they run; None: joined by the loopback.
    """

    work: Callable[[int, dict[str, Any]], None]
    workers: int
    folder: Path
    nodes: int = 1
    place: Place | None = None

    def run(
        self, limit: float, after: float = 30.0, victims: Sequence[int] = (), tick: Callable[[], None] | None = None
    ) -> list[End]:
        """Runs the job until all workers have ended; none is left behind in any case.

        Args:
            limit: Seconds for all of it, after which workers that are left have hung.
            after: The same, from the attack on.
            victims: Workers that the attack may stop: they are killed once the others have ended.
            tick: Called all the time meanwhile.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / _HIT).unlink(missing_ok=True)
        place = self.place or Place(self.workers)
        running: dict[int, int] = {}  # rank by process
        codes: dict[int, tuple[int | None, float]] = {}
        until = time.monotonic() + limit
        try:
            for rank, variables in enumerate(place.environment()):
                running[self._start(rank, place, variables)] = rank
            while set(running.values()) - set(victims) and time.monotonic() < until:
                self._reap(running, codes)
                if tick is not None:
                    tick()
                if (hit := hit_at(self.folder)) is not None:
                    until = min(until, hit + after)
                time.sleep(_POLL_S)
            self._reap(running, codes)
        finally:
            for process, rank in running.items():
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                codes[rank] = (-signal.SIGKILL if rank in victims else None), time.monotonic()
        return [self._end(rank, *codes[rank]) for rank in sorted(codes)]

    def _reap(self, running: dict[int, int], codes: dict[int, tuple[int | None, float]]) -> None:
        for process in list(running):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[running.pop(process)] = os.waitstatus_to_exitcode(status), time.monotonic()

    def _end(self, rank: int, code: int | None, at: float) -> End:
        path = self.folder / f"result{rank}.json"
        with suppress(OSError, ValueError):
            return End(rank, code, at, **json.loads(path.read_text()))
        return End(rank, code, at)

    def _start(self, rank: int, place: Place, variables: Mapping[str, str]) -> int:
        (self.folder / f"result{rank}.json").unlink(missing_ok=True)
        # an interrupt between the fork and the note of its process would leave it behind
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            process = os.fork()
            if process == 0:
                self._live(rank, place, variables)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        return process

    def _live(self, rank: int, place: Place, variables: Mapping[str, str]) -> NoReturn:
        """All that a worker does."""
        code = 1
        try:
            os.setpgid(0, 0)  # the terminal's Ctrl-C is for the command
            die_with_parent()
            atexit._clear()  # what the parent does when it exits
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            _write_to(self.folder / f"log{rank}.txt")
            per_node = self.workers // self.nodes
            if self.place is None:
                variables = {**variables, "NODE_RANK": str(rank // per_node), "LOCAL_RANK": str(rank % per_node)}
            os.environ.update(variables)
            rank_zero_only.rank = rank  # type: ignore[attr-defined]  # known before the environment was
            place.enter(rank)
            torch.set_num_threads(1)
            code = self._work(rank)
            threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter ends
            atexit._run_exitfuncs()
        finally:
            os._exit(code)

    def _work(self, rank: int) -> int:
        code = 0
        told: dict[str, Any] = {}
        end: dict[str, Any] = {"told": told}
        try:
            self.work(rank, told)
        except BaseException as error:
            traceback.print_exc()
            names = [kind.__name__ for kind in type(error).__mro__]
            end |= {"raised": names, "said": str(error)[:_SHOWN]}
            code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        (self.folder / f"result{rank}.json").write_text(json.dumps(end))
        return code


def _write_to(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)


def mark_hit(folder: Path) -> None:
    """Notes that the attack happens now; called in a worker."""
    temporary = folder / f"{_HIT}.tmp"
    temporary.write_text(repr(time.monotonic()))
    temporary.replace(folder / _HIT)


def hit_at(folder: Path) -> float | None:
    """When the attack happened, ``time.monotonic()``; None if it has not."""
    with suppress(FileNotFoundError):
        return float((folder / _HIT).read_text())
    return None

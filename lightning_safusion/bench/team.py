"""The processes of a benchmark: where they run, how they are started, asked and ended."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, cast

import torch

from lightning_safusion.bench.links import Namespace
from lightning_safusion.bench.workers import Block

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass(frozen=True)
class Place:
    """Where the workers are.

    Args:
        workers: How many.
        machines: A machine for each, with links of a given rate; none: the loopback of this one.
    """

    workers: int
    machines: tuple[Namespace, ...] = ()

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """Variables by which the workers find each other."""
        return {
            "MASTER_ADDR": self.machines[0].address if self.machines else "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(self.workers),
            "NODE_RANK": str(rank),
            "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": "eth0" if self.machines else "lo",
        }

    def port(self, number: int) -> int:
        """A free port of the first worker for the team with this number; any will do on a machine of its own."""
        if self.machines:
            return 29500 + number
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])


@dataclass(eq=False)
class Team:
    """The processes of one system and the pipes to them, in rank order; all that they print is in the log."""

    system: str
    processes: list[ForkProcess]
    pipes: list[Connection]
    log: Path

    def train(self, steps: int) -> list[Block]:
        """Has all workers train some steps, and waits for the block of each; errors as in :meth:`collect`."""
        for pipe in self.pipes:
            pipe.send(steps)
        return self.collect()

    def finish(self) -> list[Any]:
        """Tells the workers that all turns are over, and waits for what they hand in; errors as in :meth:`collect`."""
        for pipe in self.pipes:
            pipe.send(None)
        return self.collect()

    def collect(self) -> list[Any]:
        """The next answer of each worker, in rank order.

        Raises:
            RuntimeError: As soon as one has failed; names the log.
        """
        answers: dict[int, Any] = {}
        while len(answers) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            for pipe in wait(list(waiting)):
                if isinstance(pipe, Connection):
                    answers[waiting[pipe]] = self._receive(pipe)
        return [answers[rank] for rank in range(len(self.pipes))]

    def events(self) -> Iterator[Any]:
        """What the workers say, as it comes, until each of them has sent None; errors as in :meth:`collect`."""
        talking: list[Any] = list(self.pipes)
        while talking:
            for pipe in wait(talking):
                answer = self._receive(cast(Connection, pipe))
                if answer is None:
                    talking.remove(pipe)
                else:
                    yield answer

    def _receive(self, pipe: Connection) -> Any:
        try:
            answer = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"a worker of {self.system!r} has died: see {self.log}") from None
        if isinstance(answer, Failed):
            last = answer.trace.strip().splitlines()[-1]
            raise RuntimeError(f"a worker of {self.system!r} failed: {last} (all of it is in {self.log})")
        return answer

    def end(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


@dataclass(frozen=True)
class Failed:
    """A worker has raised; ``trace`` is the traceback."""

    trace: str


@contextmanager
def started(system: str, place: Place, log: Path, port: int, work: Callable[[int, Connection], None]) -> Iterator[Team]:
    """Forks the workers of a system, and ends them with the block. The process should have no other thread.

    Args:
        system: Its name.
        place: Where they run.
        log: Takes all that they print.
        port: Of the first of them, where they find each other.
        work: Called in each process with its rank and the pipe to this one.
    """
    context = multiprocessing.get_context("fork")
    team = Team(system, [], [], log)
    try:
        for rank in range(place.workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_child, args=(rank, place, log, port, theirs, work), name=f"{system}-{rank}"
            )
            team.pipes.append(ours)
            process.start()
            team.processes.append(process)
            theirs.close()
        yield team
    finally:
        team.end()


def _child(
    rank: int, place: Place, log: Path, port: int, pipe: Connection, work: Callable[[int, Connection], None]
) -> None:
    _end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler is for what the parent has made
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)  # the parent's may be redirected
    try:
        os.environ.update(place.environment(rank, port))
        if place.machines:
            place.machines[rank].enter()
        # one thread each, or the workers fight for the cores; denormals slow small networks down up to three times
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        work(rank, pipe)
    except BaseException:
        trace = traceback.format_exc()
        print(trace, flush=True)
        pipe.send(Failed(trace))
    os._exit(0)  # nothing of the parent's is to be cleaned up here


def _end_with_parent() -> None:
    """A driver that is killed leaves no worker behind (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

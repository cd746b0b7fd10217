"""Worker processes: where they run, how they are started, asked and ended, and the trainer of each."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import Strategy

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass(frozen=True)
class Place:
    """Where so many workers run: on this machine, joined by the loopback."""

    workers: int

    def environment(self) -> list[dict[str, str]]:
        """Variables of each worker, for one process group of all of them."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return self._environment("127.0.0.1", "lo", int(probe.getsockname()[1]))

    def _environment(self, address: str, device: str, port: int) -> list[dict[str, str]]:
        common = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(self.workers),
            "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": device,
            "OMP_NUM_THREADS": "1",  # otherwise Lightning gives a node with one device all cores
        }
        return [{**common, "NODE_RANK": str(rank)} for rank in range(self.workers)]

    def enter(self, rank: int) -> None:
        """Called in each worker before its work."""


class _Failed(str):
    """What a worker that has raised sends: the traceback."""


@dataclass(eq=False)
class Team:
    """Worker processes and the pipes to them, in rank order; what they print is in the log. Ends with its context."""

    name: str
    log: Path
    processes: list[ForkProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def events(self) -> Iterator[Any]:
        """All messages of the workers, as they come; errors as in :meth:`receive`."""
        left = list(self.pipes)
        while left:
            for pipe in readable(left):
                message = self.receive(pipe)
                if message is None:
                    left.remove(pipe)
                else:
                    yield message

    def receive(self, pipe: Connection) -> Any:
        """The next message of a worker.

        Raises:
            RuntimeError: If it has failed; names the log.
        """
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"a worker of {self.name!r} has died: see {self.log}") from None
        if isinstance(message, _Failed):
            last = message.strip().splitlines()[-1]
            raise RuntimeError(f"a worker of {self.name!r} failed: {last} (all of it is in {self.log})")
        return message

    def end(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


def readable(pipes: Sequence[Connection]) -> list[Connection]:
    """Pipes that have a message; waits for one."""
    return cast(list[Connection], wait(pipes))


def started(name: str, place: Place, log: Path, work: Callable[[int, Connection], None]) -> Team:
    """Forks workers, whose prints go to the log. This process should have no other thread. ``work`` is called in each
    process with its rank and the pipe to this one, which takes None when it returns."""
    context = multiprocessing.get_context("fork")
    team = Team(name, log)
    try:
        for rank, environment in enumerate(place.environment()):
            ours, theirs = context.Pipe()
            team.pipes.append(ours)
            process = context.Process(target=_child, args=(rank, place, environment, log, theirs, work))
            process.start()
            team.processes.append(process)
            theirs.close()
    except BaseException:
        team.end()
        raise
    return team


def _child(
    rank: int,
    place: Place,
    environment: dict[str, str],
    log: Path,
    pipe: Connection,
    work: Callable[[int, Connection], None],
) -> None:
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler removes what the parent has made
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)  # the parent's may be redirected
    try:
        os.environ.update(environment)
        place.enter(rank)
        # one thread each, or the workers fight for the cores; denormals slow small networks down up to three times
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        work(rank, pipe)
        pipe.send(None)
    except BaseException:
        trace = traceback.format_exc()
        print(trace, flush=True)
        pipe.send(_Failed(trace))
    os._exit(0)  # without what the parent does when it exits


def die_with_parent() -> None:
    """Has this process killed when the one that has started it ends, where the system can do that."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def make_trainer(workers: int, strategy: Strategy, callbacks: list[Callback], **options: Any) -> Trainer:
    """The trainer of one of so many workers: a node with one CPU device, which shows no progress and writes no files by
    itself."""
    return Trainer(
        accelerator="cpu",
        num_nodes=workers,
        devices=1,
        strategy=strategy,
        callbacks=callbacks,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, **options},
    )

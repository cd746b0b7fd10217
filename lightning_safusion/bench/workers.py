"""The processes of a benchmark: one for each system on each worker, of which one system at a time trains some steps.

All of them run Lightning's trainer with the strategy in question, from the beginning of the benchmark to its end, so
that systems can take turns with everything they have learnt about their costs.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_safusion.bench.links import Namespace, sent_bytes
from lightning_safusion.bench.workload import Classifier, Paced, Repeated
from lightning_safusion.ddp_hooks import register_ddp_hook
from lightning_safusion.simulate.trace import Trace
from lightning_safusion.strategy import SAFusionStrategy

#: The row without any exchange: what a step takes if the network costs nothing.
FLOOR = "no-exchange"
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class NoExchange(DDPStrategy):
    """DDP whose workers keep their own gradients."""

    @override
    def _register_ddp_hooks(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            register_ddp_hook(self.model, "local", None)


@dataclass(frozen=True)
class Task:
    """What the workers train, the same for all systems.

    Args:
        model: Kind of network, see :data:`~lightning_safusion.bench.workload.MODELS`.
        size: Its size.
        batch_size: Samples of one worker.
        density: Share of the elements that sparse systems send.
        trace: Sleep through this in place of a network.
        seed: Of weights and batches.
    """

    model: str = "conv"
    size: str = "base"
    batch_size: int = 16
    density: float = 0.01
    trace: Trace | None = None
    seed: int = 0

    def module(self) -> Classifier | Paced:
        """The module that every worker trains."""
        torch.manual_seed(self.seed)
        return Classifier(self.model, self.size, self.batch_size) if self.trace is None else Paced(self.trace)

    def strategy(self, system: str) -> DDPStrategy:
        """The strategy of a row.

        Raises:
            ValueError: If there is no such system.
        """
        if system == FLOOR:
            return NoExchange(process_group_backend="gloo")
        return SAFusionStrategy(system=system, density=self.density, process_group_backend="gloo")


@dataclass(frozen=True)
class Block:
    """Steps that one worker has trained in one go.

    Args:
        steps: Seconds of each step: forward, backward, exchange and optimizer, without loading.
        figures: Of the last one, from the strategy's report; empty where DDP exchanges.
        wire_bytes: That its device has sent per step, headers included; None on the loopback.
        peak_bytes: Largest resident set of its process so far, that of torch itself included.
    """

    steps: tuple[float, ...]
    figures: dict[str, Any] = field(default_factory=dict)
    wire_bytes: float | None = None
    peak_bytes: int = 0


class Turns(Callback):
    """Lets a trainer run only as many steps as it is told through a pipe, and answers with their times.

    Args:
        pipe: Brings numbers of steps, takes a :class:`Block` for each, and None before the first.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._left = 0
        self._ready = False
        self._steps: list[float] = []
        self._sent: int | None = None
        self._begin = 0.0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning gives a node with one device all cores
        torch.set_num_threads(1)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._left == 0:
            if not self._ready:
                self._ready = True
                self._pipe.send(None)
            self._left = int(self._pipe.recv())
            self._steps = []
            trainer.strategy.barrier()
            self._sent = sent_bytes()
        self._begin = perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._steps.append(perf_counter() - self._begin)
        self._left -= 1
        if self._left > 0:
            return
        wire = sent_bytes()
        per_step = (wire - self._sent) / len(self._steps) if wire is not None and self._sent is not None else None
        figures = trainer.strategy.report() if isinstance(trainer.strategy, SAFusionStrategy) else {}
        self._pipe.send(Block(tuple(self._steps), figures, per_step, peak_bytes()))


def peak_bytes() -> int:
    """Largest resident set of this process so far; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


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
    """The processes of one system.

    Args:
        system: Its name.
        processes: In rank order.
        pipes: To them.
        log: File with all that they print.
    """

    system: str
    processes: list[ForkProcess]
    pipes: list[Connection]
    log: Path

    def train(self, steps: int) -> list[Block]:
        """Has all workers train some steps, and waits for them.

        Returns:
            A block of each rank.

        Raises:
            RuntimeError: If a worker fails; names the log.
        """
        for pipe in self.pipes:
            pipe.send(steps)
        return self.collect()

    def finish(self) -> list[Any]:
        """Tells the workers that all turns are over, and waits for what they hand in; errors as in :meth:`train`."""
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
    """A worker has raised.

    Args:
        trace: Traceback.
    """

    trace: str


@contextmanager
def started(system: str, place: Place, log: Path, port: int, work: Callable[[int, Connection], None]) -> Iterator[Team]:
    """Forks the workers of a system, and ends them with the block. The process should have no other thread.

    Args:
        system: Its name.
        place: Where they run.
        log: Takes all that they print.
        port: Of their rendezvous on the first of them.
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


def train(task: Task, system: str, workers: int, steps: int, callbacks: Sequence[Callback], pipe: Connection) -> None:
    """Trains one system for ``steps`` steps in turns, as one of the workers; says when it is ready to begin."""
    module = task.module()
    torch.manual_seed(task.seed + 1 + int(os.environ["NODE_RANK"]))
    trainer = Trainer(
        accelerator="cpu",
        num_nodes=workers,
        devices=1,
        strategy=task.strategy(system),
        callbacks=[Turns(pipe), *callbacks],
        max_steps=steps,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, Repeated(module.batch(), steps))

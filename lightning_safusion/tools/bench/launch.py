"""The processes of a benchmark: started where no launcher has (those of one machine, as Lightning's own launcher does),
quiet, and stopped between two steps."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy

from lightning_safusion.tools.bench.job import JobOptions

_GRACE = 20.0  # seconds for the others to end
_PATIENCE = 5.0  # seconds in which this process may say itself what has failed on all


def counted(arguments: Mapping[str, Any], workers: int | None) -> dict[str, Any]:
    """The trainer's arguments with ``workers`` devices on each machine; where nothing says how many, with one for each
    process that a launcher has started."""
    chosen = dict(arguments)
    if workers is not None:
        chosen["devices"] = workers
    if chosen.get("devices") not in (None, "auto", -1, "-1"):
        return chosen
    environ = os.environ
    if {"LOCAL_WORLD_SIZE", "WORLD_SIZE"} <= environ.keys():  # torchrun
        here = int(environ["LOCAL_WORLD_SIZE"])
        return chosen | {"devices": here, "num_nodes": max(1, int(environ["WORLD_SIZE"]) // here)}
    if SLURMEnvironment.detect() and {"SLURM_NTASKS", "SLURM_NNODES"} <= environ.keys():  # srun, no shell of Slurm's
        nodes = int(environ["SLURM_NNODES"])
        return chosen | {"devices": max(1, int(environ["SLURM_NTASKS"]) // nodes), "num_nodes": nodes}
    return chosen


def _check(trainer: Trainer, starts: bool) -> None:
    """``starts``: the processes beside this one are to be started here."""
    if trainer.world_size < 2:
        raise ValueError(
            "there is one worker, and nothing to exchange: set devices or num_nodes in the trainer's section, give "
            "--workers, or start the command with torchrun or srun"
        )
    if not starts:
        return
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        name = os.environ.get("SLURM_JOB_NAME", "")
        raise ValueError(
            f"srun has started several tasks, and Lightning does not take a Slurm job called {name!r} for one of its "
            "own: SLURM_JOB_NAME=bench srun safusion bench ..."
        )
    if trainer.num_nodes > 1 and not {"NODE_RANK", "GROUP_RANK"} & os.environ.keys():
        raise ValueError(
            f"the trainer has {trainer.num_nodes} machines, and nothing has started their processes: start the command "
            "with torchrun or srun, or set num_nodes to 1"
        )


@contextmanager
def processes(arguments: Mapping[str, Any], options: JobOptions) -> Iterator[None]:
    """Starts the other processes of this machine if nothing else does, and ends them with the context.

    Raises:
        ValueError: If there is one worker only, or processes are missing that this one cannot start.
    """
    strategy = DDPStrategy()
    trainer = Trainer(**arguments, strategy=strategy, logger=False, enable_checkpointing=False)
    environment = strategy.cluster_environment
    starts = environment is not None and not environment.creates_processes_externally
    _check(trainer, starts)
    if environment is None or not starts:
        yield
        return
    count = strategy.num_processes
    os.environ |= {
        "MASTER_ADDR": environment.main_address,
        "MASTER_PORT": str(environment.main_port),
        "NODE_RANK": str(environment.node_rank()),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(trainer.world_size),
    }
    del trainer, strategy, environment
    logs = Path(options.output, "logs")
    started = [_start(rank, options, logs / f"process-{rank}.log") for rank in range(1, count)]
    ending = threading.Event()
    threading.Thread(target=_watch, args=(started, ending, logs), daemon=True).start()
    try:
        yield
        deadline = time.monotonic() + _GRACE
        for process in started:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # they have given all that they had to give
    finally:
        ending.set()
        for process in started:
            process.kill()
            process.wait()


def _start(rank: int, options: JobOptions, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lightning_safusion.tools.bench.run"]
    environment = {**os.environ, "LOCAL_RANK": str(rank)}
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603 (no shell; this program)
            command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
        )
    # not as an argument: options may have what other users of the machine are not to see
    if process.stdin is not None:
        with process.stdin:
            process.stdin.write(json.dumps(asdict(options), default=str).encode())
    return process


def _watch(started: Sequence[subprocess.Popen[bytes]], ending: threading.Event, logs: Path) -> None:
    """The others would wait for a process that has died."""
    while not ending.wait(0.5):
        for rank, process in enumerate(started, 1):
            if process.poll() not in (None, 0) and not ending.wait(_PATIENCE):
                for other in started:
                    other.kill()
                print(f"safusion: process {rank} has ended with {process.returncode}: see {logs}", file=sys.stderr)
                os._exit(1)


@contextmanager
def interrupts(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Ctrl-C is heard between two steps, on all processes alike."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def quiet(log: Path) -> Iterator[None]:
    """What Lightning says goes to a file: it would say it in every turn."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    kept = [(logger.handlers[:], logger.propagate) for logger in loggers]
    file = logging.FileHandler(log, mode="w")
    for logger in loggers:
        logger.handlers, logger.propagate = [file], False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        file.close()
        for logger, (handlers, propagate) in zip(loggers, kept, strict=True):
            logger.handlers, logger.propagate = handlers, propagate

"""Independent jobs spread over processes: one thread each, Ctrl-C at any time."""

from __future__ import annotations

import signal
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_safusion.bench.team import Place, Team, started

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    jobs: Sequence[Job],
    work: Callable[[Job], Result],
    processes: int,
    done: Callable[[Job, Result], None],
    failed: Callable[[Job, Exception], None],
    stopping: Callable[[], None],
) -> bool:
    """Does jobs in processes of their own, which are forked: this one should have no other thread.

    The first Ctrl-C lets the jobs under way finish, the second one ends them.

    Args:
        jobs: In order; those that start first.
        work: Does one.
        processes: How many run at the same time.
        done: Takes each result, in this process.
        failed: Told of each job that raised.
        stopping: Called at the first Ctrl-C.

    Returns:
        Whether all of them have been done.
    """
    torch.set_num_threads(1)  # a forked thread pool of torch hangs
    left, running, complete = deque(jobs), dict[Any, tuple[Job, Team, ExitStack]](), True

    def turn() -> bool:
        """Starts what there is room for, and takes in what has ended; whether it went well."""
        while left and len(running) < processes:
            job, stack = left.popleft(), ExitStack()
            log = Path(folder, f"{len(left)}.log")
            team = stack.enter_context(started("job", Place(1), log, 0, _in_a_process(work, job)))
            running[team.pipes[0]] = job, team, stack
        good = True
        for pipe in wait(list(running)):
            job, team, stack = running.pop(pipe)
            with stack:
                try:
                    (result,) = team.collect()
                except RuntimeError as error:
                    good = False
                    failed(job, error)
                else:
                    done(job, result)
        return good

    stopped = False
    with tempfile.TemporaryDirectory() as folder:
        try:
            while left or running:
                try:
                    complete = turn() and complete
                except KeyboardInterrupt:
                    if stopped:
                        break
                    stopped = True
                    left.clear()
                    stopping()
        finally:
            for _, _, stack in running.values():
                stack.close()
    return complete and not stopped


def _in_a_process(work: Callable[[Job], Result], job: Job) -> Callable[[int, Connection], None]:
    def run(rank: int, pipe: Connection) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
        pipe.send(work(job))

    return run

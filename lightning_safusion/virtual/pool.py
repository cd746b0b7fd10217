"""Jobs spread over processes: one thread each, Ctrl-C at any time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing.connection import wait
from typing import TypeVar

from lightning_safusion.virtual.training import one_thread

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
    """Does jobs in processes of their own.

    The first Ctrl-C lets the jobs under way finish, the second one ends them.

    Args:
        jobs: In order; those that start first.
        work: Does one; a function of a module.
        processes: How many run at the same time.
        done: Takes each result, in this process.
        failed: Told of each job that raised.
        stopping: Called at the first Ctrl-C.

    Returns:
        Whether all of them have been done.
    """
    if not jobs:
        return True
    context = multiprocessing.get_context("spawn")  # a forked thread pool of torch hangs
    executor = ProcessPoolExecutor(min(processes, len(jobs)), context, _begin_process)
    futures = {executor.submit(work, job): job for job in jobs}
    reported: set[Future[Result]] = set()

    def report(future: Future[Result]) -> bool:
        reported.add(future)
        try:
            result = future.result()
        except Exception as error:
            failed(futures[future], error)
            return False
        done(futures[future], result)
        return True

    try:
        outcomes = [report(future) for future in as_completed(futures)]
        executor.shutdown()
        return all(outcomes)
    except KeyboardInterrupt:
        stopping()
        _stop(executor)
    for future in futures:
        if future not in reported and future.done() and not future.cancelled() and future.exception() is None:
            report(future)
    return False


def _stop(executor: ProcessPoolExecutor) -> None:
    """Waits for the jobs under way; ends them if the user insists."""
    try:
        executor.shutdown(cancel_futures=True)
    except KeyboardInterrupt:
        for process in multiprocessing.active_children():
            process.terminate()


def _begin_process() -> None:
    """Ctrl-C is the parent's business; without a parent there is nobody to work for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    one_thread()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)

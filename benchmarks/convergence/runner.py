"""Runs spread over processes: one thread each, results written down as they come, Ctrl-C at any time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing.connection import wait

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.convergence.store import Run, Store
from benchmarks.convergence.training import Result, train
from lightning_safusion.virtual.training import one_thread

# Seconds of progress from which the time left is estimated: many runs, since tasks take different times.
_ESTIMATED_FROM = 3600.0


def execute(run: Run) -> Result:
    """Does one run."""
    return train(run.task, run.scheme, run.seed)


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


def run_all(runs: Sequence[Run], store: Store, processes: int, console: Console) -> bool:
    """Does the runs that the store does not have.

    The first Ctrl-C lets the runs under way finish, the second one ends them.

    Args:
        runs: In order; those that start first.
        store: Takes the results.
        processes: How many run at the same time.
        console: Shows progress, and what failed.

    Returns:
        Whether all of them have been done.
    """
    missing = store.missing(runs)
    if not missing:
        return True
    context = multiprocessing.get_context("spawn")  # a forked thread pool of torch hangs
    executor = ProcessPoolExecutor(min(processes, len(missing)), context, _begin_process)
    futures = {executor.submit(execute, run): run for run in missing}
    try:
        done = _collect(futures, store, len(runs), console)
        executor.shutdown()
        return done
    except KeyboardInterrupt:
        console.print("stopping: runs under way are finished first; Ctrl-C again ends them")
        return _stop(executor, futures, store)


def _collect(futures: dict[Future[Result], Run], store: Store, total: int, console: Console) -> bool:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    done = True
    with Progress(*columns, console=console, speed_estimate_period=_ESTIMATED_FROM) as progress:
        bar = progress.add_task("runs", total=total, completed=total - len(futures))
        for future in as_completed(futures):
            run = futures[future]
            try:
                result = future.result()
            except Exception as error:
                done = False
                console.print(f"{run.config}, seed {run.seed} failed: {type(error).__name__}: {error}", style="red")
            else:
                store.add(run, result)
                metric = "diverged" if result.metric is None else f"{result.metric:.4f}"
                console.print(f"{run.config}, seed {run.seed}: {metric} in {result.seconds:.0f} s", highlight=False)
            progress.advance(bar)
    return done


def _stop(executor: ProcessPoolExecutor, futures: dict[Future[Result], Run], store: Store) -> bool:
    """Waits for the runs under way and writes them down; ends them if the user insists."""
    known = {run.key for run in store.missing(futures.values())}
    try:
        executor.shutdown(cancel_futures=True)
    except KeyboardInterrupt:
        for process in multiprocessing.active_children():
            process.terminate()
    for future, run in futures.items():
        if run.key in known and future.done() and not future.cancelled() and future.exception() is None:
            store.add(run, future.result())
    return False

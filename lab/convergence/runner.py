"""Runs spread over processes: one thread each, results written down as they come, Ctrl-C at any time."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from lab.convergence.store import Run, Store
from lab.convergence.training import Result, train
from lab.progress import job_bar
from lab.virtual.jobs import run_jobs


def execute(run: Run) -> Result:
    """Does one run."""
    return train(run.task, run.scheme, run.seed)


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
    with job_bar("runs", len(runs), len(runs) - len(missing), console) as advance:

        def done(run: Run, result: Result) -> None:
            store.add(run, result)
            metric = "diverged" if result.metric is None else f"{result.metric:.4f}"
            console.print(f"{run.config}, seed {run.seed}: {metric} in {result.seconds:.0f} s", highlight=False)
            advance()

        def failed(run: Run, error: Exception) -> None:
            console.print(f"{run.config}, seed {run.seed} failed: {type(error).__name__}: {error}", style="red")
            advance()

        def stopping() -> None:
            console.print("stopping: runs under way are finished first; Ctrl-C again ends them")

        return run_jobs(missing, execute, processes, done, failed, stopping)

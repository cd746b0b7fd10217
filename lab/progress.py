"""Progress of many runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Seconds of progress from which the time left is estimated: many trainings, since rows take different times.
_ESTIMATED_FROM = 3600.0


@contextmanager
def job_bar(title: str, total: int, done: int, console: Console) -> Iterator[Callable[[], None]]:
    """A bar of jobs; gives what is called when one has ended.

    Args:
        title: What they are.
        total: How many there are.
        done: How many have been done before.
        console: Shows the bar.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, speed_estimate_period=_ESTIMATED_FROM) as progress:
        bar = progress.add_task(title, total=total, completed=done)
        yield lambda: progress.advance(bar)

"""Progress bars of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Seconds of progress from which the time left is estimated: many trainings, since rows take different times.
_ESTIMATED_FROM = 3600.0


@contextmanager
def step_bars(totals: Mapping[str, int], console: Console) -> Iterator[Callable[[str, int], None]]:
    """A bar for each row while processes are forked; gives what is told of a row's steps.

    Args:
        totals: Steps of each row.
        console: Shows the bars.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # refreshed by hand: a thread of its own would be forked with the workers
    progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
    bars = {name: progress.add_task(escape(name), total=total) for name, total in totals.items()}

    def tell(name: str, steps: int) -> None:
        progress.advance(bars[name], steps)
        progress.refresh()

    with progress:
        yield tell


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

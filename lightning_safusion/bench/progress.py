"""Progress bars of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def step_bars(totals: Mapping[str, int], console: Console) -> Iterator[Callable[[str, int], None]]:
    """A bar for each row while processes are forked; gives what is told of a row's steps, ``totals`` in all."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # refreshed by hand: a thread of its own would be forked with the workers
    progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
    bars = {name: progress.add_task(escape(name), total=total) for name, total in totals.items()}

    def tell(name: str, steps: int) -> None:
        progress.advance(bars[name], steps)
        progress.refresh()

    with progress:
        yield tell

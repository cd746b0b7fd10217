"""The progress of a benchmark on the first process: a bar on a terminal, else a line for each turn."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_safusion.literal import literal


class TurnProgress:
    """Shows which turn is under way, and its steps.

    Args:
        console: Shows it; a quiet one shows nothing.
        turns: Of all rows.
    """

    def __init__(self, console: Console, turns: int) -> None:
        self._console = console
        self._what, self._steps = "", 0
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
        # refreshed by hand: a thread of its own would be forked with workers that load data
        shown = console.is_terminal and not console.quiet
        self._bar = Progress(*columns, console=console, auto_refresh=False, transient=True) if shown else None
        self._task = self._bar.add_task("", total=turns) if self._bar is not None else None

    def __enter__(self) -> TurnProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, what: str) -> None:
        """A turn begins."""
        self._what, self._steps = what, 0
        self._show()

    def step(self) -> None:
        """A step has ended."""
        self._steps += 1
        self._show()

    def end(self, seconds: float | None) -> None:
        """A turn has ended.

        Args:
            seconds: Its median step; None where none counts.
        """
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, refresh=True)
        elif seconds is None:
            self._console.print(literal(f"{self._what}: ended"))
        else:
            self._console.print(literal(f"{self._what}: {seconds * 1e3:.3g} ms per step"))

    def _show(self) -> None:
        if self._bar is not None and self._task is not None:
            steps = f", step {self._steps}" if self._steps else ""
            self._bar.update(self._task, description=escape(self._what) + steps, refresh=True)

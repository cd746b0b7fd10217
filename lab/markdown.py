"""Tables in markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(columns: Sequence[str], rows: Iterable[Iterable[object]], names: int = 1) -> str:
    """A table in markdown.

    Args:
        columns: Headings.
        rows: Their cells.
        names: Columns, from the left, that hold names; the others hold figures.
    """
    rules = ["---" if place < names else "---:" for place in range(len(columns))]
    return "\n".join(line(cells) for cells in (columns, rules, *rows))


def line(cells: Iterable[object]) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"

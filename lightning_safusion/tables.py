"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text


def plain_table(title: str | Text, caption: str, names: str, figures: Sequence[str]) -> Table:
    """An empty table without frames: a column of names, and one for each of the figures."""
    table = Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False
    )
    table.add_column(names, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table

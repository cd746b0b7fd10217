"""Tables on a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lightning_safusion.literal import literal
from lightning_safusion.registry import origin_of
from lightning_safusion.systems.rows import REGISTRY, SYSTEMS

_INDENT = "  "


@dataclass(frozen=True)
class RowName:
    """A cell with a name that may have options in brackets: on more lines where it is too long for one. ``after``: what
    stands beside it."""

    name: str
    after: str = ""

    def lines(self, width: int) -> list[str]:
        """The name in lines of so many characters, as far as it can be cut: behind commas and opening brackets, and an
        option that is longer than a line behind its equals sign."""
        lines = [""]
        for option in re.findall(r"[^\[,]+[\[,]?", self.name):
            long = len(_INDENT + option) > width
            for piece in re.findall("[^=]+=?", option) if long else [option]:
                if lines[-1].strip() and len(lines[-1] + piece) > width:
                    lines.append(_INDENT)
                lines[-1] += piece
        lines[-1] += self.after
        return lines

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        narrow, wide = (max(map(len, self.lines(width))) for width in (1, 1 << 16))
        return Measurement(min(narrow, options.max_width), min(wide, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield literal("\n".join(self.lines(options.max_width)))


class FigureTable(Table):
    """A table without frames. Where the terminal is too narrow, its last columns of figures are left out, and named."""

    def __init__(self, title: str | Text, caption: str = "") -> None:
        super().__init__(
            title=title,
            caption=caption,
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
            show_edge=False,
            title_justify="left",
            caption_justify="left",
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, unbounded = copy(self), options.update_width(1 << 16)
        shown.columns = list(self.columns)
        while shown.columns[-1].no_wrap and shown.__rich_measure__(console, unbounded).minimum > options.max_width:
            shown.columns.pop()
        if left := self.columns[len(shown.columns) :]:
            names = ", ".join(str(each.header).replace("\n", " ") for each in left)
            about = f"{self.caption}".removesuffix(".") + ". " if self.caption else ""
            shown.caption = f"{about}No room for: {names}."
        yield from Table.__rich_console__(shown, console, options)


def plain_table(title: str | Text, caption: str, names: str, figures: Sequence[str]) -> FigureTable:
    """An empty table: a column of names, and one for each of the figures."""
    table = FigureTable(title, caption)
    table.add_column(names, overflow="fold")
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_systems() -> None:
    """Prints the systems that ``SAFusionStrategy(system=...)`` takes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=False)
    for heading in ("system", "what it decides", "source"):
        table.add_column(heading, overflow="fold")
    for row in SYSTEMS.values():
        table.add_row(f"[bold]{row.name}[/bold]", row.summary, row.source)
    for name, entry in REGISTRY.offered().items():  # a system that nobody trains with need not be importable
        table.add_row(literal(name, "bold"), "of an installed package", literal(origin_of(entry)))
    Console().print(table)

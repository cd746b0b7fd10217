"""Numbers as text, and the parts that all sections of a report are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isnan

from lightning_safusion.report.markup import Markup, element

_OPEN_ROWS = 24  # longer tables are folded


def milliseconds(seconds: float | None, digits: int = 1) -> str:
    """As text; a dash if it is not known."""
    return "–" if seconds is None or isnan(seconds) else f"{seconds * 1e3:,.{digits}f} ms"


def size(nbytes: float) -> str:
    """Bytes as text, in decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.1f} {unit}"
    return f"{nbytes:,.0f} bytes"


def share(value: float | None, digits: int = 1) -> str:
    """A share in percent; a dash if it is not known."""
    return "–" if value is None or isnan(value) else f"{value:.{digits}%}"


def signed(value: float | None) -> str:
    """A gain in percent; a dash if it is not known."""
    return "–" if value is None else f"{value:+.1%}"


def counted(number: int, what: str) -> str:
    """A number of things, in the plural unless it is 1."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def section(name: str, title: str, *content: str) -> Markup:
    """A titled part of the page."""
    heading = element("h2", title, id=f"{name}-title")
    return element("section", heading, *content, id=name, aria_labelledby=f"{name}-title")


def figure(name: str, drawing: Markup, caption: str, legend: str = Markup("")) -> Markup:
    """A picture with its legend and what it shows; wide ones scroll within it."""
    return element("figure", scrolled(name, drawing), legend, element("figcaption", element("p", caption)))


def scrolled(name: str, content: Markup) -> Markup:
    """Something that may be wider than a phone: it scrolls, also with the keyboard, and the page does not."""
    return element("div", content, class_="scroll", role="region", aria_label=name, tabindex=0)


def fold(rows: int, name: str, content: Markup, open_: bool | None = None) -> Markup:
    """A table that is folded if it is long."""
    shown = rows <= _OPEN_ROWS if open_ is None else open_
    title = f"{name} ({rows})" if rows else name
    return element("details", element("summary", title), scrolled(name, content), open=shown or None)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], marked: int = -1, name_column: int | None = 0) -> Markup:
    """A table.

    Args:
        heads: Column titles.
        rows: Cells; those that are no element yet become ``td``.
        marked: Number of a row to point out.
        name_column: The column of names, which are aligned to the left; None: all are.
    """
    lines = []
    for number, cells in enumerate(rows):
        made = [cell if isinstance(cell, Markup) else element("td", cell) for cell in cells]
        lines.append(element("tr", *made, class_="late" if number == marked else None))
    titles = [
        element("th", head, scope="col", class_="name" if name_column in (None, column) else None)
        for column, head in enumerate(heads)
    ]
    return element("table", element("thead", element("tr", *titles)), element("tbody", *lines))

"""Texts on a terminal: names of users are shown as they are, and numbers of things agree with them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text


def literal(text: object, style: str = "") -> Text:
    """A text that rich shows letter by letter: brackets are no markup, and colons no emoji.

    Control characters, which could move the cursor or colour what follows, are shown as Python writes them.

    Args:
        text: What is shown; anything that has a text.
        style: Of rich.
    """
    return Text("".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(text)), style)


def plural(count: int, noun: str) -> str:
    """``"1 buffer"``, ``"2,000 buffers"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def first_of(names: Sequence[str], most: int = 8) -> str:
    """``"a, b and 3 more"``: no more names than ``most``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

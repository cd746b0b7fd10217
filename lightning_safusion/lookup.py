"""Things that are found by name, and errors that say which name was probably meant, or what to install."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Mapping
from typing import TypeVar

_T = TypeVar("_T")


def suggestion(name: str, known: Iterable[str]) -> str:
    """``" Did you mean '...'?"`` with the known name that is closest to ``name``; empty if none is close."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def look_up(kind: str, name: str, table: Mapping[str, _T], instead: str = "") -> _T:
    """The entry of a table called ``name``.

    Args:
        kind: What the table holds, for the message.
        name: The name.
        table: Everything of this kind, by name.
        instead: What may be given in place of a name (``"a Memory"``).

    Raises:
        ValueError: If there is none; the message lists the names and suggests the closest.
    """
    if name not in table:
        other = f" or pass {instead}" if instead else ""
        raise ValueError(
            f"unknown {kind} {name!r}; choose one of {', '.join(map(repr, table))}{other}.{suggestion(name, table)}"
        )
    return table[name]


def need(module: str, extra: str, what: str = "this") -> None:
    """Checks that a module of an extra is installed, before the work begins whose results need it.

    Args:
        module: Its name.
        extra: Brings it.
        what: Needs it.

    Raises:
        ModuleNotFoundError: If it is missing; names the extra that brings it.
    """
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f'{what} needs {module}: pip install "lightning-safusion[{extra}]"')

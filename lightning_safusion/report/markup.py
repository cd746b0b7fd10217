"""HTML and SVG as text that is escaped by construction."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_VOID = {"br", "meta"}


class Markup(str):
    """Text that is HTML already, and is not escaped again."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: object) -> Markup:
    """One element.

    Args:
        tag: Its name.
        children: What is in it; all but :class:`Markup` is escaped.
        attributes: Attributes, escaped; ``class_`` is ``class``, ``stroke_width`` is ``stroke-width``; None leaves one
            out, True writes its name alone.
    """
    written = "".join(_attribute(name, value) for name, value in attributes.items() if value is not None)
    return Markup(f"<{tag}{written}>" if tag in _VOID else f"<{tag}{written}>{join(children)}</{tag}>")


def join(parts: Iterable[str]) -> Markup:
    """The parts one after another; all but :class:`Markup` is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def _attribute(name: str, value: object) -> str:
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'

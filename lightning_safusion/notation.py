"""Names with options in brackets, ``NAME[OPTION=VALUE,...]``, several of them between commas.

A value may have options itself: ``saf-pooled[density=0.1,memory=residual[decay=0.9]]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

from lightning_safusion.lookup import check_name, read_value

Part = TypeVar("Part")


def split(text: str) -> list[str]:
    """Cuts a text at its commas, but for those in brackets, and removes spaces.

    Raises:
        ValueError: If brackets do not match, something follows one, or nothing stands between two commas.
    """
    depth, pieces = 0, [""]
    for character in "".join(text.split()):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    if depth or not all(re.fullmatch(r"[^\[\]]+(\[.*\])?", piece) for piece in pieces):
        raise ValueError(f"several are written as in 'ddp,saf-pooled[wire=q4,density=0.1]', got {text!r}")
    return pieces


def read(text: str) -> tuple[str, dict[str, str]]:
    """The name, and the text of each option.

    Raises:
        ValueError: If an option has no value, or is given twice.
    """
    name, bracket, inside = text.partition("[")
    if bracket and not inside.endswith("]"):
        raise ValueError(f"{text!r} has no closing bracket")
    pairs = split(inside[:-1]) if inside[:-1] else [""]
    options: dict[str, str] = {}
    for pair in pairs if bracket else []:
        option, equals, value = pair.partition("=")
        if not equals or not value:
            raise ValueError(f"{text!r}: options are written as in 'density=0.1', got {pair!r}")
        if option in options:
            raise ValueError(f"{text!r}: {option} is given twice")
        options[option] = value
    return name, options


def typed(text: str, options: Mapping[str, str], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Options with values of the annotated types.

    Args:
        text: The row, for messages.
        options: Text of each option.
        hints: Annotation of every option that there is.

    Raises:
        ValueError: If there is no such option, or it cannot have its value.
    """
    for option in options:
        try:
            check_name("option", option, hints)
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None
    return {option: read_value(f"{text!r}: {option}", value, hints[option]) for option, value in options.items()}


def make_part(text: str, resolve: Callable[[str], Part]) -> Part:
    """A part by its name, with arguments of its constructor: ``residual[decay=0.9]``."""
    name, options = read(text)
    part = resolve(name)
    return type(part)(**typed(text, options, hints_of(type(part).__init__))) if options else part


def hints_of(function: Callable[..., Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """Annotations of a function's arguments."""
    hints = get_type_hints(function)
    return {name: hint for name, hint in hints.items() if name not in ("self", "return", "kwargs", *without)}

"""How rows, schemes and parts are written: ``NAME`` or ``NAME[OPTION=VALUE,...]``, several of them between commas.

A value may be such a text itself: ``saf-pooled[density=0.1,memory=residual[decay=0.9]]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_type_hints

from lightning_safusion.lookup import suggestion

Part = TypeVar("Part")


def split(text: str) -> list[str]:
    """What stands between the commas, without spaces; commas in brackets separate options.

    Raises:
        ValueError: If a bracket has no other, something follows one, or nothing stands between two commas.
    """
    depth, pieces, closed = 0, [""], False
    for character in "".join(text.split()):
        if character == "," and depth == 0:
            pieces.append("")
            closed = False
            continue
        depth += {"[": 1, "]": -1}.get(character, 0)
        if closed or depth < 0 or (character == "[" and not pieces[-1]):
            depth = -1
            break
        pieces[-1] += character
        closed = character == "]" and depth == 0
    if depth or not all(pieces):
        raise ValueError(f"several are written as in 'ddp,saf-pooled[wire=q4,density=0.1]', got {text!r}")
    return pieces


def read(text: str) -> tuple[str, dict[str, str]]:
    """The name, and the text of each option.

    Raises:
        ValueError: If an option has no value, or is given twice.
    """
    name, bracket, inside = text.partition("[")
    options: dict[str, str] = {}
    if bracket and not inside.endswith("]"):
        raise ValueError(f"{text!r} has no closing bracket")
    for pair in split(inside[:-1]) if inside[:-1] else [""] if bracket else []:
        option, equals, value = pair.partition("=")
        if not equals or not value:
            raise ValueError(f"{text!r}: options are written as in 'density=0.1', got {pair!r}")
        if option in options:
            raise ValueError(f"{text!r}: {option} is given twice")
        options[option] = value
    return name, options


def write(name: str, options: Mapping[str, Any]) -> str:
    """The text from which :func:`read` has name and options."""
    return f"{name}[{','.join(f'{key}={value}' for key, value in options.items())}]" if options else name


def typed(text: str, options: Mapping[str, str], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Values of options, as the annotations of all that there are ask for them; ``text`` is what they stand in.

    Raises:
        ValueError: If there is no such option, or it cannot have that value.
    """
    for option in options:
        if option not in hints:
            known = ", ".join(hints)
            raise ValueError(
                f"{text!r}: unknown option {option!r}; choose from {known}.{suggestion(option, list(hints))}"
            )
    return {option: _value(text, option, value, hints[option]) for option, value in options.items()}


def make_part(text: str, resolve: Callable[[str], Part]) -> Part:
    """A part by its name, with what its constructor is given: ``residual[decay=0.9]``."""
    name, options = read(text)
    part = resolve(name)
    return type(part)(**typed(text, options, hints_of(type(part).__init__))) if options else part


def hints_of(function: Callable[..., Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """Annotations of a function's arguments."""
    hints = get_type_hints(function)
    return {name: hint for name, hint in hints.items() if name not in ("self", "return", "kwargs", *without)}


def _value(text: str, option: str, value: str, hint: Any) -> Any:
    kinds = get_args(hint) or (hint,)
    if float in kinds:
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{text!r}: {option} is a number, got {value!r}") from None
    if bool in kinds:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{text!r}: {option} is true or false, got {value!r}")
        return value.lower() == "true"
    if int in kinds:
        if not value.isdecimal():
            raise ValueError(f"{text!r}: {option} is a whole number, got {value!r}")
        return int(value)
    return value.split("|") if list[str] in kinds else value

"""What users write: names, values of options; errors say which name was probably meant, or what to install."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar, get_args

#: Among which elements those that are sent are chosen.
Scope: TypeAlias = Literal["tensor", "group"]
#: ``"auto"``: proportional where elements are compared in units of the update, else shared.
QuotaRule: TypeAlias = Literal["auto", "proportional", "shared", "pooled"]
#: Units in which elements are compared; ``"auto"``: those of the update where that has been measured to lose less.
SelectBy: TypeAlias = Literal["auto", "gradient", "update"]
#: Exchanges other than the engine's.
DDPHookName: TypeAlias = Literal["none", "bf16", "fp16", "powersgd", "powersgd-rank4", "local", "dear"]

# Modules that only some commands need, and the extras that bring them.
_EXTRAS = {"jinja2": "plot", "matplotlib": "plot", "sklearn": "examples"}

_T = TypeVar("_T")


def suggestion(name: object, known: Iterable[str]) -> str:
    """``" Did you mean '...'?"`` with the known name that is closest to ``name``; empty if none is close.

    Case, hyphens and underscores do not count. A name that begins with what was given is closer than one that is spelt
    alike.
    """
    names = {_folded(each): each for each in known}
    given = _folded(name)
    close = sorted((each for each in names if given and each.startswith(given)), key=len)
    close = close or difflib.get_close_matches(given, names, n=1, cutoff=0.66)
    return f" Did you mean {names[close[0]]!r}?" if close else ""


def _folded(name: object) -> str:
    return "".join(filter(str.isalnum, str(name).casefold()))


def check_name(kind: str, name: object, known: Iterable[str], instead: str = "") -> None:
    """Checks that a name is known.

    Args:
        kind: What it names, for the message.
        name: The name.
        known: All names of this kind.
        instead: What else would do (``"pass a Memory"``).

    Raises:
        ValueError: If it is not; suggests the closest name and lists all.
    """
    names = tuple(known)
    if name not in names:
        other = f", or {instead}" if instead else ""
        listed = ", ".join(map(repr, names))
        raise ValueError(f"unknown {kind} {name!r}.{suggestion(name, names)} Choose one of {listed}{other}.")


def look_up(kind: str, name: str, table: Mapping[str, _T], instead: str = "") -> _T:
    """The entry of a table called ``name``; arguments and errors are those of :func:`check_name`."""
    check_name(kind, name, table, instead)
    return table[name]


def read_value(option: str, text: str, hint: Any) -> Any:
    """The value of an option from its text; texts of a list stand between ``|``.

    Args:
        option: Its name, for the message.
        text: The value.
        hint: Its type, of which float, bool, int and ``list[str]`` matter.

    Raises:
        ValueError: If it is none of this type.
    """
    kinds = get_args(hint) or (hint,)
    try:
        if float in kinds:
            return float(text)
        if bool in kinds:
            return {"true": True, "false": False}[text.lower()]
        if int in kinds:
            return int(text)
    except (KeyError, ValueError):
        expected = "a number" if float in kinds else "true or false" if bool in kinds else "a whole number"
        raise ValueError(f"{option} is {expected}, got {text!r}") from None
    return text.split("|") if list[str] in kinds else text


def need(*modules: str, what: str = "this") -> None:
    """Checks that modules of extras are installed, before the work begins whose results need them.

    Args:
        *modules: Their names, of ``_EXTRAS``.
        what: Needs them.

    Raises:
        ModuleNotFoundError: If some are missing; names all of them, and the extras that bring them.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        extras = ",".join(sorted({_EXTRAS[module] for module in missing}))
        raise ModuleNotFoundError(f'{what} needs {" and ".join(missing)}: pip install "lightning-safusion[{extras}]"')

"""Rows of a benchmark: a system with options, such as ``saf-pooled[wire=q4,density=0.25]``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_safusion.naming import suggestion
from lightning_safusion.strategy import SAFusionStrategy
from lightning_safusion.systems import EngineSystem, HookSystem, resolve_system

#: Options of the optimizer, in place of those of the task that is trained.
TRAINING_OPTIONS = ("lr", "momentum", "beta2")

# a comma between the brackets of a row, or nothing but the rest of the text
_ROW = re.compile(r"\s*([^,\[\]]+?)\s*(?:\[([^\[\]]*)\])?\s*(?:,|$)")
# processes of a benchmark find each other through torch
_NO_OPTIONS = ("self", "system", "transport", "kwargs")
_DENSITY = 0.01  # where only the names of the options are to be checked


@dataclass(frozen=True)
class Row:
    """A system with options.

    Args:
        name: As it was written, without spaces.
        system: Name of the system.
        options: Arguments of :class:`SAFusionStrategy`.
        training: Options of the optimizer, of :data:`TRAINING_OPTIONS`.
    """

    name: str
    system: str
    options: tuple[tuple[str, Any], ...] = ()
    training: tuple[tuple[str, float], ...] = ()

    @property
    def published(self) -> EngineSystem | HookSystem:
        """The row's line in the table of systems."""
        return resolve_system(self.system)

    def density(self, otherwise: float) -> float:
        """The row's own density, or that of the benchmark."""
        return float(dict(self.options).get("density", otherwise))

    def strategy(self, density: float) -> SAFusionStrategy:
        """A new strategy.

        Args:
            density: Of rows that have none of their own.

        Raises:
            ValueError: If an option has a value that it cannot have; names the row.
        """
        options = {"density": density} | dict(self.options)
        try:
            return SAFusionStrategy(system=self.system, process_group_backend="gloo", **options)
        except (MisconfigurationException, TypeError, ValueError) as error:
            raise ValueError(f"row {self.name!r}: {error}") from error


def split_rows(text: str) -> list[str]:
    """Names of rows that are separated by commas, without spaces, each once; commas between brackets separate options.

    Raises:
        ValueError: If a bracket has no other, or a name is missing.
    """
    names, place = [], 0
    while place < len(text):
        match = _ROW.match(text, place)
        if match is None:
            raise ValueError(f"rows are written as in 'ddp,saf-pooled[wire=q4,density=0.1]', got {text[place:]!r}")
        names.append(match[1] if match[2] is None else f"{match[1]}[{''.join(match[2].split())}]")
        place = match.end()
    return list(dict.fromkeys(names))


def parse_row(name: str) -> Row:
    """Reads one row.

    Args:
        name: ``SYSTEM`` or ``SYSTEM[OPTION=VALUE,...]``. Options are the arguments of :class:`SAFusionStrategy` and
            :data:`TRAINING_OPTIONS`; the patterns of ``dense`` are separated by ``|``.

    Raises:
        ValueError: If there is no such system or option, or an option has a value that it cannot have.
    """
    system, bracket, text = name.partition("[")
    resolve_system(system)
    options: dict[str, Any] = {}
    training: dict[str, float] = {}
    for pair in text.removesuffix("]").split(",") if bracket else ():
        option, equals, value = pair.partition("=")
        if not equals or not value:
            raise ValueError(f"row {name!r}: options are written as in 'density=0.1', got {pair!r}")
        if option in options or option in training:
            raise ValueError(f"row {name!r}: {option} is given twice")
        if option in TRAINING_OPTIONS:
            training[option] = _number(name, option, value)
        else:
            options[option] = _value(name, option, value)
    row = Row(name, system, tuple(options.items()), tuple(training.items()))
    if row.published.ddp_hook is not None and "density" in options:
        raise ValueError(f"row {name!r}: {system} is DDP with a hook of torch and has no density")
    row.strategy(_DENSITY)
    return row


def refuse_training_options(names: Iterable[str]) -> None:
    """Refuses rows with options of the optimizer where no task is trained.

    Raises:
        ValueError: Names the row and its options.
    """
    for row in map(parse_row, names):
        if row.training:
            given = ", ".join(option for option, _ in row.training)
            raise ValueError(
                f"row {row.name!r}: {given} changes a training, and without --time_to_accuracy none is measured"
            )


def _value(name: str, option: str, text: str) -> Any:
    """The value of an argument of the strategy, as its annotation asks for it."""
    hints = {key: hint for key, hint in get_type_hints(SAFusionStrategy.__init__).items() if key not in _NO_OPTIONS}
    hints.pop("return", None)
    if option not in hints:
        known = [*hints, *TRAINING_OPTIONS]
        raise ValueError(
            f"row {name!r}: unknown option {option!r}; choose from {', '.join(known)}.{suggestion(option, known)}"
        )
    kinds = get_args(hints[option])
    if float in kinds:
        return _number(name, option, text)
    if bool in kinds:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"row {name!r}: {option} is true or false, got {text!r}")
        return text.lower() == "true"
    if int in kinds:
        if not text.isdecimal():
            raise ValueError(f"row {name!r}: {option} is a whole number, got {text!r}")
        return int(text)
    return text.split("|") if list[str] in kinds else text


def _number(name: str, option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"row {name!r}: {option} is a number, got {text!r}") from None

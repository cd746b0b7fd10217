"""Rows of a benchmark: a system with options, such as ``saf-pooled[wire=q4,density=0.25]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_safusion.bench.grammar import hints_of, make_part, read, typed
from lightning_safusion.sparsify import resolve_memory, resolve_sparsifier
from lightning_safusion.strategy import SAFusionStrategy
from lightning_safusion.systems import EngineSystem, HookSystem, resolve_system

# processes of a benchmark find each other through torch
_NO_OPTIONS = ("system", "transport")
# options of which a part with options can be made
_PARTS = {"compressor": resolve_sparsifier, "memory": resolve_memory}
_DENSITY = 0.01  # where only the names of the options are to be checked


@dataclass(frozen=True)
class Row:
    """A system with options: arguments of :class:`SAFusionStrategy`, and of the optimizer where a row is trained."""

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

    def strategy(self, density: float, **defaults: Any) -> SAFusionStrategy:
        """A new strategy, with the density and the defaults where the row has none of its own.

        Raises:
            ValueError: If an option has a value that it cannot have; names the row.
        """
        options: dict[str, Any] = {"process_group_backend": "gloo", "density": density} | defaults | dict(self.options)
        try:
            for option, resolve in _PARTS.items():
                if "[" in str(options.get(option, "")):
                    options[option] = make_part(options[option], resolve)
            return SAFusionStrategy(system=self.system, **options)
        except (MisconfigurationException, TypeError, ValueError) as error:
            raise ValueError(f"row {self.name!r}: {error}") from error


def parse_row(name: str, training: Sequence[str] = ()) -> Row:
    """Reads one row.

    Args:
        name: ``SYSTEM`` or ``SYSTEM[OPTION=VALUE,...]``. Options are the arguments of :class:`SAFusionStrategy`; the
            patterns of ``dense`` are separated by ``|``.
        training: Names of further options, numbers, which are those of an optimizer.

    Raises:
        ValueError: If there is no such system or option, or an option has a value that it cannot have.
    """
    system, texts = read(name)
    resolve_system(system)
    hints = hints_of(SAFusionStrategy.__init__, without=_NO_OPTIONS) | dict.fromkeys(training, float)
    values = typed(name, texts, hints)
    own = {option: value for option, value in values.items() if option in training}
    row = Row(name, system, tuple((o, v) for o, v in values.items() if o not in own), tuple(own.items()))
    if row.published.ddp_hook is not None and "density" in values:
        raise ValueError(f"row {name!r}: {system} is DDP with a hook of torch and has no density")
    row.strategy(_DENSITY)
    return row

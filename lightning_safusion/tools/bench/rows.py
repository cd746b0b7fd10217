"""Rows of a benchmark, systems with options of the strategy (see :mod:`~lightning_safusion.notation`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_safusion.fusion.plans.registry import resolve_fusion
from lightning_safusion.notation import hints_of, make_part
from lightning_safusion.sparsify import resolve_memory, resolve_sparsifier
from lightning_safusion.strategy import SAFusionStrategy
from lightning_safusion.systems import EngineSystem, HookSystem, resolve_system
from lightning_safusion.systems.settings import read_row

# processes of a benchmark find each other through torch
_NO_OPTIONS = ("system", "transport")
_PARTS: dict[str, Callable[[str], object]] = {
    "compressor": resolve_sparsifier,
    "fusion": resolve_fusion,
    "memory": resolve_memory,
}
_DENSITY = 0.01  # of a strategy that is only made to check its options


@dataclass(frozen=True)
class Row:
    """A system with options.

    Args:
        name: As it is written.
        system: Name of the system.
        options: Arguments of :class:`SAFusionStrategy`.
    """

    name: str
    system: str
    options: Mapping[str, Any]

    @property
    def published(self) -> EngineSystem | HookSystem:
        """The row in the table of systems."""
        return resolve_system(self.system)

    def strategy(self, density: float | None, **defaults: Any) -> SAFusionStrategy:
        """A new strategy, with the defaults where the row has none of its own, and the density if its system has one.

        Args:
            density: None leaves it to the strategy.
            defaults: Further arguments of the strategy.

        Raises:
            ValueError: If an option cannot have its value; names the row.
        """
        options: dict[str, Any] = {"process_group_backend": "gloo", **defaults, **self.options}
        if self.published.ddp_hook is None:
            options.setdefault("density", density)
        try:
            for option, resolve in _PARTS.items():
                if "[" in str(options.get(option, "")):
                    options[option] = make_part(options[option], resolve)
            return SAFusionStrategy(system=self.system, **options)
        except (MisconfigurationException, TypeError, ValueError) as error:
            raise ValueError(f"row {self.name!r}: {error}") from error


def parse_row(name: str) -> Row:
    """Reads one row; patterns of ``dense`` are separated by ``|``.

    Raises:
        ValueError: If there is no such system or option, or an option cannot have its value.
    """
    published, options = read_row(name, hints_of(SAFusionStrategy.__init__, without=_NO_OPTIONS))
    row = Row(name, published.name, options)
    row.strategy(_DENSITY)
    return row

"""Rows of a benchmark: systems with options (see :mod:`~lightning_safusion.notation`), and those to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_safusion.baselines.hooks import HookExchange
from lightning_safusion.fusion.plans.registry import resolve_fusion
from lightning_safusion.integration.model_parallel import SAFusionModelParallelStrategy
from lightning_safusion.notation import hints_of, make_part
from lightning_safusion.sparsify import resolve_memory, resolve_sparsifier
from lightning_safusion.strategy import SAFusionStrategy
from lightning_safusion.systems import SHARDED_ROWS, EngineSystem, HookSystem, resolve_system
from lightning_safusion.systems.settings import read_row

#: The row without any exchange: what a step takes if the network costs nothing.
FLOOR = "no-exchange"
#: The floor with workers that wait for each other: what a step takes at least if gradients are exchanged at all.
IN_STEP = "barrier"
#: The strategy of the user's own file, where that is no plain DDP.
YOURS = "yours"
# processes of a benchmark find each other through torch
_NO_OPTIONS = ("system", "transport")
_PARTS: dict[str, Callable[[str], object]] = {
    "compressor": resolve_sparsifier,
    "fusion": resolve_fusion,
    "memory": resolve_memory,
}
_S = TypeVar("_S")
_DENSITY = 0.01  # of a strategy that is only made to check its options


@dataclass(frozen=True)
class Row:
    """A system with options: arguments of :class:`SAFusionStrategy`."""

    name: str
    system: str
    options: Mapping[str, Any]

    @property
    def published(self) -> EngineSystem | HookSystem:
        """The row in the table of systems."""
        return resolve_system(self.system)

    def strategy(self, density: float | None, **defaults: Any) -> SAFusionStrategy:
        """The same as :meth:`made`, for models that are not sharded."""
        return self.made(SAFusionStrategy, density, **defaults)

    def made(self, kind: Callable[..., _S], density: float | None, **defaults: Any) -> _S:
        """A new strategy.

        Args:
            kind: Its class.
            density: Where the row has none and its system has one; None leaves it to the strategy.
            defaults: Further arguments, where the row has none of its own.

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
            return kind(system=self.system, **options)
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


def row_of(name: str) -> str:
    """A row by either of its names, with options or without."""
    system, bracket, options = name.partition("[")
    return SHARDED_ROWS.get(system, system) + bracket + options


class NoExchange(DDPStrategy):
    """DDP whose workers keep their own gradients."""

    @override
    def _register_ddp_hooks(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            HookExchange("local", None).register(self.model)


class Apart(SAFusionModelParallelStrategy):
    """Replicas of a sharded model that keep their own gradients."""

    @override
    def _attach(self, module: nn.Module) -> None:
        from lightning_safusion.integration.sharded import set_hooks, sharded_roots

        for _, root in sharded_roots(module):
            set_hooks(root, lambda *_: None)


class _Together(ParallelStrategy):
    """Workers exchange a single number at the end of every backward pass."""

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        torch.distributed.all_reduce(torch.zeros(1, dtype=torch.float32, device=self.root_device))


class InStep(_Together, NoExchange):
    """Workers that keep their own gradients, and wait for each other."""


class ApartInStep(_Together, Apart):
    """The same with replicas of a sharded model."""


#: Strategies of the rows that are no systems.
REFERENCE_STRATEGIES = MappingProxyType({FLOOR: NoExchange, IN_STEP: InStep})
#: The same for models that are sharded.
SHARDED_REFERENCES = MappingProxyType({FLOOR: Apart, IN_STEP: ApartInStep})

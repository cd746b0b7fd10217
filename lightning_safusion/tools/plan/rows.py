"""Rows of a prediction, systems with options as in ``saf-pooled[collective=sharded,density=0.1]``: arguments of the
strategy, which become the settings that it would have, so that both refuse the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_safusion.comm.catalogue import find_collective
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.notation import hints_of, read, typed
from lightning_safusion.systems import SHARDED_ROWS, EngineSystem, resolve_system
from lightning_safusion.systems.settings import JobParts, job_parts

# Of the strategy's arguments those that change a prediction.
_PARTS = ("compressor", "fusion", "scope", "quota", "collective", "wire", "dense_below", "offload", "select_by")
_HINTS = {"density": float} | {name: hints_of(EngineSystem.__init__)[name] for name in _PARTS}
# Policies that cut buffers, whatever their messages are; others have a schedule of their own.
_PLANS = ("adaptive", "aligned", "wfbp", "single", "mgwfbp", "omgs")
# Parts whose schedule knows no others than these.
_ALONE: Mapping[tuple[str, Any], Mapping[str, tuple[Any, ...]]] = {
    ("collective", "hybrid"): {"fusion": ("selective",)},
    ("collective", "oktopk"): {"fusion": ("single",), "scope": ("group",)},
    ("collective", "gtopk"): {"fusion": ("single",), "scope": ("group",)},
    ("compressor", "adtopk"): {"fusion": ("wfbp",), "collective": ("allgather",), "dense_below": (0,)},
    ("compressor", "none"): {"fusion": (*_PLANS, "horovod"), "collective": ("auto", "allreduce")},
    ("fusion", "selective"): {"collective": ("allgather", "hybrid"), "dense_below": (0,)},
    ("fusion", "naive"): {"collective": ("allgather",)},
    ("fusion", "horovod"): {"collective": ("allgather", "allreduce")},
    ("fusion", "cupcake"): {"collective": ("allgather",), "scope": ("group",)},
    ("fusion", "hipress"): {"collective": ("auto",)},
    ("fusion", "espresso"): {"collective": ("auto",)},
    ("offload", True): {"fusion": ("selective",)},
}


@dataclass(frozen=True)
class SimulatedRow:
    """A system with options, which are arguments of the strategy; and the parts that it would have. The option
    ``"density"`` takes the place of the job's."""

    name: str
    parts: JobParts
    options: Mapping[str, Any]

    @property
    def head(self) -> str:
        """Its name without options."""
        return self.name.partition("[")[0]

    @property
    def sparse(self) -> bool:
        """Whether it sends less than all of every gradient."""
        return self.parts.system.ddp_hook is None and sends_less(self.parts.settings)

    @property
    def conserves(self) -> bool:
        """Whether the residual keeps everything that is not sent: the tree of gTop-k drops entries."""
        return find_collective(self.parts.settings.collective).exchange.ability.conserves

    @property
    def known_as(self) -> str:
        """What its accuracy is known by: the system, unless it has other parts."""
        return self.name if set(self.options) - {"density"} else self.parts.system.name


@cache
def simulated_row(name: str) -> SimulatedRow:
    """Reads one row: a system or one of :data:`SHARDED_ROWS`, with options.

    Raises:
        ValueError: If there is no such system or option, an option cannot have its value, the strategy would refuse it,
            or there is no schedule for these parts; names the row.
    """
    head, texts = read(name)
    options = typed(name, texts, _HINTS)
    system = resolve_system(SHARDED_ROWS.get(head, head))
    given = {part: value for part, value in options.items() if part != "density"}
    for part, value in given.items():
        if "[" in str(value):
            raise ValueError(f"row {name!r}: parts are simulated without options of their own, got {part}={value!r}")
    try:
        parts = job_parts(system.name, options.get("density"), given)
        if system.ddp_hook is None:
            _check_schedule(parts)
    except (MisconfigurationException, ValueError) as error:
        raise ValueError(f"row {name!r}: {error}") from error
    return SimulatedRow(name, parts, options)


def sends_less(settings: EngineSettings) -> bool:
    """Whether an engine with these settings sends less than all of every gradient."""
    return settings.compressor.name != "none" and find_collective(settings.collective).choice != "allreduce"


def _check_schedule(parts: JobParts) -> None:
    """Refuses parts that the schedule of another part would not look at."""
    settings = parts.settings
    present = {
        "compressor": settings.compressor.name,
        "fusion": settings.fusion.name,
        "scope": settings.scope,
        "collective": settings.collective,
        "offload": settings.offload,
        "dense_below": parts.dense_rules[1],
    }
    for (part, value), others in _ALONE.items():
        for other, able in others.items() if present[part] == value else ():
            if present[other] not in able:
                choice = " or ".join(map(repr, able))
                raise ValueError(
                    f"{part}={value!r} is simulated only with {other}={choice}, got {other}={present[other]!r}"
                )

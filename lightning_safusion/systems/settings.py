"""From a row of parts, or the arguments of the strategy, to the settings of the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

from lightning_safusion.announce import MisconfigurationException
from lightning_safusion.fusion.conflicts import FEW_BITS
from lightning_safusion.fusion.plans.registry import resolve_fusion
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.notation import read, typed
from lightning_safusion.sparsify.memory.residual import resolve_memory
from lightning_safusion.sparsify.registry import resolve_sparsifier
from lightning_safusion.sparsify.schedule import DensitySchedule, SuitedDensity, resolve_density
from lightning_safusion.systems.rows import DEFAULT, EngineSystem, HookSystem, resolve_system

# DDP with a hook has no parts; the strategy reads a plain memory of its settings.
_NO_PARTS = EngineSystem("", "", "", "single")

# Where one of the default system's parts does not go with given ones: the plain part that takes its place, and when.
_GIVES_WAY: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "quota": ("proportional", lambda parts: parts.scope == "group" or parts.offload),
    # rounding errors need a memory
    "wire": ("auto", lambda parts: parts.memory.name == "none" or not FEW_BITS.met(parts)),
}
# From what is given to the part. Other settings are values.
_RESOLVERS: dict[str, Callable[[Any], Any]] = {
    "compressor": resolve_sparsifier,
    "density": lambda density: SuitedDensity() if density is None else resolve_density(density),
    "fusion": resolve_fusion,
    # a copy, since one object may be given to several strategies, and a memory holds the residual of one
    "memory": lambda memory: copy.deepcopy(resolve_memory(memory)),
}


@dataclass(frozen=True)
class JobParts:
    """A system, with given arguments in place of its own parts.

    Args:
        system: The row.
        settings: Of the engine; those of a plain one where the system is a hook.
        dense_rules: Dense tensors: patterns of names, of fewer elements, of fewer dimensions.
    """

    system: EngineSystem | HookSystem
    settings: EngineSettings
    dense_rules: tuple[list[str], int, int]


def read_row(text: str, hints: Mapping[str, Any]) -> tuple[EngineSystem | HookSystem, dict[str, Any]]:
    """Reads a system with options, such as ``"saf-pooled[wire=q4,density=0.1]"``; lists are separated by ``|``.

    Args:
        text: Of both.
        hints: Annotation of every option that there is, of which the values are made.

    Raises:
        ValueError: If there is no such system or option, or an option cannot have its value.
    """
    name, texts = read(text)
    options = typed(text, texts, hints)
    return resolve_system(name), options


def job_parts(
    system: str, density: float | DensitySchedule | None, parts: Mapping[str, Any], transport: str = "torch"
) -> JobParts:
    """The parts of a job, from the arguments of the strategy.

    Args:
        system: Name of the system.
        density: Share of the elements that is sent, or its schedule; None: one that suits the optimizers.
        parts: Given parts by name; those of the system take the place of None.
        transport: Library that carries the bytes.

    Raises:
        MisconfigurationException: If parts were given to a system that has none.
        TypeError: If a part is of another type.
        ValueError: If a name is unknown, or two parts do not go together.
    """
    row = resolve_system(system)
    given = {name: part for name, part in parts.items() if part is not None}
    if isinstance(row, HookSystem):
        arguments = {"density": density, **given, "transport": transport if transport != "torch" else None}
        named = [name for name, value in arguments.items() if value is not None]
        if named:
            raise MisconfigurationException(
                f"system={row.name!r} works without the engine: it has no {', '.join(named)}. Leave them out, or "
                "choose another system."
            )
        return JobParts(row, engine_settings(_NO_PARTS, None, {}), ([], 0, 0))
    if given.get("fusion") == "behind":
        given = {"scope": "group", "dense_below": 0} | given
    settings = engine_settings(row, density, given)
    dense = given.get("dense", ())
    below = given.get("dense_below", row.dense_below)
    below_ndim = given.get("dense_below_ndim", row.dense_below_ndim)
    _check_dense_rules(dense, below, below_ndim)
    return JobParts(row, settings, (list(dense), below, below_ndim))


def _check_dense_rules(dense: Sequence[str], dense_below: int, dense_below_ndim: int) -> None:
    if isinstance(dense, str):
        raise TypeError(f"dense is a list of patterns, got the text {dense!r}: write [{dense!r}]")
    for pattern in dense:
        if not isinstance(pattern, str):
            raise TypeError(f"dense is a list of patterns, texts such as '*.bias', got {pattern!r}")
    counts = ("dense_below", dense_below, "elements"), ("dense_below_ndim", dense_below_ndim, "dimensions")
    for name, count, of in counts:
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name} is a number of {of}, an integer, got {count!r}")
        if count < 0:
            raise ValueError(f"{name} is a number of {of}, 0 or more, got {count}")


def engine_settings(
    row: EngineSystem, density: float | DensitySchedule | None, given: Mapping[str, Any]
) -> EngineSettings:
    """The parts of a system, replaced by the given parts of the same names.

    Where the default system's own quota rule or wire format does not go with a given part, it is replaced by the plain
    one. Parts of other systems are those of their papers, and given parts are never changed: the engine refuses what
    does not fit.

    Raises:
        ValueError: If a name is unknown, or two parts do not go together.
    """
    own = {field.name: getattr(row, field.name) for field in fields(EngineSettings) if hasattr(row, field.name)}
    own |= {"density": density, "fusion": row.policy(), "own_buffers": row.own_buffers and "collective" not in given}
    own["integrity"] = None  # no system's: what is sent does not depend on it
    chosen = own | {name: value for name, value in given.items() if name in own}
    parts = {name: _RESOLVERS[name](value) if name in _RESOLVERS else value for name, value in chosen.items()}
    if row.name == DEFAULT:
        made = SimpleNamespace(**parts)
        parts |= {name: plain for name, (plain, where) in _GIVES_WAY.items() if name not in given and where(made)}
    return EngineSettings(**parts)

"""From a system and the arguments of the strategy to the settings of the engine."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_safusion.comm.catalogue import find_collective
from lightning_safusion.fusion.plans.policy import FusionPolicy
from lightning_safusion.fusion.plans.registry import resolve_fusion
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.integration.parameters import check_dense_rules, refuse_parts
from lightning_safusion.sparsify.memory.contract import Memory
from lightning_safusion.sparsify.memory.residual import resolve_memory
from lightning_safusion.sparsify.registry import resolve_sparsifier
from lightning_safusion.sparsify.schedule import DensitySchedule, resolve_density
from lightning_safusion.systems.kinds import EngineSystem, HookSystem
from lightning_safusion.systems.rows import DEFAULT, resolve_system

# DDP with a hook has no parts; what the strategy reads of its settings (a plain memory, a constant density) is theirs.
_NO_PARTS = EngineSystem("", "", "", "single")


@dataclass(frozen=True)
class JobParts:
    """A system with the arguments that were given in the places of its parts.

    Args:
        system: The row.
        settings: Of the engine; those of a plain one where the system is a hook.
        dense: Shell patterns of parameter names that are always dense.
        dense_below: Tensors of fewer elements are dense.
        dense_below_ndim: Tensors of fewer dimensions are dense.
    """

    system: EngineSystem | HookSystem
    settings: EngineSettings
    dense: tuple[str, ...] = ()
    dense_below: int = 0
    dense_below_ndim: int = 0


def job_parts(
    system: str, density: float | DensitySchedule, parts: Mapping[str, Any], transport: str = "torch"
) -> JobParts:
    """From the arguments of the strategy, ``parts`` by name among them, to all that a job needs to know of its system;
    parts that are None are the system's.

    Raises:
        MisconfigurationException: If parts were given to a system that has none.
        TypeError: If a part is of another type.
        ValueError: If a name is unknown, or two parts do not go together.
    """
    row = resolve_system(system)
    given = {name: part for name, part in parts.items() if part is not None}
    if isinstance(row, HookSystem):
        refuse_parts(row.name, given, transport)
        return JobParts(row, engine_settings(_NO_PARTS, density, {}))
    if given.get("fusion") == "behind":
        given = {"scope": "group", "dense_below": 0} | given
    settings = engine_settings(row, density, given)
    dense = given.get("dense", ())
    below = given.get("dense_below", row.dense_below)
    below_ndim = given.get("dense_below_ndim", row.dense_below_ndim)
    check_dense_rules(dense, below, below_ndim)
    return JobParts(row, settings, tuple(dense), below, below_ndim)


def engine_settings(row: EngineSystem, density: float | DensitySchedule, given: Mapping[str, Any]) -> EngineSettings:
    """The parts of a system, with what was given in the places of its own.

    Where the default system's own quota rule or wire format does not go with a part that was given, it gives way:
    whoever asks for one part of the default to be different means the rest as far as it fits. Parts of other systems
    are those of their papers, and parts that were given are never changed: the engine refuses what does not fit.

    Raises:
        ValueError: If a name is unknown, or two parts do not go together.
    """
    fusion = resolve_fusion(given["fusion"]) if "fusion" in given else row.policy()
    # a copy, since one object may be given to several strategies, and a memory holds the residual of one
    memory = copy.deepcopy(resolve_memory(given.get("memory", row.memory)))
    fitting = {**_fitting(row, given, fusion, memory), **given}
    return EngineSettings(
        compressor=resolve_sparsifier(given.get("compressor", row.compressor)),
        density=resolve_density(density),
        fusion=fusion,
        memory=memory,
        scope=given.get("scope", row.scope),
        quota=fitting.get("quota", row.quota),
        collective=given.get("collective", row.collective),
        wire=fitting.get("wire", row.wire),
        own_buffers=row.own_buffers and "collective" not in given,
        offload=given.get("offload", row.offload),
    )


def _fitting(row: EngineSystem, given: Mapping[str, Any], fusion: FusionPolicy, memory: Memory) -> dict[str, str]:
    """What takes the place of the default's quota rule and wire format, where parts that were given exclude them."""
    if row.name != DEFAULT:
        return {}
    parts = {}
    if given.get("scope") == "group" or given.get("offload"):
        parts["quota"] = "proportional"
    collective = given.get("collective", row.collective)
    # without a memory nobody would keep what rounding takes away
    if fusion.streams or not find_collective(collective).few_bits or memory.name == "none":
        parts["wire"] = "auto"
    return parts

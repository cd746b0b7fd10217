"""From a system and the arguments of the strategy to the settings of the engine."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from lightning_safusion.fusion.engine import FEW_BITS_COLLECTIVES, EngineSettings
from lightning_safusion.fusion.policy import FusionPolicy
from lightning_safusion.fusion.registry import resolve_fusion
from lightning_safusion.sparsify.feedback import resolve_memory
from lightning_safusion.sparsify.memory import Memory
from lightning_safusion.sparsify.registry import resolve_sparsifier
from lightning_safusion.sparsify.schedule import DensitySchedule, resolve_density
from lightning_safusion.systems import DEFAULT, System


def engine_settings(row: System, density: float | DensitySchedule, given: Mapping[str, Any]) -> EngineSettings:
    """The parts of a system, with what was given in the places of its own.

    Where the default system's own quota rule or wire format does not go with a part that was given, it gives way:
    whoever asks for one part of the default to be different means the rest as far as it fits. Parts of other systems
    are those of their papers, and parts that were given are never changed: the engine refuses what does not fit.

    Args:
        row: The system.
        density: Share of the elements to send, or a schedule.
        given: Arguments of the strategy that are not None, by name.

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


def _fitting(row: System, given: Mapping[str, Any], fusion: FusionPolicy, memory: Memory) -> dict[str, str]:
    """What takes the place of the default's quota rule and wire format, where parts that were given exclude them."""
    if row.name != DEFAULT:
        return {}
    parts = {}
    if given.get("scope") == "group" or given.get("offload"):
        parts["quota"] = "proportional"
    collective = given.get("collective", row.collective)
    # without a memory nobody would keep what rounding takes away
    if fusion.streams or collective not in FEW_BITS_COLLECTIVES or memory.name == "none":
        parts["wire"] = "auto"
    return parts

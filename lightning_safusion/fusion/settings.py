"""What one job does with its gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from lightning_safusion.comm.catalogue import AUTO_SHARDED, Collective, find_collective, shards_pay
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.cost import LinearCost, allgather_bytes, ring_allreduce_bytes
from lightning_safusion.comm.wire.formats import message_bytes
from lightning_safusion.fusion.conflicts import CONFLICTS, SHARDS, UPDATES
from lightning_safusion.fusion.layout import Layout, TensorSpec
from lightning_safusion.fusion.plans.cadence import Cadence
from lightning_safusion.fusion.plans.policy import FusionPolicy
from lightning_safusion.fusion.quota import tensor_quotas
from lightning_safusion.lookup import QuotaRule, Scope, SelectBy, check_name
from lightning_safusion.sparsify.base import Sparsifier
from lightning_safusion.sparsify.memory.contract import Memory
from lightning_safusion.sparsify.memory.momentum import DGCMemory
from lightning_safusion.sparsify.schedule import ConstantDensity, DensitySchedule

#: How damage of messages is noticed.
Integrity: TypeAlias = Literal["checksum"]


@dataclass(frozen=True)
class EngineSettings:
    """What one job does with its gradients; equal on all ranks.

    Args:
        compressor: Chooses the elements.
        density: Share of the elements, by step and epoch.
        fusion: Cuts the ready order into buffers.
        memory: Error feedback.
        scope: ``"tensor"`` (before fusion) or ``"group"`` (after it).
        quota: ``"proportional"``, ``"shared"``, ``"pooled"``, or ``"auto"``.
        collective: By name (see ``comm/catalogue.py``).
        wire: Wire format by name.
        own_buffers: Keep the engine even if every buffer is dense: its buffers are what is compared.
        offload: Select from tensors on a thread of the host where that delays nothing.
        select_by: Units in which elements are compared: ``"gradient"``, ``"update"`` (how far the optimizer would move
            them), or ``"auto"``.
        integrity: ``"checksum"``: messages have one, and damaged ones are refused; None: they have none.

    Raises:
        ValueError: If a choice is unknown, or two do not go together.
        TypeError: If ``offload`` is not a bool.
    """

    compressor: Sparsifier
    density: DensitySchedule
    fusion: FusionPolicy
    memory: Memory
    scope: Scope = "tensor"
    quota: QuotaRule = "proportional"
    collective: str = "auto"
    wire: str = "auto"
    own_buffers: bool = False
    offload: bool = False
    select_by: SelectBy = "gradient"
    integrity: Integrity | None = None

    def __post_init__(self) -> None:
        check_name("scope", self.scope, get_args(Scope))
        check_name("quota", self.quota, get_args(QuotaRule))
        check_name("select_by", self.select_by, get_args(SelectBy))
        if self.integrity is not None:
            check_name("integrity", self.integrity, get_args(Integrity))
        if not isinstance(self.offload, bool):
            raise TypeError(f"offload must be True or False, got {self.offload!r}")
        for conflict in CONFLICTS:
            conflict.check(self)

    @property
    def knows_updates(self) -> bool:
        """Elements can be compared in the units of the update: none are again, as gradients, by the collective."""
        return UPDATES.met(self)

    def collective_over(self, world_size: int, gather: LinearCost | None = None, message: float = 0.0) -> Collective:
        """What carries the buffers of so many workers: shards where :func:`shards_pay`, if the quotas are ``"auto"``
        too; other quotas are those of a paper. ``gather``, ``message``: see :func:`shards_pay`.
        """
        free = self.collective == self.quota == "auto" and SHARDS.met(self)
        # DGC zeroes the momentum of what is sent: an owner's own would go with sums that it keeps
        free = free and not isinstance(self.memory, DGCMemory)
        if free and shards_pay(world_size, gather, message):
            return AUTO_SHARDED
        return find_collective(self.collective)

    def message(self, specs: Sequence[TensorSpec]) -> float:
        """Bytes that a worker sends in its first step, all messages of a sparse all-gather together."""
        quotas = tensor_quotas(Layout(tuple(specs)), self.compressor, self.density(0, 0))
        # tensors of one size have messages of one size
        rows = zip(specs, quotas.counts.tolist(), quotas.dense.tolist(), strict=True)
        alike = Counter((spec.numel, spec.dtype, count, dense) for spec, count, dense in rows)
        return sum(
            number * (numel * dtype.itemsize if dense else message_bytes(self.wire, numel, count, dtype))
            for (numel, dtype, count, dense), number in alike.items()
        )

    def describe(self) -> dict[str, str]:
        """Every setting as text, the same in every process for the same settings."""
        return {field.name: describe(getattr(self, field.name)) for field in fields(self)}

    @property
    def replaceable(self) -> bool:
        """Whether plain DDP may replace the engine while the job runs."""
        needed = self.memory.shapes_updates or self.memory.lives_on_sparsity or self.own_buffers
        return not needed and self.collective == "auto" and isinstance(self.density, ConstantDensity)

    def dense_reason(self, specs: Sequence[TensorSpec], world_size: int) -> str | None:
        """Why plain DDP does this job at least as well; None if it does not.

        The bytes of a sparse all-gather grow with the number of workers, those of others hardly.
        """
        if (self.own_buffers and world_size > 1) or self.memory.shapes_updates:  # the memory is part of the algorithm
            return None
        if world_size == 1:
            return "there is one worker, and nothing to exchange"
        if self.collective == "allreduce":
            return "collective='allreduce' sends every gradient dense"
        if not isinstance(self.density, ConstantDensity) or self.collective != "auto":
            return None
        density = self.density(0, 0)
        if density >= 1 or self.compressor.name == "none":
            return "everything is sent (density 1)"
        reduced = sum(spec.numel * spec.dtype.itemsize for spec in specs)
        sharded = self.collective_over(world_size).exchange is ShardedExchange
        received = ShardedExchange.received if sharded else allgather_bytes
        by_sparse, by_reduce = received(world_size, self.message(specs)), ring_allreduce_bytes(world_size, reduced)
        if by_sparse < by_reduce:
            return None
        return (
            f"at density {density:g} each of {world_size} workers would receive {by_sparse:,.0f} bytes per step by "
            f"sparse {'shards' if sharded else 'all-gather'}, {by_reduce:,.0f} by dense all-reduce"
        )


def describe(part: Any) -> str:
    """A part and its public options as text."""
    if isinstance(part, (str, int, float, bool, type(None))):
        return repr(part)
    if isinstance(part, (list, tuple)):
        return f"[{', '.join(map(describe, part))}]"
    options = {key: value for key, value in sorted(vars(part).items()) if not key.startswith("_")}
    plain = (str, int, float, bool, type(None), list, tuple, DensitySchedule, FusionPolicy, Cadence)
    shown = ", ".join(f"{key}={describe(value)}" for key, value in options.items() if isinstance(value, plain))
    return f"{type(part).__name__}({shown})"

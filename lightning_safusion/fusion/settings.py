"""What one job does with its gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

from lightning_safusion.comm.catalogue import AUTO_SHARDED, Collective, find_collective, shards_pay
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.cost import LinearCost, allgather_bytes, ring_allreduce_bytes
from lightning_safusion.comm.wire.elias_fano import EliasFanoCodec
from lightning_safusion.comm.wire.formats import message_bytes, value_format
from lightning_safusion.fusion.layout import Layout, TensorSpec
from lightning_safusion.fusion.plans.cadence import Cadence
from lightning_safusion.fusion.plans.policy import FusionPolicy
from lightning_safusion.fusion.plans.selective import Selective
from lightning_safusion.fusion.plans.ticking import Horovod
from lightning_safusion.fusion.quota import QuotaRule, Scope, tensor_quotas
from lightning_safusion.lookup import check_name
from lightning_safusion.sparsify.base import Sparsifier
from lightning_safusion.sparsify.memory.contract import Memory
from lightning_safusion.sparsify.memory.momentum import DGCMemory
from lightning_safusion.sparsify.schedule import ConstantDensity, DensitySchedule
from lightning_safusion.sparsify.selection.units import SelectBy


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

    def __post_init__(self) -> None:
        check_name("scope", self.scope, get_args(Scope))
        check_name("quota", self.quota, get_args(QuotaRule))
        check_name("select_by", self.select_by, get_args(SelectBy))
        if not isinstance(self.offload, bool):
            raise TypeError(f"offload must be True or False, got {self.offload!r}")
        self._check_scope()
        self._check_collective()
        if self.select_by == "update" and not self.knows_updates:
            raise ValueError(
                "select_by='update' compares elements before they are sent, with the optimizer's state at hand: it "
                f"needs offload=False, got {self.offload}, and a collective other than 'oktopk', 'gtopk' and "
                f"'allreduce', got {self.collective!r}; use select_by='gradient'"
            )

    @property
    def knows_updates(self) -> bool:
        """Elements can be compared in the units of the update: none are again, as gradients, by the collective."""
        return find_collective(self.collective).few_bits and not self.offload

    def collective_over(self, world_size: int, gather: LinearCost | None = None, message: float = 0.0) -> Collective:
        """What carries the buffers of so many workers: shards where :func:`shards_pay`, if the quotas are ``"auto"``
        too; other quotas are those of a paper.

        Args:
            world_size: Workers.
            gather, message: See :func:`shards_pay`.
        """
        free = self.collective == self.quota == "auto" and self._against_shards() is None
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

    def _against_shards(self) -> str | None:
        """Why tensors cannot be cut into shards; None if they can."""
        if self.quota == "pooled" or self.offload or self.fusion.streams or isinstance(self.fusion, Horovod):
            return (
                "gives every worker's part of a tensor a number of entries of its own: it needs offload=False, a quota "
                "other than 'pooled' and a fusion other than 'naive' or 'horovod', got "
                f"{self.offload}, {self.quota!r} and {self.fusion.name!r}"
            )
        if self.wire.rpartition("-")[0] not in ("", EliasFanoCodec.layout):
            return (
                f"sends positions as {EliasFanoCodec.layout!r} does, got wire={self.wire!r}: name the values alone, as "
                "in wire='bf16'"
            )
        return None

    def _check_scope(self) -> None:
        """Refuses parts that need selection from every tensor where it is from a buffer."""
        if self.quota in ("shared", "pooled") and self.scope == "group":
            raise ValueError(
                f"quota={self.quota!r} gives every tensor a floor, which scope='group' has none of: use scope='tensor'"
            )
        if self.offload and (self.scope == "group" or self.quota != "proportional" or self.fusion.streams):
            raise ValueError(
                "offload=True selects from each tensor alone, as soon as it is ready: it needs scope='tensor', "
                "quota='proportional' and a fusion other than 'naive'"
            )
        if isinstance(self.fusion, Selective) and self.scope == "group":
            raise ValueError(
                "fusion='selective' decides for every tensor of a buffer how much it sends: it needs scope='tensor'"
            )
        if self.fusion.streams and self.scope == "group":
            raise ValueError(
                f"fusion={self.fusion.name!r} fills buffers with selected elements: it needs scope='tensor'"
            )

    def _check_collective(self) -> None:
        """Refuses parts that do not go with the collective."""
        collective = find_collective(self.collective)
        if value_format(self.wire).few_bits and (self.fusion.streams or not collective.few_bits):
            raise ValueError(
                f"wire={self.wire!r} rounds so much that the rounding error must stay in the sender's residual, which "
                "only messages that arrive as they were sent allow: use a collective other than 'oktopk', 'gtopk' and "
                "'allreduce', and a fusion other than 'naive'"
            )
        if self.fusion.streams and (collective.dense_lane or collective.levels):
            raise ValueError(
                f"fusion={self.fusion.name!r} has no buffers that could have two lanes or levels: use "
                "collective='allgather'"
            )
        if collective.selects_itself and (self.compressor.name != "topk" or self.offload):
            raise ValueError(
                f"collective={self.collective!r} selects the largest sums of a node itself: it needs "
                f"compressor='topk' and offload=False, got {self.compressor.name!r} and {self.offload}"
            )
        problem = self._against_shards()
        if collective.exchange.cuts_tensors and problem is not None:
            raise ValueError(f"collective={self.collective!r} {problem}")
        several_phases = not collective.stream_ordered
        if isinstance(self.fusion, Horovod) and (self.scope == "group" or several_phases or self.offload):
            raise ValueError(
                "fusion='horovod' has other buffers in every step, which are not known before: it needs "
                f"scope='tensor', collective='allgather' or 'allreduce' and offload=False, got {self.scope!r}, "
                f"{self.collective!r} and {self.offload}"
            )
        if self.memory.lives_on_sparsity and collective.choice == "allreduce":
            raise ValueError(
                f"memory={self.memory.name!r} is the momentum of the residual, and collective='allreduce' sends every "
                "gradient dense, without a residual. Use collective='auto' or 'allgather'."
            )
        if self.memory.name == "ef21" and not collective.conserves:
            raise ValueError(
                f"memory='ef21' sums all that is sent, and collective={self.collective!r} drops some of it: the "
                "estimates would differ between workers. Use collective='allgather' or 'oktopk'."
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

"""Puts a job's parts together: settings, checks across ranks, and the controller."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from lightning_safusion.__about__ import __version__
from lightning_safusion.comm.calibrate import calibrate
from lightning_safusion.comm.cost import allgather_bytes, ring_allreduce_bytes
from lightning_safusion.comm.hierarchical import NodeTransports
from lightning_safusion.comm.transport import Transport, during
from lightning_safusion.comm.values import FloatValues
from lightning_safusion.comm.wire import resolve_codec
from lightning_safusion.fusion.controller import Controller
from lightning_safusion.fusion.costs import CollectiveChoice
from lightning_safusion.fusion.generator import Generator
from lightning_safusion.fusion.layout import Layout, TensorSpec
from lightning_safusion.fusion.offload import Offloader, selection_costs
from lightning_safusion.fusion.plan import SparseName
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.fusion.policy import FusionPolicy, Naive
from lightning_safusion.fusion.pool import BufferPool
from lightning_safusion.fusion.published import Horovod
from lightning_safusion.fusion.quota import QuotaRule, Scope, tensor_quotas
from lightning_safusion.fusion.replan import Cadence
from lightning_safusion.fusion.selective import Selective
from lightning_safusion.fusion.ticks import Ticks
from lightning_safusion.naming import suggestion
from lightning_safusion.sparsify.base import Sparsifier
from lightning_safusion.sparsify.memory import Memory
from lightning_safusion.sparsify.schedule import ConstantDensity, DensitySchedule

CollectiveOption = Literal["auto", "allgather", "hybrid", "hierarchical", "allreduce", "oktopk", "gtopk"]
#: Collectives that carry messages as written, so that their sender can keep what rounding to a few bits takes away.
FEW_BITS_COLLECTIVES: tuple[CollectiveOption, ...] = ("auto", "allgather", "hybrid")

# Differences that are named; those of a model may be thousands.
_SHOWN = 8


def _choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        hint = suggestion(value, allowed)
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.{hint}")


@dataclass(frozen=True)
class EngineSettings:
    """What one job does with its gradients; equal on all ranks.

    Args:
        compressor: Chooses the elements.
        density: Share of the elements, by step and epoch.
        fusion: Cuts the ready order into buffers.
        memory: Error feedback.
        scope: ``"tensor"`` (ahead of fusion) or ``"group"`` (behind it).
        quota: ``"proportional"`` or ``"pooled"``.
        collective: ``"auto"``, ``"allgather"``, ``"hybrid"``, ``"hierarchical"``, ``"allreduce"``, ``"oktopk"`` or
            ``"gtopk"``.
        wire: Wire format by name.
        own_buffers: Dense buffers are the point: plain DDP, whose own are other ones, never takes their place.
        offload: Select from tensors on a thread of the host where that holds nothing up.

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
    collective: CollectiveOption = "auto"
    wire: str = "auto"
    own_buffers: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        _choice("scope", self.scope, get_args(Scope))
        _choice("quota", self.quota, get_args(QuotaRule))
        _choice("collective", self.collective, get_args(CollectiveOption))
        if not isinstance(self.offload, bool):
            raise TypeError(f"offload must be True or False, got {self.offload!r}")
        self._check_scope()
        self._check_collective()

    def _check_scope(self) -> None:
        """Refuses parts that need selection from every tensor where it is from a buffer."""
        if self.quota == "pooled" and self.scope == "group":
            raise ValueError(
                "quota='pooled' gives every tensor a floor, which scope='group' has none of: use scope='tensor'"
            )
        if self.offload and (self.scope == "group" or self.quota == "pooled" or self.fusion.streams):
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
        values = resolve_codec(self.wire, 64, 1, torch.float32).values
        if not isinstance(values, FloatValues) and (self.fusion.streams or self.collective not in FEW_BITS_COLLECTIVES):
            raise ValueError(
                f"wire={self.wire!r} rounds so much that what is lost must stay with the sender, which only messages "
                "of one worker to all others allow: use collective='allgather', 'hybrid' or 'auto', and a fusion other "
                "than 'naive'"
            )
        if self.fusion.streams and self.collective in ("hybrid", "hierarchical"):
            raise ValueError(
                f"fusion={self.fusion.name!r} has no buffers that could have two lanes or levels: use "
                "collective='allgather'"
            )
        if self.collective == "hierarchical" and (self.compressor.name != "topk" or self.offload):
            raise ValueError(
                "collective='hierarchical' selects the largest sums of a node itself: it needs compressor='topk' and "
                f"offload=False, got {self.compressor.name!r} and {self.offload}"
            )
        several_phases = self.collective in ("hierarchical", "oktopk", "gtopk")
        if isinstance(self.fusion, Horovod) and (self.scope == "group" or several_phases or self.offload):
            raise ValueError(
                "fusion='horovod' has other buffers in every step, none of which is known before: it needs "
                f"scope='tensor', collective='allgather' or 'allreduce' and offload=False, got {self.scope!r}, "
                f"{self.collective!r} and {self.offload}"
            )
        if self.memory.lives_on_sparsity and self.collective == "allreduce":
            raise ValueError(
                f"memory={self.memory.name!r} is the momentum of what is held back, and collective='allreduce' sends "
                "every gradient whole: there would be none. Use collective='auto' or 'allgather'."
            )
        if self.memory.name == "ef21" and self.collective == "gtopk":
            raise ValueError(
                "memory='ef21' adds up all that is sent, and collective='gtopk' loses some of it on its way: the "
                "estimates would drift apart. Use collective='allgather' or 'oktopk'."
            )

    def describe(self) -> dict[str, str]:
        """Every setting as text, the same in every process for the same settings."""
        return {field.name: describe(getattr(self, field.name)) for field in fields(self)}

    @property
    def replaceable(self) -> bool:
        """Whether plain DDP may take the engine's place while the job runs."""
        lives_on = self.memory.shapes_updates or self.memory.lives_on_sparsity
        settled = isinstance(self.density, ConstantDensity) and not lives_on
        return settled and self.collective == "auto" and not self.own_buffers

    def dense_reason(self, specs: Sequence[TensorSpec], world_size: int) -> str | None:
        """Why plain DDP does this job at least as well; None if it does not.

        Sparse all-gather grows with the number of workers, dense all-reduce does not.
        """
        if self.own_buffers and world_size > 1:
            return None
        if self.memory.shapes_updates:
            return None  # it is part of the algorithm, on any number of workers and at any density
        if world_size == 1:
            return "there is one worker, and nothing to exchange"
        if self.collective == "allreduce" and not self.own_buffers:
            return "collective='allreduce' sends every gradient dense"
        if not isinstance(self.density, ConstantDensity) or self.collective != "auto":
            return None
        density = self.density(0, 0)
        if density >= 1 or self.compressor.name == "none":
            return "everything is sent (density 1)"
        layout = Layout(tuple(specs))
        quotas = tensor_quotas(layout, self.compressor, density)
        dense = sum(spec.numel * spec.dtype.itemsize for spec in specs)
        # tensors of one size have messages of one size
        alike = Counter(
            zip(
                (s.numel for s in specs),
                (s.dtype for s in specs),
                quotas.counts.tolist(),
                quotas.dense.tolist(),
                strict=True,
            )
        )
        sparse = sum(
            number * (numel * dtype.itemsize if whole else resolve_codec(self.wire, numel, count, dtype).nbytes)
            for (numel, dtype, count, whole), number in alike.items()
        )
        by_gather, by_reduce = allgather_bytes(world_size, sparse), ring_allreduce_bytes(world_size, dense)
        if by_gather < by_reduce:
            return None
        return (
            f"at density {density:g} each of {world_size} workers would receive {by_gather:,.0f} bytes per step by "
            f"sparse all-gather, {by_reduce:,.0f} by dense all-reduce"
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


def fingerprint(settings: EngineSettings, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """All that must be the same on every rank, as text: settings, versions, and the model's tensors in their order."""
    tensors = {f"parameter {s.name}": f"{s.shape} {s.dtype}{' dense' if s.dense else ''}" for s in specs}
    versions = {"lightning_safusion": __version__, "torch": torch.__version__}
    deterministic = {"deterministic": str(torch.are_deterministic_algorithms_enabled())}
    return settings.describe() | deterministic | versions | tensors


def check_equal(transport: Transport, values: dict[str, str]) -> None:
    """Compares settings across ranks, and the order that they are in.

    Raises:
        RuntimeError: On every rank, naming the settings that differ, with both values.
    """
    with during("set-up, when workers compare their settings"):
        everyone = transport.gather_objects(values)
    for rank, theirs in enumerate(everyone):
        first = everyone[0]
        different = [
            (key, first.get(key), theirs.get(key)) for key in first | theirs if first.get(key) != theirs.get(key)
        ]
        if not different and list(first) != list(theirs):
            number, swapped = next(
                (i, pair) for i, pair in enumerate(zip(first, theirs, strict=True)) if len({*pair}) > 1
            )
            before = sum(not key.startswith("parameter ") for key in list(first)[:number])
            different = [(f"order of parameters, number {number - before}", *swapped)]
        if different:
            shown = "; ".join(
                f"{key}: rank 0 has {ours}, rank {rank} has {other}" for key, ours, other in different[:_SHOWN]
            )
            more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            raise RuntimeError(
                f"workers were started with different settings: {shown}{more}. Give all workers the same."
            )


def build_controller(
    settings: EngineSettings,
    specs: Sequence[TensorSpec],
    transport: Transport,
    device: torch.device,
    measure: bool = True,
    announce: Callable[[str], None] | None = None,
    overlap: bool = True,
    deferred: bool = False,
    node: Hashable = None,
    yields: bool = False,
) -> Controller:
    """Builds a job's controller. Collective: all ranks call it with equal settings.

    Args:
        settings: What to do with the gradients.
        specs: Trainable parameters in registration order.
        transport: Communicator of the buffers.
        device: Where the gradients live.
        measure: Plan with measured times. False: with modelled ones, so that a seeded run repeats bit for bit.
        announce: Told in one line what travels how, whenever that changes.
        overlap: Launch buffers while gradients still arrive; see :class:`Controller`.
        deferred: Never wait for the device within a step; see :class:`Controller`. Without effect where buffers fill at
            each worker's own pace.
        node: Name of the node that this rank runs on, for ``collective="hierarchical"``.
        yields: Plain DDP can take the engine's place.
    """
    layout = Layout(tuple(specs))
    settings.memory.world_size = transport.world_size
    settings.memory.bind(layout.edges.tolist(), device)
    # to the planner they are sparse exchanges like the all-gather, whose cost stands for theirs
    sparse: SparseName = "allgather"
    choice: CollectiveChoice = "allgather"
    if settings.collective == "auto" or settings.collective == "allgather" or settings.collective == "allreduce":
        choice = settings.collective
        if choice == "auto" and settings.memory.lives_on_sparsity:
            choice = "allgather"
    else:
        sparse = settings.collective
    timer = settings.fusion if isinstance(settings.fusion, Horovod) else None
    ticks = Ticks(transport.host_subgroup(), timer.cycle_s) if timer else None
    nodes = NodeTransports.make(transport, node) if sparse == "hierarchical" else None
    if nodes is not None and len(nodes.nodes) == 1 and announce is not None:
        announce("all workers are on one node, where collective='hierarchical' saves nothing: system='ddp' is faster")
    pool = _buffer_pool(settings, transport, device, sparse, nodes)
    # a copy: what it learns belongs to this job
    generator = Generator(layout, settings.memory, copy.deepcopy(settings.compressor), pool)
    wanted = settings.fusion.needs_costs or choice == "auto"
    prior = calibrate(transport, device) if measure and wanted else None
    # what narrow gradients cannot hold of a mean would stay in the memory; wide ones, DDP sends at twice the width
    yields = yields and settings.replaceable and all(spec.dtype == torch.float32 for spec in specs)
    planner = Planner(settings.fusion, transport, choice, prior, announce, yields)
    dense_first = choice != "allgather" and not settings.memory.shapes_updates
    # the others negotiate counts on the host
    deferred = deferred and not settings.fusion.streams and timer is None and sparse in ("allgather", "hybrid")
    offload = None
    if settings.offload:
        offload = Offloader(generator, *selection_costs(settings.compressor, device, measure))
    return Controller(generator, planner, transport, settings.density, dense_first, overlap, deferred, offload, ticks)


def _buffer_pool(
    settings: EngineSettings,
    transport: Transport,
    device: torch.device,
    sparse: SparseName,
    nodes: NodeTransports | None,
) -> BufferPool:
    """Collective where buffers need communicators of their own."""
    naive = settings.fusion if isinstance(settings.fusion, Naive) else None
    return BufferPool(
        # launched at each rank's own pace, between the collectives of the model's own backward (SyncBatchNorm)
        transport.subgroup() if isinstance(settings.fusion, Horovod) else transport,
        device,
        settings.scope,
        settings.quota,
        settings.wire,
        transport.subgroup() if naive else None,
        naive.buffer_elements if naive else 1,
        sparse,
        transport.subgroup() if sparse == "hybrid" else None,
        nodes,
    )

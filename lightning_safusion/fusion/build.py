"""Builds the engine of a job from its settings, compares these across ranks, and says what kernels do not know."""

from __future__ import annotations

import socket
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_safusion.__about__ import __version__
from lightning_safusion.comm.calibrate import calibrate
from lightning_safusion.comm.catalogue import Collective, find_collective
from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.comm.transport.interface import Transport, during
from lightning_safusion.comm.transport.sealed import SealedTransport
from lightning_safusion.comm.wire.elias_fano import EliasFanoCodec
from lightning_safusion.comm.wire.formats import value_format
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.fused import RESIDUALS
from lightning_safusion.fusion.launching.offloaded import Offloaded, selection_costs
from lightning_safusion.fusion.launching.planned import Launching
from lightning_safusion.fusion.launching.ticking import Ticking, Ticks
from lightning_safusion.fusion.layout import Layout, TensorSpec
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.fusion.plans.ticking import Horovod
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.fusion.space import GradientSpace
from lightning_safusion.kernels.cuda.tables import KINDS
from lightning_safusion.sparsify.basic import TopK

# Differences that are named; those of a model may be thousands.
_SHOWN = 8
_HOST = "name of the host"


@dataclass(frozen=True)
class JobTraits:
    """What the engine must know of a job beside its settings and tensors.

    Args:
        measure: Plan with measured times. False: with modelled ones, so that a seeded run repeats bit for bit.
        overlap: Launch buffers while gradients still arrive; see :class:`Engine`.
        deferred: Never wait for the device within a step; see :class:`Engine`. Ignored where buffers fill at each
            worker's own pace.
        node: Name of the node that this rank runs on, for ``collective="hierarchical"``.
        plain_ddp_allowed: Plain DDP may replace the engine if that is faster.
        hosts: Names of the workers' hosts by rank, for messages; empty if they are not known.
    """

    measure: bool = True
    overlap: bool = True
    deferred: bool = False
    node: Hashable = None
    plain_ddp_allowed: bool = False
    hosts: Sequence[str] = ()


def fingerprint(settings: EngineSettings, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """What must be the same on every rank, as text: settings, versions, and the model's tensors in their order."""
    tensors = {f"parameter {s.name}": f"{s.shape} {s.dtype}{' dense' if s.dense else ''}" for s in specs}
    versions = {"lightning_safusion": __version__, "torch": torch.__version__}
    deterministic = {"deterministic": str(torch.are_deterministic_algorithms_enabled())}
    return settings.describe() | deterministic | versions | tensors


def check_equal(transport: Transport, values: dict[str, str]) -> list[str]:
    """Compares settings across ranks, and the order that they are in; returns the names of the workers' hosts, by rank.

    Raises:
        RuntimeError: On every rank, naming the settings that differ, with both values.
    """
    with during("set-up, when workers compare their settings"):
        place = transport.place
        among = "" if place == transport.rank else f" (rank {place} of all workers)"  # where replicas have shards
        everyone = transport.gather_objects(values | {_HOST: socket.gethostname() + among})
    hosts = [theirs.pop(_HOST, "") for theirs in everyone]
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
    return hosts


def _collective(
    settings: EngineSettings,
    specs: Sequence[TensorSpec],
    world_size: int,
    links: Mapping[str, LinearCost] | None,
    announce: Callable[[str], None] | None,
) -> Collective:
    if links is None:
        return settings.collective_over(world_size)
    gather, message = links["allgather"], settings.message(specs)
    collective = settings.collective_over(world_size, gather, message)
    if collective is not settings.collective_over(world_size) and announce is not None:
        seconds = ShardedExchange.cost(gather, world_size)(message)
        announce(
            f"gradients go to owners and back (collective='sharded'): {1e3 * seconds:.3g} ms by the measured links, "
            f"{1e3 * gather(message):.3g} with collective='allgather'"
        )
    return collective


def build_engine(
    settings: EngineSettings,
    specs: Sequence[TensorSpec],
    transport: Transport,
    device: torch.device,
    traits: JobTraits | None = None,
    announce: Callable[[str], None] | None = None,
) -> Engine:
    """Builds a job's engine. Collective: all ranks call it with equal settings.

    Args:
        settings: What to do with the gradients.
        specs: Trainable parameters in registration order.
        transport: Communicator of the buffers.
        device: Where the gradients live.
        traits: What else there is to know; the defaults if None.
        announce: Called with a line when there is news of the plan, or of a slow worker.

    Raises:
        ValueError: If messages are to have checksums, and gradients live on a device.
    """
    traits = traits or JobTraits()
    if settings.integrity is not None and device.type != "cpu":
        raise ValueError(
            f"integrity={settings.integrity!r} is for gradients in host memory, got {device}: there kernels of the "
            "device write and read the messages, and they make no checksums. Leave it out"
        )
    layout = Layout(tuple(specs))
    settings.memory.bind(layout.edges.tolist(), device, transport.world_size)
    choice = find_collective(settings.collective).choice
    if choice == "auto" and settings.memory.lives_on_sparsity:
        choice = "allgather"
    prior = (
        calibrate(transport, device) if traits.measure and (settings.fusion.needs_costs or choice == "auto") else None
    )
    # on processors shards are more work, which can be more than they save
    links = None if device.type == "cpu" else prior
    collective = _collective(settings, specs, transport.world_size, links, announce)
    timer = settings.fusion if isinstance(settings.fusion, Horovod) else None
    ticks = Ticks(transport.host_subgroup(), timer.cycle_s) if timer and traits.overlap else None
    # launched at each rank's own pace, between the collectives of the model's own backward (SyncBatchNorm)
    carrier = transport if settings.integrity is None else SealedTransport(transport)
    communicators = collective.connect(carrier, traits.node, own=timer is not None)
    nodes = communicators.nodes
    if nodes is not None and len(nodes.nodes) == 1 and announce is not None:
        name = settings.collective
        announce(f"all workers are on one node, where collective={name!r} saves nothing: system='ddp' is faster")
    own_pace = transport.subgroup() if settings.fusion.streams else None
    space = GradientSpace(layout, settings, collective, communicators, device, own_pace)
    if prior is not None and collective.exchange is ShardedExchange:
        prior["allgather"] = ShardedExchange.cost(prior["allgather"], transport.world_size)
    # narrow gradients cannot represent a mean exactly: the rest stays in the residual; DDP sends wide ones as float64
    replaceable = settings.replaceable and all(spec.dtype == torch.float32 for spec in specs)
    yields = traits.plain_ddp_allowed and replaceable
    planner = Planner(settings.fusion, transport, choice, prior, announce, yields, traits.hosts)
    dense_first = choice != "allgather" and not settings.memory.shapes_updates
    # the others negotiate counts on the host
    deferred = traits.deferred and not settings.fusion.streams and timer is None and collective.stream_ordered
    launching = Launching(space, planner, dense_first)
    if settings.offload:
        costs = selection_costs(settings.compressor, device, traits.measure)
        launching = Offloaded(space, planner, dense_first, costs)
    elif ticks is not None:
        launching = Ticking(space, planner, dense_first, ticks)
    return Engine(launching, settings.density, traits.overlap, deferred)


def left_to_torch(settings: EngineSettings, specs: Sequence[TensorSpec], collective: Collective) -> list[str]:
    """What PyTorch's operations do in all buffers of a job because the kernels do not know it; empty if nothing.

    Of which buffers kernels do not write the messages is known only when these are planned: see ``FusedPath``.
    """
    exchange, found = collective.exchange, []
    if type(settings.memory) not in RESIDUALS:
        found.append(f"memory={settings.memory.name!r}")
    if settings.offload:
        found.append("offload=True")
    if settings.scope == "group":
        found.append("scope='group'")
    if settings.fusion.streams:
        found.append(f"fusion={settings.fusion.name!r}")
    elif exchange not in (SparseAllGather, ShardedExchange):
        found.append(f"collective={settings.collective!r}")
    elif exchange is ShardedExchange and type(settings.compressor) is not TopK:
        found.append(f"compressor={settings.compressor.name!r} with shards")
    layout, width = settings.wire.rpartition("-")[0], value_format(settings.wire).width
    if width < 4 or layout not in ("", EliasFanoCodec.layout):
        found.append(f"wire={settings.wire!r}")
    unknown = {spec.dtype for spec in specs} - {*KINDS}
    return found + [f"gradients in {str(dtype).removeprefix('torch.')}" for dtype in sorted(unknown, key=str)]

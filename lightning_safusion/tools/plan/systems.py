"""The published systems on the clock: the schedule of an iteration, from a system's row. All have the same engine and
wire, so that only the idea differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from lightning_safusion.baselines.hooks import POWERSGD_RANKS
from lightning_safusion.comm.catalogue import Collective, find_collective
from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.cost import log2_ceil
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.fusion.plans.costs import DDP_BUCKET, DDP_FIRST_BUCKET, ddp_buckets
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.policy import Cupcake, FusionPolicy, Naive
from lightning_safusion.fusion.plans.ticking import Horovod
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.systems import HookSystem
from lightning_safusion.tools.plan.cluster import CollectiveCost
from lightning_safusion.tools.plan.engine import mean_iteration
from lightning_safusion.tools.plan.job import Job, line
from lightning_safusion.tools.plan.paths import SELECT, FusedKernels, FusedShards, Path, TorchOperations
from lightning_safusion.tools.plan.per_tensor import adtopk, espresso, hipress, ssfusion
from lightning_safusion.tools.plan.rows import SimulatedRow, sends_less, simulated_row
from lightning_safusion.tools.plan.schedule import Iteration, Message, Schedule, Stream, Timer
from lightning_safusion.tools.plan.work import Span

# PowerSGD: compression pays if it saves this factor; kernels of one matrix, launched one by one.
_POWERSGD_MIN_RATE, _POWERSGD_LAUNCH = 2.0, 50e-6
# Of a buffer, for the bytes of an entry: formats of positions differ for spans of billions.
_CODEC_ELEMENTS = 1 << 24
# Elastic averaging reads and writes all weights this many times: 3 for the workers' distance, 6 to move them.
_ELASTIC_PASSES = 9


def is_counted(name: str) -> bool:
    """Whether the work of a device is counted for this row; else its time is an order of magnitude."""
    parts = simulated_row(name).parts
    if isinstance(parts.system, HookSystem):
        return parts.system.ddp_hook in ("none", "bf16", "fp16", "dear")
    settings = parts.settings
    kinds = settings.compressor.name in ("none", *SELECT) and settings.collective not in ("oktopk", "gtopk")
    return kinds and not find_collective(settings.collective).levels and not settings.offload


def run_system(name: str, job: Job, iterations: int = 20) -> Iteration:
    """The mean iteration of one row."""
    return mean_iteration(job.trace, job.cluster, build_schedule(name, job), iterations)


def build_schedule(name: str, job: Job) -> Schedule:
    """The iteration of a job under a row, see :func:`~lightning_safusion.tools.plan.rows.simulated_row`."""
    row = simulated_row(name)
    if isinstance(row.parts.system, HookSystem):
        return replace(_HOOKS[row.parts.system.ddp_hook](job), engine=False)
    job = _of_row(row, job)
    schedule = _engine_schedule(row.parts.settings, job)
    counted = row.sparse and job.cluster.device.selection is None
    return replace(schedule, end=job.cluster.device.seconds(job.path.end)) if counted else schedule


def _engine_schedule(settings: EngineSettings, job: Job) -> Schedule:
    policy, collective = settings.fusion, _collective_of(settings, job)
    sparse, dense = sends_less(settings), collective.choice != "allgather"
    if policy.name == "selective":
        return ssfusion(job, settings.offload, collective.dense_lane)
    if policy.name == "horovod":
        return _horovod(job, sparse)
    for part in (settings.collective, settings.compressor.name, policy.name):
        if part in _SPECIAL:
            return _SPECIAL[part](job)
    if collective.levels:
        return _hierarchical(job, policy, owners=collective.exchange.ability.cuts_tensors)
    if sparse and collective.exchange.ability.cuts_tensors:
        return _sharded(job, policy, dense)
    plan = policy.plan(job.group_costs(sparse=sparse, dense=dense))
    return job.schedule(plan, behind=settings.scope == "group")


def _of_row(row: SimulatedRow, job: Job) -> Job:
    settings, density = row.parts.settings, row.options.get("density", job.density)
    numel = min(int(job.numels.sum()), _CODEC_ELEMENTS)
    entries = max(1, int(numel * density))
    codec = resolve_codec(settings.wire, numel, entries, torch.float32)
    job = replace(
        job,
        density=density,
        dense_below=max(job.dense_below, row.parts.dense_rules[1]),
        entry_bytes=job.entry_bytes if settings.wire == "auto" else codec.nbytes / entries,
        by_update=settings.select_by != "gradient" and settings.knows_updates,
    )
    return replace(job, path=_path_of(settings, job, codec))


def _path_of(settings: EngineSettings, job: Job, codec: Codec) -> Path:
    """Fused kernels where all parts are those that they know."""
    values, compressor = codec.values, settings.compressor.name
    exchange = _collective_of(settings, job).exchange
    if settings.scope == "tensor" and values.width in (4, 16, 32):
        if exchange is ShardedExchange and compressor == "topk":
            return FusedShards(job.cluster.workers, ShardedExchange.scattered, ShardedExchange.gathered, values.width)
        if exchange is SparseAllGather and codec.layout == "eliasfano":
            # no kernel shares a quota among tensors' thresholds
            estimates = compressor != "gaussiank" or settings.quota != "pooled"
            return FusedKernels(values.width, compressor if estimates else "places")
    return TorchOperations(compressor, values.few_bits)


def _collective_of(settings: EngineSettings, job: Job) -> Collective:
    """As the strategy chooses it."""
    if job.cluster.device.processors:
        return settings.collective_over(job.cluster.workers)
    gather = line(lambda message: job.cluster.allgather(message).seconds)
    return settings.collective_over(job.cluster.workers, gather, float(job.sparse_bytes.sum()))


def _buckets(job: Job, first: float = DDP_FIRST_BUCKET) -> list[range]:
    stops = ddp_buckets(job.dense_bytes.tolist(), first=first)
    return [range(start, stop) for start, stop in pairwise([0, *stops])]


def _ddp(job: Job, width: int) -> Schedule:
    """DDP's buckets, in fp32 or cast to 16 bits by the hook; the casts are free here, in favour of DDP."""
    return Schedule([job.dense_message(places, width) for places in _buckets(job)])


def _powersgd(job: Job, rank: int) -> Schedule:
    return Schedule([_factors(job, places, rank) for places in _buckets(job)])


def _factors(job: Job, places: range, rank: int) -> Message:
    """Of one of DDP's buckets: two all-reduces of factors and one of the rest, in sequence."""
    first = second = rest = seconds = 0.0
    for place in places:
        shape, numel = job.trace.tensors[place].shape, float(job.numels[place])
        rows = float(shape[0] or 1) if len(shape) > 1 else 1.0
        columns = numel / rows
        if len(shape) > 1 and numel > _POWERSGD_MIN_RATE * rank * (rows + columns):
            first, second = first + rank * rows * 4, second + rank * columns * 4
            # the matrix is read for P, for Q and for the residual, which is written
            seconds += _POWERSGD_LAUNCH + 4 * 4 * numel / job.cluster.device.memory
        else:
            rest += numel * 4
    parts = [job.cluster.allreduce(nbytes) for nbytes in (first, second, rest) if nbytes]
    return Message(places, sum(parts, CollectiveCost()), select=seconds, collectives=len(parts))


def _dear(job: Job) -> Schedule:
    """Reduce-scatter during backward, all-gather of the sums during the next forward pass."""
    messages = []
    for places in _buckets(job, first=DDP_BUCKET):
        half = job.cluster.reduce_scatter(float(job.dense_bytes[places].sum()))
        messages.append(Message(places, half, settle=half))
    return Schedule(messages)


def _easgd(job: Job) -> Schedule:
    """All weights in one packed all-reduce, from before the forward pass to after the backward pass."""
    nbytes = float(job.dense_bytes.sum())
    update = _ELASTIC_PASSES * nbytes / job.cluster.device.memory
    return Schedule([Message([], job.cluster.allreduce(nbytes), decode=update)])


def _horovod(job: Job, sparse: bool) -> Schedule:
    """Every tensor is selected from at its hook; tensors that are ready everywhere at a tick are fused."""
    if not sparse:
        return Schedule(Timer(job.dense_message, job.dense_bytes.tolist(), Horovod()))
    gathered = (job.sparse_bytes * job.cluster.workers).tolist()
    return Schedule(Timer(partial(job.sparse_message, select=False), gathered, Horovod()), job.selects.tolist())


def _cupcake(job: Job) -> Schedule:
    """Two groups, as in all released commands; the cut is searched by running iterations."""
    search = Cupcake().search(len(job.numels))
    while not search.over:
        schedule = job.schedule(Plan.from_stops(search.stops), behind=True)
        search.replay([mean_iteration(job.trace, job.cluster, schedule, iterations=3).seconds])
    return job.schedule(Plan.from_stops(search.stops), behind=True)


def _one_buffer(job: Job, cost: CollectiveCost, messages: int, between: float = 0.0) -> Schedule:
    places = range(len(job.numels))
    return Schedule([job.decoded(places, cost, job.span_of(places), messages, job.select_seconds(places), between)])


def _gtopk(job: Job) -> Schedule:
    merging = log2_ceil(job.cluster.workers) * float(job.select_cost(2 * float(job.entries.sum())))
    return _one_buffer(job, job.cluster.gtopk(float(job.sparse_bytes.sum())), 1, merging)


def _oktopk(job: Job) -> Schedule:
    # each worker adds up its region, k entries in all, and then places the k entries of the result
    return _one_buffer(job, job.cluster.oktopk(float(job.sparse_bytes.sum())), 3)


def _stream(job: Job) -> Schedule:
    """Selection at every hook, since the end of a buffer is unknown; entries hold 32-bit positions."""
    entries = job.entries.astype(float)
    capacity = float(min(Naive().buffer_elements, entries.sum()))
    nbytes = capacity * (job.entry_bytes if job.entry_bytes >= 8 else job.entry_bytes + 2)
    span = job.span(capacity / job.density, capacity)
    message = job.decoded([0], job.cluster.allgather(nbytes), span, job.cluster.workers)
    return Schedule(Stream(entries.tolist(), capacity, message), job.selects.tolist())


def _hierarchical(job: Job, policy: FusionPolicy, owners: bool) -> Schedule:
    """Groups over an exchange in three phases. Each worker selects from its shard of the node's sum, after the
    reduce-scatter inside the node. ``owners``: it sends what it has selected to owners, which select again."""
    cluster = job.cluster
    density = float(job.sparse_bytes.sum()) / max(1, int(job.numels.sum()))
    scattered, gathered = ShardedExchange.scattered, ShardedExchange.gathered

    def message(places: Sequence[int], span: Span, nbytes: float) -> Message:
        shard = span.elements / cluster.gpus_per_node
        exchange, between = cluster.hierarchical(nbytes, 2 * span.elements), float(job.select_cost(shard))
        times, collectives = float(cluster.nodes), 3
        if owners:
            exchange = cluster.hierarchical_sharded(scattered * nbytes, gathered * nbytes, 2 * span.elements)
            between += float(job.select_cost(shard / cluster.nodes))
            times, collectives = scattered + gathered, 4
        return replace(job.decoded(places, exchange, span, times, between=between), collectives=collectives)

    def seconds(nbytes: float) -> float:
        found = message([], job.span(nbytes / density, nbytes / job.entry_bytes), nbytes)
        return found.cost.seconds + found.decode

    def of_places(places: range) -> Message:
        nbytes, elements = float(job.sparse_bytes[places].sum()), float(job.numels[places].sum())
        return message(places, job.span(elements, nbytes / job.entry_bytes), nbytes)

    cost, ready = line(seconds), job.group_costs(sparse=False, dense=True).ready
    costs = replace(job.group_costs(), ready=ready, per_buffer=0.0, sparse=(cost.fixed, cost.per_byte))
    return Schedule(job.messages(policy.plan(costs), of_places))


def _sharded(job: Job, policy: FusionPolicy, dense: bool) -> Schedule:
    """Groups over an exchange in two phases; between them each worker selects from its shard. ``dense``: groups may be
    dense."""
    cluster, counted = job.cluster, job.cluster.device.decode is None
    fused = counted and isinstance(job.path, FusedShards)

    def message(places: Sequence[int], span: Span, nbytes: float, select: float = 0.0) -> Message:
        scattered, gathered = ShardedExchange.scattered, ShardedExchange.gathered
        exchange = cluster.sharded(scattered * nbytes, gathered * nbytes)
        # the work of fused kernels has all phases in it
        between = 0.0 if fused else float(job.select_cost(span.elements / cluster.workers))
        times = cluster.workers if fused else scattered + gathered
        return replace(job.decoded(places, exchange, span, times, select, between), collectives=2)

    def seconds(nbytes: float) -> float:
        found = message([], job.span_of_bytes(nbytes), nbytes)
        return found.cost.seconds + (0.0 if counted else found.decode)

    def of_places(places: range) -> Message:
        nbytes, select = float(job.sparse_bytes[places].sum()), job.select_seconds(places)
        return message(places, job.span_of(places), nbytes, select)

    cost = line(seconds)
    plan = policy.plan(replace(job.group_costs(dense=dense), sparse=(cost.fixed, cost.per_byte)))
    return Schedule(job.messages(plan, of_places))


# By the collective, compressor or grouping that asks for it. Only these do what no plan expresses: streams, searches by
# trial, choices for each tensor.
_SPECIAL: Mapping[str, Callable[[Job], Schedule]] = {
    "gtopk": _gtopk,
    "oktopk": _oktopk,
    "adtopk": adtopk,
    "cupcake": _cupcake,
    "naive": _stream,
    "hipress": hipress,
    "espresso": espresso,
}
_HOOKS: Mapping[str, Callable[[Job], Schedule]] = {
    "none": partial(_ddp, width=4),
    "bf16": partial(_ddp, width=2),
    "fp16": partial(_ddp, width=2),
    **{name: partial(_powersgd, rank=rank) for name, rank in POWERSGD_RANKS.items()},
    "dear": _dear,
    "local": _easgd,
}

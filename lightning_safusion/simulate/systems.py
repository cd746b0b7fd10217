"""The published systems on the clock: the schedule of an iteration under each system, from its row.

The rows are those of ``lightning_safusion.systems``; most are planned by their own policy. All of them run on the same
engine and the same wire, so that only the idea differs.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

from lightning_safusion.baselines.hooks import POWERSGD_RANKS
from lightning_safusion.comm.catalogue import SHARDED_FROM, find_collective
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.wire.formats import message_bytes
from lightning_safusion.fusion.plans.adaptive import plan_optimal
from lightning_safusion.fusion.plans.costs import DDP_BUCKET, DDP_FIRST_BUCKET, ddp_buckets
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.policy import Naive
from lightning_safusion.fusion.plans.searching import Cupcake
from lightning_safusion.fusion.plans.ticking import Horovod
from lightning_safusion.lookup import look_up
from lightning_safusion.simulate.cluster import CollectiveCost
from lightning_safusion.simulate.engine import mean_iteration
from lightning_safusion.simulate.job import Job, line
from lightning_safusion.simulate.per_tensor import adtopk, espresso, hipress, ssfusion
from lightning_safusion.simulate.schedule import Iteration, Message, Schedule, Stream, Timer
from lightning_safusion.systems import SYSTEMS, EngineSystem, HookSystem
from lightning_safusion.systems.rows import SMALL

# PowerSGD: compression pays if it saves this factor; kernels of one matrix, launched one by one.
_POWERSGD_MIN_RATE, _POWERSGD_LAUNCH = 2.0, 50e-6
# Of a buffer, for the bytes of an entry: formats of positions differ for spans of billions.
_CODEC_ELEMENTS = 1 << 24
# Elastic averaging reads and writes all weights this many times: 3 for the workers' distance, 6 to move them.
_ELASTIC_PASSES = 9

_VARIANT = EngineSystem(
    "safusion-hierarchical",
    "as safusion, dense inside the node, sparse between nodes",
    SYSTEMS["safusion"].source,
    "adaptive",
    collective="hierarchical",
    dense_below=SMALL,
)

_SHARDED = EngineSystem(
    "saf-sharded",
    "as saf-pooled, sparse to owners and back",
    SYSTEMS["saf-pooled"].source,
    "adaptive",
    quota="auto",
    memory="auto",
    wire="q4",
    select_by="auto",
    collective="sharded",
)

#: All systems that the simulator knows, by name: those of the strategy, and variants of two.
SIMULATED: Mapping[str, EngineSystem | HookSystem] = ChainMap(
    {_VARIANT.name: _VARIANT, _SHARDED.name: _SHARDED}, SYSTEMS
)


def run_system(name: str, job: Job, iterations: int = 20) -> Iteration:
    """The mean iteration of one system."""
    return mean_iteration(job.trace, job.cluster, build_schedule(name, job), iterations)


def build_schedule(name: str, job: Job) -> Schedule:
    """The iteration of a job under one system.

    Raises:
        ValueError: If the system is unknown; the message lists the names.
    """
    row = look_up("system", name, SIMULATED)
    if isinstance(row, HookSystem):
        return replace(_HOOKS[row.ddp_hook](job), engine=False)
    job = _as_row(row, job)
    collective = find_collective(row.collective)
    if row.fusion == "selective":
        return ssfusion(job, row.offload, collective.dense_lane)
    if row.fusion == "horovod":
        return _horovod(job, row.sparse)
    if row.collective == row.quota == "auto" and job.cluster.workers >= SHARDED_FROM:
        return _sharded(job, dense=True)
    for part in (row.collective, row.compressor, row.fusion):
        if part in _SPECIAL:
            return _SPECIAL[part](job)
    plan = row.policy().plan(job.group_costs(sparse=row.sparse, dense=collective.choice != "allgather"))
    return job.schedule(plan, behind=row.scope == "group")


def _as_row(row: EngineSystem, job: Job) -> Job:
    """The job with the dense tensors and the wire format of a row."""
    job = replace(job, dense_below=max(job.dense_below, row.dense_below))
    if row.wire == "auto":
        return job
    numel = min(int(job.numels.sum()), _CODEC_ELEMENTS)
    entries = max(1, int(numel * job.density))
    return replace(job, entry_bytes=message_bytes(row.wire, numel, entries) / entries)


def _buckets(job: Job, first: float = DDP_FIRST_BUCKET) -> list[range]:
    """Places of the tensors in each of DDP's buckets."""
    stops = ddp_buckets(job.dense_bytes.tolist(), first=first)
    return [range(start, stop) for start, stop in pairwise([0, *stops])]


def _ddp(job: Job, width: int) -> Schedule:
    """DDP's buckets, in fp32 or cast to 16 bits by the hook; the casts are free here, in favour of DDP."""
    return Schedule([job.dense_message(places, width) for places in _buckets(job)])


def _powersgd(job: Job, rank: int) -> Schedule:
    """PowerSGD in DDP's buckets: two all-reduces of factors and one of the rest, in sequence."""
    return Schedule([_factors(job, places, rank) for places in _buckets(job)])


def _factors(job: Job, places: range, rank: int) -> Message:
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
    message, nbytes = partial(job.sparse_message, select=False), (job.sparse_bytes * job.cluster.workers).tolist()
    return Schedule(Timer(message, nbytes, Horovod()), job.selects.tolist())


def _cupcake(job: Job) -> Schedule:
    """Two groups, as in all released commands; the cut is searched by running iterations."""

    search = Cupcake().search(len(job.numels))
    while not search.over:
        schedule = job.schedule(Plan.from_stops(search.stops), behind=True)
        search.replay([mean_iteration(job.trace, job.cluster, schedule, iterations=3).seconds])
    return job.schedule(Plan.from_stops(search.stops), behind=True)


def _one_buffer(job: Job, cost: CollectiveCost, entries: float, extra: float = 0.0) -> Schedule:
    """All tensors in one message; selection runs when backward has ended."""
    places = range(len(job.numels))
    decode = entries * job.cluster.device.decode + extra
    return Schedule([Message(places, cost, job.select_seconds(places, behind=True), decode)])


def _gtopk(job: Job) -> Schedule:
    kept = float(job.entries.sum())
    rounds = (job.cluster.workers - 1).bit_length()
    merging = rounds * float(job.select_cost(2 * kept))
    return _one_buffer(job, job.cluster.gtopk(float(job.sparse_bytes.sum())), kept, merging)


def _oktopk(job: Job) -> Schedule:
    # each worker adds up its region, k entries in all, and then places the k entries of the result
    return _one_buffer(job, job.cluster.oktopk(float(job.sparse_bytes.sum())), 3.0 * float(job.entries.sum()))


def _stream(job: Job) -> Schedule:
    """Selection at every hook, since the end of a buffer is unknown; entries hold 32-bit positions."""
    entries = job.entries.astype(float)
    capacity = float(min(Naive().buffer_elements, entries.sum()))
    nbytes = capacity * (job.entry_bytes if job.entry_bytes >= 8 else job.entry_bytes + 2)
    decode = job.cluster.workers * capacity * job.cluster.device.decode
    message = Message([0], job.cluster.allgather(nbytes), decode=decode)
    return Schedule(Stream(entries.tolist(), capacity, message), job.selects.tolist())


def _hierarchical(job: Job) -> Schedule:
    """The exact programme's groups over an exchange in three phases. Each worker selects from its shard of the node's
    sum, after the reduce-scatter inside the node: on the link's stream, so that it does not delay backward."""
    cluster, costs = job.cluster, job.group_costs()
    density = float(job.sparse_bytes.sum()) / max(1, int(job.numels.sum()))

    def local(nbytes: float, elements: float) -> float:
        decode = cluster.nodes * nbytes / job.entry_bytes * cluster.device.decode
        return float(job.select_cost(elements / cluster.gpus_per_node)) + decode

    def seconds(nbytes: float) -> float:
        elements = nbytes / density
        return cluster.hierarchical(nbytes, 2 * elements).seconds + local(nbytes, elements)

    cost, ready = line(seconds), job.group_costs(sparse=False, dense=True).ready
    messages = []
    for group in plan_optimal(replace(costs, ready=ready, sparse=(cost.fixed, cost.per_byte))).groups:
        places = range(group.start, group.stop)
        nbytes, elements = float(job.sparse_bytes[places].sum()), float(job.numels[places].sum())
        exchange = cluster.hierarchical(nbytes, 2 * elements)
        messages.append(Message(places, exchange, decode=local(nbytes, elements), collectives=3))
    return Schedule(messages)


def _sharded(job: Job, dense: bool = False) -> Schedule:
    """The exact programme's groups over an exchange in two phases; between them each worker selects from its shard, on
    the link's stream. ``dense``: groups may be dense."""
    cluster = job.cluster
    density = float(job.sparse_bytes.sum()) / max(1, int(job.numels.sum()))

    def exchange(nbytes: float) -> CollectiveCost:
        return cluster.sharded(ShardedExchange.scattered * nbytes, ShardedExchange.gathered * nbytes)

    def local(nbytes: float) -> float:
        entries = (ShardedExchange.scattered + ShardedExchange.gathered) * nbytes / job.entry_bytes
        return float(job.select_cost(nbytes / density / cluster.workers)) + entries * cluster.device.decode

    cost = line(lambda nbytes: exchange(nbytes).seconds + local(nbytes))
    messages = []
    for group in plan_optimal(replace(job.group_costs(dense=dense), sparse=(cost.fixed, cost.per_byte))).groups:
        places = range(group.start, group.stop)
        if group.collective == "allreduce":
            messages.append(job.dense_message(places))
            continue
        nbytes = float(job.sparse_bytes[places].sum())
        select = job.select_seconds(places)
        messages.append(Message(places, exchange(nbytes), select, local(nbytes), collectives=2))
    return Schedule(messages)


# By the collective, compressor or grouping that asks for it. Only these do what no plan expresses: several phases,
# streams, searches by trial, choices for each tensor.
_SPECIAL: Mapping[str, Callable[[Job], Schedule]] = {
    "gtopk": _gtopk,
    "oktopk": _oktopk,
    "hierarchical": _hierarchical,
    "sharded": _sharded,
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

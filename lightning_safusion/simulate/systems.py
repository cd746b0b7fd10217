"""The published systems on the clock: each one a function from a job to the schedule of an iteration.

The rows are those of ``lightning_safusion.systems``; most are planned by their own policy.

All of them run on the same engine and the same wire, so that only the idea differs. Planners and policies are the
objects that train. Selection before fusion takes one call per buffer, unless the job says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from lightning_safusion.baselines.hooks import POWERSGD_RANKS
from lightning_safusion.comm.catalogue import find_collective
from lightning_safusion.comm.wire.formats import message_bytes
from lightning_safusion.fusion.plans.costs import DDP_BUCKET, ddp_buckets
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.policy import Naive
from lightning_safusion.fusion.plans.searching import Cupcake
from lightning_safusion.fusion.plans.ticking import Horovod
from lightning_safusion.lookup import look_up
from lightning_safusion.simulate.cluster import CollectiveCost
from lightning_safusion.simulate.engine import mean_iteration
from lightning_safusion.simulate.job import Job, grouped
from lightning_safusion.simulate.per_tensor import espresso, hipress, ssfusion
from lightning_safusion.simulate.schedule import Ahead, Message, Planned, Schedule, Stream, Timer
from lightning_safusion.systems import SYSTEMS as _ROWS
from lightning_safusion.systems import EngineSystem, HookSystem
from lightning_safusion.systems.rows import SMALL

# PowerSGD: compression pays if it saves this factor; kernels of one matrix, launched one by one.
_POWERSGD_MIN_RATE, _POWERSGD_LAUNCH = 2.0, 50e-6
# Of a buffer, by which bytes of an entry are told: formats of positions differ for spans of billions.
_CODEC_ELEMENTS = 1 << 24
# Elastic averaging reads and writes all weights this many times: 3 for what the workers are apart, 6 to move them.
_ELASTIC_PASSES = 9


Builder = Callable[[Job], Schedule]


@dataclass(frozen=True)
class SimulatedSystem:
    """A system, and what makes the schedule of its iteration."""

    row: EngineSystem | HookSystem
    build: Builder


def _ranges(stops: Sequence[int]) -> list[range]:
    return [range(start, stop) for start, stop in pairwise([0, *stops])]


def _no_selection(job: Job) -> tuple[float, ...]:
    return (0.0,) * len(job.numels)


def _ddp(width: int) -> Callable[[Job], Schedule]:
    """DDP's buckets, in fp32 or cast to 16 bits by the hook; the casts are free here, in favour of DDP."""

    def build(job: Job) -> Schedule:
        ranges = _ranges(ddp_buckets((job.numels * 4.0).tolist()))
        return Schedule(Planned(tuple(job.dense(places, width) for places in ranges)), _no_selection(job), engine=False)

    return build


def _powersgd(rank: int) -> Callable[[Job], Schedule]:
    """PowerSGD in DDP's buckets: two all-reduces of factors and one of the rest, in sequence."""

    def message(job: Job, places: range) -> Message:
        first = second = rest = seconds = 0.0
        for place in places:
            numel, rows = float(job.numels[place]), float(job.trace.tensors[place].shape[0] or 1)
            columns = numel / rows
            if numel > _POWERSGD_MIN_RATE * rank * (rows + columns) and len(job.trace.tensors[place].shape) > 1:
                first, second = first + rank * rows * 4, second + rank * columns * 4
                # the matrix is read for P, for Q and for the residual, which is written
                seconds += _POWERSGD_LAUNCH + 4 * 4 * numel / job.cluster.device.memory
            else:
                rest += numel * 4
        parts = [job.cluster.allreduce(nbytes) for nbytes in (first, second, rest) if nbytes]
        return Message(tuple(places), sum(parts, CollectiveCost()), select=seconds, collectives=len(parts))

    def build(job: Job) -> Schedule:
        ranges = _ranges(ddp_buckets((job.numels * 4.0).tolist()))
        return Schedule(Planned(tuple(message(job, places) for places in ranges)), _no_selection(job), engine=False)

    return build


def _dear(job: Job) -> Schedule:
    """Reduce-scatter behind backward, all-gather of the sums behind the next forward pass."""
    messages = []
    for places in _ranges(ddp_buckets((job.numels * 4.0).tolist(), first=DDP_BUCKET)):
        half = job.cluster.reduce_scatter(float(job.numels[list(places)].sum()) * 4)
        messages.append(Message(tuple(places), half, settle=half))
    return Schedule(Planned(tuple(messages)), _no_selection(job), engine=False)


def _easgd(job: Job) -> Schedule:
    """All weights in one packed all-reduce, from before the forward pass to after the backward pass."""
    nbytes = float(job.numels.sum()) * 4
    update = _ELASTIC_PASSES * nbytes / job.cluster.device.memory
    return Schedule(Ahead(job.cluster.allreduce(nbytes), update), _no_selection(job), engine=False)


def _horovod(job: Job) -> Schedule:
    """Every tensor is selected from at its hook; whatever is ready everywhere at a tick is fused."""
    nbytes = (job.sparse_bytes * job.cluster.workers).tolist()
    return Schedule(_timer(partial(job.sparse, select=False), nbytes), tuple(job.selects.tolist()))


def _horovod_dense(job: Job) -> Schedule:
    return Schedule(_timer(job.dense, (job.numels * 4.0).tolist()), _no_selection(job))


def _timer(message: Callable[[Sequence[int]], Message], nbytes: Sequence[float]) -> Timer:
    policy = Horovod()
    return Timer(message, tuple(nbytes), policy.cycle_s, policy.threshold_bytes)


def _cupcake(job: Job) -> Schedule:
    """Two groups, as in all released commands; the cut is searched by running iterations."""

    search = Cupcake().search(len(job.numels))
    while not search.over:
        schedule = job.schedule(Plan.from_stops(search.stops), behind=True)
        search.replay([mean_iteration(job.trace, job.cluster, schedule, iterations=3).seconds])
    return job.schedule(Plan.from_stops(search.stops), behind=True)


def _one_buffer(job: Job, cost: CollectiveCost, entries: float, extra: float = 0.0) -> Schedule:
    """The whole model in one message that is selected from when backward has ended."""
    places = tuple(range(len(job.numels)))
    decode = entries * job.cluster.device.decode + extra
    message = Message(places, cost, select=job.select_seconds(places, behind=True), decode=decode)
    return Schedule(Planned((message,)), _no_selection(job))


def _gtopk(job: Job) -> Schedule:
    kept = float(job.entries.sum())
    rounds = (job.cluster.workers - 1).bit_length()
    merging = rounds * float(job.select_cost(2 * kept))
    return _one_buffer(job, job.cluster.gtopk(float(job.sparse_bytes.sum())), kept, merging)


def _oktopk(job: Job) -> Schedule:
    # each worker adds up its region, k entries in all, and then places the k entries of the result
    return _one_buffer(job, job.cluster.oktopk(float(job.sparse_bytes.sum())), 3.0 * float(job.entries.sum()))


def _adtopk(job: Job) -> Schedule:
    """One message per tensor, each row selected from by itself; tensors of one dimension are dense."""
    shapes = [tensor.shape for tensor in job.trace.tensors]
    sized = list(zip(job.trace.numels, shapes, strict=True))
    rows = np.array([numel // max(1, shape[1]) if len(shape) > 1 else 1 for numel, shape in sized])
    lengths = np.array([shape[1] if len(shape) > 1 else numel for numel, shape in sized])
    entries = rows * np.maximum(1, (lengths * job.density).astype(np.int64))
    messages, selects = [], []
    for place, shape in enumerate(shapes):
        if len(shape) < 2:
            messages.append(job.dense([place]))
            selects.append(0.0)
            continue
        nbytes = float(entries[place]) * job.entry_bytes
        cost = job.cluster.allgather(nbytes)
        messages.append(Message((place,), cost, decode=job.decode_per_byte * nbytes))
        selects.append(float(job.select_cost(float(job.numels[place]))))
    return Schedule(Planned(tuple(messages)), tuple(selects))


def _stream(job: Job) -> Schedule:
    """Selection at every hook, since nobody knows where a buffer ends; entries hold 32-bit positions."""
    entries = job.entries.astype(float)
    capacity = float(min(Naive().buffer_elements, entries.sum()))
    nbytes = capacity * (job.entry_bytes if job.entry_bytes >= 8 else job.entry_bytes + 2)
    decode = job.cluster.workers * capacity * job.cluster.device.decode
    round_ = Message((0,), job.cluster.allgather(nbytes), decode=decode)
    return Schedule(Stream(tuple(entries.tolist()), capacity, round_), tuple(job.selects.tolist()))


def _hierarchical(job: Job) -> Schedule:
    """Each worker selects from its shard of the node's sum, after the reduce-scatter inside the node."""
    cluster = job.cluster

    def exchange(nbytes: float, elements: float) -> tuple[CollectiveCost, float]:
        select = float(job.select_cost(elements / cluster.gpus_per_node))
        decode = cluster.nodes * nbytes / job.entry_bytes * cluster.device.decode
        return cluster.hierarchical(nbytes, 2 * elements), select + decode

    return grouped(job, exchange, collectives=3)


def _planned(row: EngineSystem) -> Builder:
    """The row's own policy over the job's costs: all that most systems are."""
    dense = find_collective(row.collective).choice != "allgather"

    def build(job: Job) -> Schedule:
        plan = row.policy().plan(job.group_costs(sparse=row.sparse, dense=dense))
        return job.schedule(plan, behind=row.scope == "group")

    return build


def _as_row(row: EngineSystem, job: Job) -> Job:
    """The job with the dense tensors and the wire format of a row."""
    job = replace(job, dense_below=max(job.dense_below, row.dense_below))
    if row.wire == "auto":
        return job
    numel = min(int(job.numels.sum()), _CODEC_ELEMENTS)
    entries = max(1, int(numel * job.density))
    return replace(job, entry_bytes=message_bytes(row.wire, numel, entries) / entries)


def _of_parts(row: EngineSystem) -> Builder:
    """The builder that a part of a row asks for, or else its policy.

    Only these do what no plan expresses: several phases, ticks, streams, searches by trial, choices for each tensor.
    """
    if row.fusion == "selective":
        return ssfusion(row.offload, find_collective(row.collective).dense_lane)
    if row.fusion == "horovod":
        return _horovod if row.sparse else _horovod_dense
    for part in (row.collective, row.compressor, row.fusion):
        if part in _SPECIAL:
            return _SPECIAL[part]
    return _planned(row)


def _simulated(row: EngineSystem | HookSystem) -> SimulatedSystem:
    if isinstance(row, HookSystem):
        return SimulatedSystem(row, _HOOKS[row.ddp_hook])
    build = _of_parts(row)
    return SimulatedSystem(row, lambda job: build(_as_row(row, job)))


#: By the collective, compressor or grouping that asks for it.
_SPECIAL: Mapping[str, Builder] = {
    "gtopk": _gtopk,
    "oktopk": _oktopk,
    "hierarchical": _hierarchical,
    "adtopk": _adtopk,
    "cupcake": _cupcake,
    "naive": _stream,
    "hipress": hipress,
    "espresso": espresso,
}
_HOOKS: Mapping[str, Builder] = {
    "none": _ddp(4),
    "bf16": _ddp(2),
    "fp16": _ddp(2),
    **{name: _powersgd(rank) for name, rank in POWERSGD_RANKS.items()},
    "dear": _dear,
    "local": _easgd,
}
_VARIANTS = (
    EngineSystem(
        "safusion-hierarchical",
        "as safusion, dense inside the node, sparse between nodes",
        _ROWS["safusion"].source,
        "adaptive",
        collective="hierarchical",
        dense_below=SMALL,
    ),
)

#: All systems that the simulator knows, by name: those of the strategy, and variants of them.
SIMULATED: Mapping[str, SimulatedSystem] = MappingProxyType(
    {row.name: _simulated(row) for row in (*_ROWS.values(), *_VARIANTS)}
)


def resolve_simulated(name: str) -> SimulatedSystem:
    """The system called ``name``; the error of an unknown one lists the names."""
    return look_up("system", name, SIMULATED)

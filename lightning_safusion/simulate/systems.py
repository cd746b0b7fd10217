"""The published systems on the clock: each one a function from a job to the schedule of an iteration.

All of them run on the same engine and the same wire, so that only the idea differs. Planners and policies are the
objects that train. Selection ahead of fusion takes one call per buffer, unless the job says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from lightning_safusion.comm.wire import resolve_codec
from lightning_safusion.ddp_hooks import POWERSGD_RANKS
from lightning_safusion.fusion.plans.adaptive import Adaptive
from lightning_safusion.fusion.plans.costs import DDP_BUCKET, ddp_buckets
from lightning_safusion.fusion.plans.merging import MGWFBP, OMGS, sparse_plan
from lightning_safusion.fusion.plans.policy import WFBP, Aligned, Naive, Single
from lightning_safusion.fusion.plans.searching import Cupcake, search_cuts
from lightning_safusion.fusion.plans.ticking import Horovod
from lightning_safusion.naming import look_up
from lightning_safusion.simulate.cluster import CollectiveCost
from lightning_safusion.simulate.engine import mean_iteration
from lightning_safusion.simulate.job import Job, grouped
from lightning_safusion.simulate.per_tensor import espresso, hipress, ssfusion
from lightning_safusion.simulate.schedule import Ahead, Message, Planned, Schedule, Stream, Timer
from lightning_safusion.systems import SYSTEMS as _ROWS

# PowerSGD: compression pays if it saves this factor; kernels of one matrix, launched one by one.
_POWERSGD_MIN_RATE, _POWERSGD_LAUNCH = 2.0, 50e-6
# Of a buffer, by which bytes of an entry are told: formats of positions differ for spans of billions.
_CODEC_ELEMENTS = 1 << 24
# Elastic averaging reads and writes all weights this many times: 3 for what the workers are apart, 6 to move them.
_ELASTIC_PASSES = 9


@dataclass(frozen=True)
class SimulatedSystem:
    """A row of the comparison.

    Args:
        name: As in ``SAFusionStrategy(system=name)``.
        summary: What it decides, in one line.
        build: Makes the schedule of an iteration.
        sparse: Whether it sends less than all of every gradient.
        conserves: Whether what is not sent is kept for later, all of it.
        settings: Further arguments of the strategy.
    """

    name: str
    summary: str
    build: Callable[[Job], Schedule]
    sparse: bool = True
    conserves: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)


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


def _dense_wfbp(job: Job) -> Schedule:
    return job.schedule(WFBP().plan(job.group_costs(sparse=False, dense=True)))


def _mgwfbp(job: Job) -> Schedule:
    return job.schedule(MGWFBP().plan(job.group_costs(sparse=False, dense=True)))


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


def _wfbp(job: Job) -> Schedule:
    return job.schedule(WFBP().plan(job.group_costs()))


def _horovod(job: Job) -> Schedule:
    """Every tensor is selected from at its hook; whatever is ready everywhere at a tick is fused."""
    size = job.cluster.workers

    def message(places: Sequence[int]) -> Message:
        return job.sparse(places, select=False)

    timer = _timer(message, (job.sparse_bytes * size).tolist())
    return Schedule(timer, tuple(job.selects.tolist()))


def _horovod_dense(job: Job) -> Schedule:
    return Schedule(_timer(job.dense, (job.numels * 4.0).tolist()), _no_selection(job))


def _timer(message: Callable[[Sequence[int]], Message], nbytes: Sequence[float]) -> Timer:
    policy = Horovod()
    return Timer(message, tuple(nbytes), policy.cycle_s, policy.threshold_bytes)


def _omgs(job: Job) -> Schedule:
    return job.schedule(OMGS().plan(job.group_costs()), behind=True)


def _cupcake(job: Job) -> Schedule:
    """Two groups, as in all released commands; the cut is searched by running iterations."""

    def measure(stops: Sequence[int]) -> float:
        schedule = job.schedule(sparse_plan(stops), behind=True)
        return mean_iteration(job.trace, job.cluster, schedule, iterations=3).seconds

    return job.schedule(sparse_plan(search_cuts(measure, len(job.numels), Cupcake().groups)), behind=True)


def _syncea(job: Job) -> Schedule:
    return job.schedule(Single().plan(job.group_costs()), behind=True)


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
    """One message per tensor, each row selected from by itself; tensors of one dimension travel dense."""
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


def _fgbuff(job: Job) -> Schedule:
    return job.schedule(Adaptive().plan(job.group_costs()), behind=True)


def _behind(job: Job) -> Schedule:
    return job.schedule(Aligned().plan(job.group_costs()), behind=True)


def _saf_inter(job: Job) -> Schedule:
    return job.schedule(Aligned().plan(job.group_costs()))


def _saf_naive(job: Job) -> Schedule:
    """Selection at every hook, since nobody knows where a buffer ends; entries hold 32-bit positions."""
    entries = job.entries.astype(float)
    capacity = float(min(Naive().buffer_elements, entries.sum()))
    nbytes = capacity * (job.entry_bytes if job.entry_bytes >= 8 else job.entry_bytes + 2)
    decode = job.cluster.workers * capacity * job.cluster.device.decode
    round_ = Message((0,), job.cluster.allgather(nbytes), decode=decode)
    return Schedule(Stream(tuple(entries.tolist()), capacity, round_), tuple(job.selects.tolist()))


def _safusion(job: Job) -> Schedule:
    job = replace(job, dense_below=_ROWS["safusion"].dense_below)
    return job.schedule(Adaptive().plan(job.group_costs(dense=True)))


def _saf_pooled(job: Job) -> Schedule:
    numel = min(int(job.numels.sum()), _CODEC_ELEMENTS)
    entries = max(1, int(numel * job.density))
    codec = resolve_codec(_ROWS["saf-pooled"].wire, numel, entries, torch.float32)
    job = replace(job, entry_bytes=codec.nbytes / entries)
    return job.schedule(Adaptive().plan(job.group_costs(dense=True)))


def _safusion_paper(job: Job) -> Schedule:
    return job.schedule(Adaptive(rule="paper").plan(job.group_costs()))


def _safusion_hierarchical(job: Job) -> Schedule:
    """Each worker selects from its shard of the node's sum, after the reduce-scatter inside the node."""
    cluster = job.cluster

    def exchange(nbytes: float, elements: float) -> tuple[CollectiveCost, float]:
        select = float(job.select_cost(elements / cluster.gpus_per_node))
        decode = cluster.nodes * nbytes / job.entry_bytes * cluster.device.decode
        return cluster.hierarchical(nbytes, 2 * elements), select + decode

    return grouped(job, exchange, collectives=3)


_LIST = (
    SimulatedSystem("ddp", "dense all-reduce in buckets of 25 MiB, fp32", _ddp(4), sparse=False),
    SimulatedSystem("ddp-bf16", "the same, cast to bf16", _ddp(2), sparse=False),
    SimulatedSystem("ddp-fp16", "the same, cast to fp16", _ddp(2), sparse=False),
    *(
        SimulatedSystem(name, f"low-rank factors of each matrix, rank {rank}", _powersgd(rank), sparse=False)
        for name, rank in POWERSGD_RANKS.items()
    ),
    SimulatedSystem("wfbp-dense", "every tensor alone, dense", _dense_wfbp, sparse=False, settings={"system": "wfbp"}),
    SimulatedSystem("horovod-dense", "whatever is ready at a tick, dense", _horovod_dense, sparse=False),
    SimulatedSystem("mgwfbp", "merged where a message costs more than the wait, dense", _mgwfbp, sparse=False),
    SimulatedSystem("dear", "reduce-scatter in backward, all-gather in the next forward", _dear, sparse=False),
    SimulatedSystem("easgd", "weights, averaged behind forward and backward; replicas differ", _easgd, sparse=False),
    SimulatedSystem("wfbp", "every tensor alone, sparse", _wfbp),
    SimulatedSystem("horovod", "whatever is ready at a tick, sparse", _horovod),
    SimulatedSystem("omgs", "merged by OMGS's rule, selected from afterwards", _omgs),
    SimulatedSystem("cupcake", "two groups, the cut searched by trial", _cupcake),
    SimulatedSystem("syncea", "the whole model in one buffer", _syncea),
    SimulatedSystem("gtopk", "the whole model, a tree that keeps k entries", _gtopk, conserves=False),
    SimulatedSystem("oktopk", "the whole model, split, reduced and balanced", _oktopk),
    SimulatedSystem("hipress", "each tensor compressed or not, in parts", hipress),
    SimulatedSystem("espresso", "precision, compression and device of each tensor by trial", espresso),
    SimulatedSystem("adtopk", "every row of every matrix, one message per tensor", _adtopk),
    SimulatedSystem("behind", "8 tensors per buffer, selected from afterwards", _behind),
    SimulatedSystem("fgbuff", "buffers by times, selected from afterwards", _fgbuff),
    SimulatedSystem("ssfusion-naive", "small tensors whole, in one message", ssfusion(False, False)),
    SimulatedSystem("ssfusion-o", "and selection offloaded to the host", ssfusion(True, False)),
    SimulatedSystem("ssfusion-i", "small tensors by all-reduce, the others by all-gather", ssfusion(False, True)),
    SimulatedSystem("ssfusion", "all of that", ssfusion(True, True)),
    SimulatedSystem("saf-naive", "ahead of fusion, buffers of a fixed capacity", _saf_naive),
    SimulatedSystem("saf-inter", "ahead of fusion, 8 tensors per buffer", _saf_inter),
    SimulatedSystem("safusion-paper", "ahead of fusion, buffers by the papers' rule", _safusion_paper),
    SimulatedSystem("safusion", "ahead of fusion, buffers by the exact programme", _safusion),
    SimulatedSystem("saf-pooled", "the same in four bits per value (packing them not counted)", _saf_pooled),
    SimulatedSystem(
        "safusion-hierarchical",
        "dense inside the node, sparse between nodes",
        _safusion_hierarchical,
        settings={"system": "safusion", "collective": "hierarchical"},
    ),
)

#: All systems that the simulator knows, by name.
SIMULATED: Mapping[str, SimulatedSystem] = MappingProxyType({system.name: system for system in _LIST})


def resolve_simulated(name: str) -> SimulatedSystem:
    """The system called ``name``.

    Raises:
        ValueError: If there is none; the message lists the names.
    """
    return look_up("system", name, SIMULATED)

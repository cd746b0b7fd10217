"""A trace on a cluster, in the numbers that planners ask for and the messages that the clock runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion.plans.adaptive import plan_optimal
from lightning_safusion.fusion.plans.costs import GroupCosts, SelectionCost
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.simulate.cluster import Cluster, CollectiveCost
from lightning_safusion.simulate.jitter import agreed_backward
from lightning_safusion.simulate.schedule import Message, Planned, Schedule
from lightning_safusion.simulate.trace import Trace

# Sizes between which the cost of a collective is taken for a line.
_SMALL, _LARGE = 2.0**16, 2.0**26


@dataclass(frozen=True)
class Job:
    """What all systems have in common when they are compared.

    Args:
        trace: The job.
        cluster: Where it runs.
        density: Share of the elements that is sent, in (0, 1].
        entry_bytes: Bytes of a sent entry on the wire, position included: 8 for fp32 values with 32-bit positions, 6
            with 16-bit positions, 4 with bf16 values as well.
        selection: Kind of selection, see :class:`Device`.
        segmented: Selection before fusion in one call per buffer, with a quota for each tensor, as this package does
            it; else one call per tensor, as the papers describe it.
        dense_below: Tensors of fewer elements are dense.

    Raises:
        ValueError: If the density is outside (0, 1] or an entry has no bytes.
    """

    trace: Trace
    cluster: Cluster
    density: float = 0.01
    entry_bytes: float = 6.0
    selection: str = "threshold"
    segmented: bool = True
    dense_below: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density is a share in (0, 1], got {self.density}")
        if not self.entry_bytes > 0:
            raise ValueError(f"an entry needs bytes on the wire, got entry_bytes={self.entry_bytes}")
        self.cluster.device.selection(self.selection)

    @cached_property
    def numels(self) -> np.ndarray:
        """Elements, int64 [L]."""
        return np.array(self.trace.numels, np.int64)

    @cached_property
    def whole(self) -> np.ndarray:
        """Dense tensors, bool [L]."""
        return (self.numels < self.dense_below) | (self.numels * self.density >= self.numels)

    @cached_property
    def entries(self) -> np.ndarray:
        """Entries that each tensor sends, at least one, int64 [L]."""
        return np.where(self.whole, self.numels, np.maximum(1, (self.numels * self.density).astype(np.int64)))

    @cached_property
    def sparse_bytes(self) -> np.ndarray:
        """Bytes that each tensor brings to a sparse message, float64 [L]; dense ones need no positions."""
        return np.where(self.whole, self.numels * 4.0, self.entries * self.entry_bytes)

    @cached_property
    def backward(self) -> np.ndarray:
        """Backward times that planners see, float64 [L]: with jitter, those that a running job would agree on."""
        return agreed_backward(self.trace, self.cluster)

    @property
    def select_cost(self) -> SelectionCost:
        """Time of one selection."""
        return self.cluster.device.selection(self.selection)

    @cached_property
    def selects(self) -> np.ndarray:
        """Seconds of selecting from each tensor alone, float64 [L]."""
        return np.where(self.whole, 0.0, self.select_cost(self.numels))

    @cached_property
    def decode_per_byte(self) -> float:
        """Seconds of decoding all workers' messages, per byte of one of them."""
        return self.cluster.workers * self.cluster.device.decode / self.entry_bytes

    def group_costs(self, *, sparse: bool = True, dense: bool = False) -> GroupCosts:
        """Numbers for planners whose timeline does not depend on the grouping: selection is part of being ready, and so
        is decoding where it occupies the worker.

        Args:
            sparse: Whether buffers may take the all-gather.
            dense: Whether buffers may take the all-reduce, in fp32.
        """
        selects = np.zeros(len(self.numels))
        if sparse:
            share = self.select_cost.per_element * self.numels
            selects = np.where(self.whole, 0.0, share) if self.segmented else self.selects
        device, decode, per_buffer = self.cluster.device, self.decode_per_byte, 0.0
        if sparse and device.decodes_last:
            selects, decode = selects + self.decode_per_byte * self.sparse_bytes, 0.0
            per_buffer = device.decode_fixed + (self.select_cost.fixed if self.segmented else 0.0)
        if sparse and self.cluster.host is not None:
            host = self.cluster.host
            selects, per_buffer = (
                selects + host.ahead.per_tensor + host.decode.per_tensor,
                per_buffer + host.decode.fixed,
            )
        gather = line(self.cluster.allgather(_SMALL), self.cluster.allgather(_LARGE))
        reduce = line(self.cluster.allreduce(_SMALL), self.cluster.allreduce(_LARGE))
        return GroupCosts(
            numels=tuple(self.numels.tolist()),
            ready=tuple(np.cumsum(self.backward + selects).tolist()),
            sparse_bytes=tuple(self.sparse_bytes.tolist()),
            dense_bytes=tuple((self.numels * 4.0).tolist()),
            world_size=self.cluster.workers,
            sparse=(gather.fixed, gather.per_byte + decode),
            per_buffer=per_buffer,
            dense=(reduce.fixed, reduce.per_byte),
            sparse_allowed=sparse,
            dense_allowed=dense,
            arrivals=tuple(np.cumsum(self.backward).tolist()),
            select=(self.select_cost.fixed, self.select_cost.per_element, self.select_cost.per_comparison),
        )

    def schedule(self, plan: Plan, *, behind: bool = False) -> Schedule:
        """The iteration of a plan: all-gathers of what was selected, from each merged buffer with ``behind``, and
        all-reduces in fp32."""
        at_once = behind or self.segmented
        messages = [self.message(group, select=at_once, behind=behind) for group in plan.groups]
        sparse = np.zeros(len(self.numels), bool)
        for group in plan.groups:
            sparse[group.start : group.stop] = group.collective == "allgather"
        selects = np.where(sparse & (not at_once), self.selects, 0.0)
        return Schedule(Planned(tuple(messages)), tuple(selects.tolist()))

    def message(self, group: Group, *, select: bool, behind: bool = False) -> Message:
        """The collective of one group; ``select``: selection runs when its last gradient is ready."""
        if group.collective == "allreduce":
            return self.dense(range(group.start, group.stop))
        return self.sparse(range(group.start, group.stop), select=select, behind=behind)

    def dense(self, places: Sequence[int], width: int = 4) -> Message:
        """An all-reduce of dense tensors with ``width`` bytes per element."""
        return Message(tuple(places), self.cluster.allreduce(float(self.numels[list(places)].sum()) * width))

    def sparse(self, places: Sequence[int], *, select: bool, behind: bool = False) -> Message:
        """An all-gather of what was selected from tensors."""
        index = list(places)
        nbytes = float(self.sparse_bytes[index].sum())
        seconds = self.select_seconds(index, behind) if select else 0.0
        return Message(
            tuple(index), self.cluster.allgather(nbytes), select=seconds, decode=self.decode_seconds(index, nbytes)
        )

    def select_seconds(self, places: Sequence[int], behind: bool = False) -> float:
        """One selection over several tensors, before fusion or after it; dense ones need none."""
        chosen = [place for place in places if not self.whole[place]]
        elements = float(self.numels[chosen].sum())
        host = self.cluster.host
        if host is None:
            return float(self.select_cost(elements))
        return (host.behind if behind else host.ahead)(len(places), elements)

    def decode_seconds(self, places: Sequence[int], nbytes: float) -> float:
        """Decoding the messages of all workers, of ``nbytes`` bytes each."""
        if self.cluster.host is None:
            return self.decode_per_byte * nbytes
        return self.cluster.host.decode(len(places), self.cluster.workers * nbytes / self.entry_bytes)


def grouped(
    job: Job,
    exchange: Callable[[float, float], tuple[CollectiveCost, float]],
    *,
    select: bool = False,
    collectives: int = 1,
) -> Schedule:
    """The exact programme's groups over a collective of one's own.

    Args:
        job: The job.
        exchange: ``(bytes of a message, elements of its tensors) -> (cost, seconds of local work on the link's
            stream)``.
        select: Selection runs on the compute stream, in one call per group.
        collectives: Collectives that each exchange counts for.
    """
    per_element = float(job.sparse_bytes.sum()) / max(1, int(job.numels.sum()))

    def timed(nbytes: float) -> CollectiveCost:
        cost, local = exchange(nbytes, nbytes / per_element)
        return replace(cost, seconds=cost.seconds + local)

    cost_line = line(timed(_SMALL), timed(_LARGE))
    costs = job.group_costs()
    if not select:
        costs = replace(costs, ready=job.group_costs(sparse=False, dense=True).ready)
    plan = plan_optimal(replace(costs, sparse=(cost_line.fixed, cost_line.per_byte)))
    messages = []
    for group in plan.groups:
        places = range(group.start, group.stop)
        members = slice(group.start, group.stop)
        cost, local = exchange(float(job.sparse_bytes[members].sum()), float(job.numels[members].sum()))
        seconds = job.select_seconds(places) if select else 0.0
        messages.append(Message(tuple(places), cost, select=seconds, decode=local, collectives=collectives))
    return Schedule(Planned(tuple(messages)), (0.0,) * len(job.numels))


def line(small: CollectiveCost, large: CollectiveCost) -> LinearCost:
    """The line through the times of a collective at ``_SMALL`` and ``_LARGE`` bytes."""
    slope = (large.seconds - small.seconds) / (_LARGE - _SMALL)
    return LinearCost(max(0.0, small.seconds - slope * _SMALL), slope)

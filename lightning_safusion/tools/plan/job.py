"""A trace on a cluster: the numbers that planners need, and the messages of an iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion.plans.costs import GroupCosts, SelectionCost
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.profiling.trace import Trace
from lightning_safusion.tools.plan.cluster import Cluster, CollectiveCost
from lightning_safusion.tools.plan.paths import Path, TorchOperations
from lightning_safusion.tools.plan.schedule import Message, Schedule
from lightning_safusion.tools.plan.work import Span, Work

# Sizes between which the cost of a collective is approximated by a line.
_SMALL, _LARGE = 2.0**16, 2.0**26
# Windows over which a running job takes its median times.
_WINDOWS = 11


@dataclass(frozen=True)
class Job:
    """The common ground of all systems that are compared.

    Raises:
        ValueError: If the density is outside (0, 1], or an entry has no bytes.
    """

    trace: Trace
    cluster: Cluster
    density: float = 0.01  # share of the elements that is sent
    entry_bytes: float = 6.0  # of a sent entry on the wire, position included
    path: Path = TorchOperations()  # from gradients to means on a device
    by_update: bool = False  # elements are compared by how far the optimizer would move them
    # selection before fusion in one call per buffer, with a quota for each tensor, as this package does it; else one
    # call per tensor, as the papers describe it
    segmented: bool = True
    dense_below: int = 0  # tensors of fewer elements are dense

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density is a share in (0, 1], got {self.density}")
        if not self.entry_bytes > 0:
            raise ValueError(f"an entry needs bytes on the wire, got entry_bytes={self.entry_bytes}")

    @cached_property
    def numels(self) -> np.ndarray:
        """Elements, int64 [L]."""
        return np.array(self.trace.numels, np.int64)

    @cached_property
    def dense(self) -> np.ndarray:
        """Dense tensors, bool [L]."""
        return (self.numels < self.dense_below) | (self.numels * self.density >= self.numels)

    @cached_property
    def entries(self) -> np.ndarray:
        """Entries that each tensor sends, at least one, int64 [L]."""
        return np.where(self.dense, self.numels, np.maximum(1, (self.numels * self.density).astype(np.int64)))

    @cached_property
    def dense_bytes(self) -> np.ndarray:
        """Bytes of each tensor in fp32, float64 [L]."""
        return self.numels * 4.0

    @cached_property
    def sparse_bytes(self) -> np.ndarray:
        """Bytes that each tensor adds to a sparse message, float64 [L]; dense ones need no positions."""
        return np.where(self.dense, self.dense_bytes, self.entries * self.entry_bytes)

    @cached_property
    def backward(self) -> np.ndarray:
        """Backward times that planners see, float64 [L]. With jitter, those that the workers of a running job agree on:
        each takes the median over its latest windows, and the slowest one counts, gradient by gradient."""
        nominal = np.array([tensor.backward for tensor in self.trace.tensors])
        if self.cluster.jitter == 0:
            return nominal
        draws = [
            self.cluster.draw_factors(-1 - window, self.cluster.workers, len(nominal)) for window in range(_WINDOWS)
        ]
        ready = np.array([np.cumsum(nominal * pace[:, None] * noise, axis=1) for pace, noise in draws])
        return np.diff(np.median(ready, axis=0).max(axis=0), prepend=0.0)

    @cached_property
    def select_cost(self) -> SelectionCost:
        """Time of one selection, packing included."""
        device = self.cluster.device
        if device.selection is not None:
            return device.selection
        cost = line(lambda elements: self._counted(self.path.selection, self.span(elements)))
        return SelectionCost(cost.fixed, cost.per_byte)

    @cached_property
    def selects(self) -> np.ndarray:
        """Seconds of selecting from each tensor alone, float64 [L]."""
        return np.where(self.dense, 0.0, self.select_cost(self.numels))

    @cached_property
    def decode_cost(self) -> LinearCost:
        """Time of decoding all workers' messages, by the bytes of one of them."""
        workers = self.cluster.workers
        if self.cluster.device.decode is not None:
            return LinearCost(0.0, workers * self.cluster.device.decode / self.entry_bytes)
        return line(lambda nbytes: self.decode_seconds(self.span_of_bytes(nbytes), workers))

    def span(self, elements: float, entries: float | None = None, tensors: int = 1) -> Span:
        """A buffer of so many elements; its entries follow from the density if they are not given."""
        found = elements * self.density if entries is None else entries
        return Span(elements, found, tensors, by_update=self.by_update)

    def span_of(self, places: Sequence[int]) -> Span:
        """The buffer of the tensors at these places, without dense ones."""
        chosen = [place for place in places if not self.dense[place]]
        return self.span(float(self.numels[chosen].sum()), float(self.entries[chosen].sum()), len(chosen))

    def span_of_bytes(self, nbytes: float) -> Span:
        """The buffer whose message has so many bytes."""
        entries = nbytes / self.entry_bytes
        return self.span(entries / self.density, entries)

    def decode_seconds(self, span: Span, messages: float) -> float:
        """Adding up the entries of so many messages."""
        if self.cluster.device.decode is not None:
            return messages * span.entries * self.cluster.device.decode
        return self._counted(partial(self.path.decoding, messages=int(messages)), span)

    def _counted(self, stages: Callable[[Span], Mapping[str, Work]], span: Span) -> float:
        return self.cluster.device.seconds(stages(span)) if span.elements else 0.0

    def group_costs(self, *, sparse: bool = True, dense: bool = False) -> GroupCosts:
        """Numbers for planners whose timeline does not depend on the grouping: selection is part of being ready, and so
        is decoding, unless its published time is part of the exchange. ``sparse`` and ``dense``: buffers may take the
        all-gather, and the all-reduce in fp32."""
        selects = np.zeros(len(self.numels))
        decode, per_buffer, published = self.decode_cost, 0.0, self.cluster.device.published
        if sparse:
            share = self.select_cost.per_element * self.numels
            selects = np.where(self.dense, 0.0, share) if self.segmented else self.selects
        if sparse and not published:
            selects = selects + decode.per_byte * self.sparse_bytes
            per_buffer = (self.select_cost.fixed if self.segmented else 0.0) + decode.fixed
        gather = line(lambda nbytes: self.cluster.allgather(nbytes).seconds)
        reduce = line(lambda nbytes: self.cluster.allreduce(nbytes).seconds)
        return GroupCosts(
            numels=tuple(self.numels.tolist()),
            ready=tuple(np.cumsum(self.backward + selects).tolist()),
            sparse_bytes=tuple(self.sparse_bytes.tolist()),
            dense_bytes=tuple(self.dense_bytes.tolist()),
            world_size=self.cluster.workers,
            sparse=(gather.fixed, gather.per_byte + (decode.per_byte if published else 0.0)),
            per_buffer=per_buffer,
            dense=(reduce.fixed, reduce.per_byte),
            sparse_allowed=sparse,
            dense_allowed=dense,
            arrivals=tuple(np.cumsum(self.backward).tolist()),
            select=(self.select_cost.fixed, self.select_cost.per_element, self.select_cost.per_comparison),
        )

    def schedule(self, plan: Plan, *, behind: bool = False) -> Schedule:
        """The iteration of a plan: all-gathers of selected entries (of each merged buffer with ``behind``), and
        all-reduces in fp32."""
        at_once, selects = behind or self.segmented, np.zeros(len(self.numels))
        for group in plan.groups if not at_once else ():
            if group.collective != "allreduce":
                selects[group.start : group.stop] = self.selects[group.start : group.stop]
        return Schedule(self.messages(plan, partial(self.sparse_message, select=at_once)), selects.tolist())

    def messages(self, plan: Plan, sparse: Callable[[range], Message]) -> list[Message]:
        """A message for each group of a plan: an all-reduce in fp32, or what ``sparse`` makes of its places."""
        groups = [(range(group.start, group.stop), group.collective) for group in plan.groups]
        return [self.dense_message(places) if kind == "allreduce" else sparse(places) for places, kind in groups]

    def dense_message(self, places: Sequence[int], width: int = 4) -> Message:
        """An all-reduce of dense tensors with ``width`` bytes per element."""
        return Message(places, self.cluster.allreduce(float(self.numels[list(places)].sum()) * width))

    def sparse_message(self, places: Sequence[int], *, select: bool) -> Message:
        """An all-gather of entries of tensors; ``select``: selection runs when its last gradient is ready."""
        cost = self.cluster.allgather(float(self.sparse_bytes[list(places)].sum()))
        seconds = self.select_seconds(places) if select else 0.0
        return self.decoded(places, cost, self.span_of(places), self.cluster.workers, seconds)

    def decoded(
        self,
        places: Sequence[int],
        cost: CollectiveCost,
        span: Span,
        messages: float,
        select: float = 0.0,
        between: float = 0.0,
    ) -> Message:
        """An exchange that brings so many messages, each with the entries of a span; ``between``: seconds of selection
        between its phases."""
        decode = between + self.decode_seconds(span, messages)
        if self.cluster.device.published:
            return Message(places, replace(cost, seconds=cost.seconds + decode), select)
        commit = self._counted(self.path.commitment, span) if self.cluster.device.decode is None else 0.0
        return Message(places, cost, select, decode, commit)

    def select_seconds(self, places: Sequence[int]) -> float:
        """One selection over several tensors; dense ones need none."""
        span, published = self.span_of(places), self.cluster.device.selection
        return self._counted(self.path.selection, span) if published is None else float(published(span.elements))


def line(seconds: Callable[[float], float]) -> LinearCost:
    """The line through the times of a collective at ``_SMALL`` and ``_LARGE`` bytes."""
    slope = (seconds(_LARGE) - seconds(_SMALL)) / (_LARGE - _SMALL)
    return LinearCost(max(0.0, seconds(_SMALL) - slope * _SMALL), slope)

"""Fusion policies: which tensors share a buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np

from lightning_safusion.fusion.plans.cadence import Cadence, ReplanSchedule
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.pricing import NO_BOUNDS, Bounds, GroupPricer, element_edges, predict_finish

# Share of the finish that is not worth more buffers: each costs the host some work that no cost line shows.
_AS_GOOD = 0.01

#: Enough for the medians of a profile, the first windows of a job left out (see :class:`PlannedOnce`).
PROFILED_WINDOWS = 12


class FusionPolicy(ABC):
    """Decides where buffers begin and end. Subclass it to add a policy of your own.

    A policy is a pure function of agreed numbers: called with the same costs on every rank, it must return the same
    plan on every rank. It must not depend on anything else, such as a local clock or a local count.
    """

    #: Name in configuration files and reports.
    name: ClassVar[str]
    #: Needs measured times; otherwise the engine passes nominal ones, good enough to choose a collective.
    needs_costs: ClassVar[bool] = False
    #: Buffers fill at each worker's own pace, so that the plan does not define where they end (SAFusion, naive).
    streams: ClassVar[bool] = False
    #: Buffers are what is ready at ticks of a clock, other ones in every step.
    ticking: ClassVar[bool] = False
    #: Has sizes that can follow measured times: it implements :meth:`resized`.
    sizable: ClassVar[bool] = False
    #: When its plans are reviewed; ``None``: the first plan stays.
    cadence: Cadence | None = None

    @abstractmethod
    def plan(self, costs: GroupCosts) -> Plan:
        """Cuts the ready order into buffers and picks the collective of each.

        Args:
            costs: Agreed numbers of the L tensors in ready order.
        """

    def resized(self, costs: GroupCosts, bounds: Bounds = NO_BOUNDS) -> Plan:
        """The plan of this policy that ends first, its sizes chosen anew from measured costs. Pure."""
        return self.plan(costs)

    def schedule(self) -> ReplanSchedule | None:
        """A new schedule of when to plan again; ``None``: the first plan stays."""
        return None if self.cadence is None else ReplanSchedule(self.cadence)

    def search(self, tensors: int) -> CutSearch | None:
        """A new search among plans of L tensors, at least 1, that measures one after the other; ``None``: costs do."""
        return None

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in vars(self).items() if not key.startswith("_"))
        return f"{type(self).__name__}({options})"


class WFBP(FusionPolicy):
    """Every tensor alone, as soon as it is ready: wait-free backpropagation (Poseidon, ATC 2017)."""

    name = "wfbp"

    def plan(self, costs: GroupCosts) -> Plan:
        return GroupPricer(costs).plan(range(1, len(costs.numels) + 1))


class Aligned(FusionPolicy):
    """A fixed number of tensors per buffer, the same tensors on all workers (SAFusion, inter-worker alignment).

    Args:
        tensors_per_buffer: Tensors in each buffer but the last.
        max_elements: Closes a buffer early, before it would hold more elements than this; a larger tensor has a
            buffer of its own. ``None``: no bound.
    """

    name = "aligned"
    sizable = True

    def __init__(self, tensors_per_buffer: int = 8, max_elements: int | None = None) -> None:
        if tensors_per_buffer < 1:
            raise ValueError(f"tensors_per_buffer must be 1 or more, got {tensors_per_buffer}")
        if max_elements is not None and max_elements < 1:
            raise ValueError(f"max_elements must be 1 or more, or None for no bound, got {max_elements}")
        self.tensors_per_buffer = tensors_per_buffer
        self.max_elements = max_elements

    def plan(self, costs: GroupCosts) -> Plan:
        bounds = Bounds(max_elements=self.max_elements)
        return GroupPricer(costs).plan(_even_stops(element_edges(costs.numels), self.tensors_per_buffer, bounds))

    def resized(self, costs: GroupCosts, bounds: Bounds = NO_BOUNDS) -> Plan:
        """The number of tensors per buffer that ends first; the largest of those that come within 1 % of it."""
        edges, pricer, total = element_edges(costs.numels), GroupPricer(costs), len(costs.numels)
        limits = [limit for limit in (self.max_elements, bounds.max_elements) if limit is not None]
        bounds = Bounds(bounds.min_elements, min(limits, default=None))
        # the smallest size for each number of buffers: the others only shift the remainder
        sizes = sorted({-(-total // buffers) for buffers in range(1, total + 1)}, reverse=True)
        plans = [pricer.plan(_even_stops(edges, size, bounds)) for size in sizes]
        ends = [predict_finish(plan, costs) for plan in plans]
        good = (plan for plan, end in zip(plans, ends, strict=True) if end <= (1 + _AS_GOOD) * min(ends))
        return next(good, pricer.plan([]))


def _even_stops(edges: np.ndarray, size: int, bounds: Bounds) -> list[int]:
    stops: list[int] = []
    while (start := stops[-1] if stops else 0) < len(edges) - 1:
        stops.append(bounds.clamp(edges, start, start + size))
    return stops


class Single(FusionPolicy):
    """The whole model in one buffer, exchanged after backward: no overlap, one latency."""

    name = "single"

    def plan(self, costs: GroupCosts) -> Plan:
        return GroupPricer(costs).plan([len(costs.numels)] if costs.numels else [])


class Naive(FusionPolicy):
    """Buffers of a fixed capacity in kept elements, each closed when it is full (SAFusion, naive system).

    Workers keep different numbers of elements where thresholds are estimated, so a buffer ends after different
    tensors on different workers. The engine negotiates each exchange; :meth:`plan` has one group of all tensors.

    Args:
        buffer_elements: Kept elements that a buffer holds.
    """

    name = "naive"
    streams = True

    def __init__(self, buffer_elements: int = 65536) -> None:
        if buffer_elements < 1:
            raise ValueError(f"buffer_elements must be 1 or more, got {buffer_elements}")
        self.buffer_elements = buffer_elements

    def plan(self, costs: GroupCosts) -> Plan:
        return Single().plan(costs)


class CutSearch:
    """Cupcake's search, one partition at a time; no model of the job and no number of the network is needed.

    MergeComp (Wang et al., 2021) and Cupcake (MLSys 2023). One cut at a time: a binary search that compares a cut with
    the one two tensors later and goes to the faster side, as the release does; every range of the partition found so
    far is searched, and the best cut of all stays. It ends when a further cut gains too little. The search is exact
    where the time falls up to the best cut and rises after it, which measured times need not do.

    Args:
        tensors: Tensors (L), at least 1.
        groups: Largest number of groups, at least 1.
        tolerance: Share of the time that a further cut must save.
        windows: Windows by which each partition is judged, after a first one that does not count.
    """

    def __init__(self, tensors: int, groups: int, tolerance: float, windows: int) -> None:
        self._steps = _partitions(tensors, groups, tolerance)
        self.windows = windows
        #: The partition to measure, or the best one found: the stop of each group, rising, the last one L.
        self.stops = next(self._steps)
        self.over = False  #: it is the best one found
        #: Mean seconds of the partitions tried so far, the same on all ranks: all that a checkpoint keeps.
        self.measured: list[float] = []

    def replay(self, measured: Iterable[float]) -> None:
        """Takes the steps that follow from these seconds."""
        for seconds in measured:
            self.measured.append(float(seconds))
            try:
                self.stops = self._steps.send(float(seconds))
            except StopIteration as end:
                self.stops, self.over = end.value, True


def _partitions(tensors: int, groups: int, tolerance: float) -> Generator[list[int], float, list[int]]:
    best = [tensors]
    seconds = yield best
    while len(best) < groups:
        tried: list[tuple[float, list[int]]] = []
        for low, high in pairwise([0, *best]):
            if high - low > 1:
                tried.append((yield from _search_one(best, low + 1, high - 1)))
        if not tried or min(tried)[0] >= seconds * (1.0 - tolerance):
            break
        seconds, best = min(tried)
    return best


def _search_one(stops: Sequence[int], low: int, high: int) -> Generator[list[int], float, tuple[float, list[int]]]:
    probes: dict[int, float] = {}

    def probe(cut: int) -> Generator[list[int], float, float]:
        if cut not in probes:
            probes[cut] = yield sorted([*stops, cut])
        return probes[cut]

    left, right = low, high
    while left < right:
        middle = (left + right) // 2
        here = yield from probe(middle)
        if here <= (yield from probe(min(middle + 2, high))):
            right = middle
        else:
            left = middle + 1
    yield from probe(left)
    seconds, cut = min((seconds, cut) for cut, seconds in probes.items())
    return seconds, sorted([*stops, cut])


class Cupcake(FusionPolicy):
    """Cupcake (MLSys 2023): contiguous groups, found by trying cuts out on the running job.

    For selection after fusion (``scope="group"``). What is compared is the agreed time from the first gradient to the
    last mean; the release takes rank 0's time of an iteration, of which this is the part that cuts can change. A search
    begins anew where the density or the order of the gradients changes, and continues from a checkpoint.

    In a deterministic training, which measures nothing, the groups hold equally many tensors: the release's default.

    Args:
        groups: Largest number of groups; two in all released commands.
        tolerance: Share of the time that a further cut must save.
        windows: Windows by which each cut is judged.

    Raises:
        ValueError: If a number is out of range.
    """

    name = "cupcake"
    needs_costs = True

    def __init__(self, groups: int = 2, tolerance: float = 0.0, windows: int = 20) -> None:
        if groups < 1:
            raise ValueError(f"groups must be 1 or more, got {groups}")
        if not 0.0 <= tolerance < 1.0:
            raise ValueError(f"tolerance is a share in [0, 1), got {tolerance}")
        if windows < 1:
            raise ValueError(f"windows must be 1 or more, got {windows}")
        self.groups = groups
        self.tolerance = tolerance
        self.windows = windows

    def plan(self, costs: GroupCosts) -> Plan:
        total = len(costs.numels)
        groups = min(self.groups, total)
        stops = [total // groups * group for group in range(1, groups)]
        return GroupPricer(costs).plan([*stops, total] if total else [])

    def search(self, tensors: int) -> CutSearch:
        return CutSearch(tensors, self.groups, self.tolerance, self.windows)


class PlannedOnce(FusionPolicy):
    """Plans once, when the first windows have been measured, and anew where the order of the gradients changes.

    Until then, and in a deterministic training for good, the same rule plans with modelled times.

    Args:
        windows: Windows (backward passes that exchange) that are measured before.

    Raises:
        ValueError: If there is no such window.
    """

    needs_costs = True

    def __init__(self, windows: int = PROFILED_WINDOWS) -> None:
        if windows < 3:
            raise ValueError(f"windows must be 3 or more, since the first ones set up communicators, got {windows}")
        self.windows = windows

    def schedule(self) -> ReplanSchedule:
        return ReplanSchedule(Cadence.once(self.windows))

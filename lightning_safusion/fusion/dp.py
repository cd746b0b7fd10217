"""Planners: where to cut the ready order into buffers, from agreed cost numbers.

All of them price a buffer in the same way, as the cheaper of the collectives that are allowed:
``fixed + per_byte * bytes``; and share one model of time: a buffer leaves when its last gradient is ready and the link
is free (MG-WFBP, Shi et al., INFOCOM 2019, section 4), and handling it delays the gradients behind it. They are pure
functions, so equal costs give equal plans on every rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lightning_safusion.fusion.plan import CollectiveName, Group, GroupCosts, Plan

# Seconds that a buffer outside its bounds is charged: more than any exchange, so that the fewest possible are.
_OUT_OF_BOUNDS = 1e6


class Bounds(NamedTuple):
    """Elements that a buffer may hold.

    Args:
        min_elements: At least; the last buffer holds what is left.
        max_elements: At most, but for one larger tensor alone; counts more where both cannot hold. None: no bound.
    """

    min_elements: int = 0
    max_elements: int | None = None

    def check(self) -> Bounds:
        """Returns these bounds.

        Raises:
            ValueError: If no buffer can keep them.
        """
        if self.min_elements < 0:
            raise ValueError(f"min_elements must not be negative, got {self.min_elements}")
        if self.max_elements is not None and self.max_elements < max(1, self.min_elements):
            raise ValueError(
                f"max_elements must be 1 or more and not below min_elements={self.min_elements}, or None for no "
                f"bound, got {self.max_elements}"
            )
        return self

    def clamp(self, edges: np.ndarray, start: int, stop: int) -> int:
        """The stop nearest to ``stop`` with which a buffer from ``start`` keeps the bounds.

        Args:
            edges: Elements before each tensor and in all, int64 [L + 1].
            start: Place of its first tensor.
            stop: Place after its last, as wanted.
        """
        total = len(edges) - 1
        stop = max(stop, int(np.searchsorted(edges, edges[start] + self.min_elements)))
        if self.max_elements is not None:
            stop = min(stop, int(np.searchsorted(edges, edges[start] + self.max_elements, side="right")) - 1)
        return min(max(stop, start + 1), total)

    def charge(self, edges: np.ndarray, starts: np.ndarray, stop: int) -> np.ndarray:
        """Seconds by which the exact programme dislikes the buffers ``[start, stop)``, float64 [S]."""
        held = edges[stop] - edges[starts]
        outside = (held < self.min_elements) & (stop < len(edges) - 1)
        if self.max_elements is not None:
            outside = outside | ((held > self.max_elements) & (stop - starts > 1))
        return np.where(outside, _OUT_OF_BOUNDS, 0.0)


#: Buffers of any size.
NO_BOUNDS = Bounds()


def element_edges(numels: Sequence[int]) -> np.ndarray:
    """Elements before each tensor and in all, int64 [L + 1]."""
    return np.concatenate([[0], np.cumsum(numels, dtype=np.int64)])


class GroupPricer:
    """Seconds that a buffer of consecutive tensors occupies the link, for any buffer in constant time.

    Args:
        costs: The agreed numbers of L tensors.

    Raises:
        ValueError: If the numbers do not describe the same tensors, ``ready`` is not finite and rising, a cost is
            negative, or no collective is allowed.
    """

    def __init__(self, costs: GroupCosts) -> None:
        _check(costs)
        # Sequential prefix sums: the rounding does not depend on the width of a host's vector units.
        self._bytes: dict[CollectiveName, np.ndarray] = {
            "allgather": np.cumsum([0.0, *costs.sparse_bytes]),
            "allreduce": np.cumsum([0.0, *costs.dense_bytes]),
        }
        self._line: dict[CollectiveName, tuple[float, float]] = {"allgather": costs.sparse, "allreduce": costs.dense}
        self._allowed: list[CollectiveName] = []
        if costs.sparse_allowed:
            self._allowed.append("allgather")
        if costs.dense_allowed:
            self._allowed.append("allreduce")

    def prices(self, collective: CollectiveName, starts: np.ndarray, stop: int) -> np.ndarray:
        """Seconds of the buffers ``[start, stop)`` for each start (int64 [S]) -> float64 [S].

        Raises:
            ValueError: If ``collective`` is a stream, whose buffers do not end where the plan's groups do.
        """
        if collective not in self._line:
            raise ValueError(
                f"the time of {collective!r} cannot be predicted from a plan: price one of {list(self._line)}"
            )
        fixed, per_byte = self._line[collective]
        prefix = self._bytes[collective]
        return fixed + per_byte * (prefix[stop] - prefix[starts])

    def price(self, collective: CollectiveName, start: int, stop: int) -> float:
        """Seconds of the buffer ``[start, stop)`` over ``collective``."""
        return float(self.prices(collective, np.array([start]), stop)[0])

    def cheapest(self, starts: np.ndarray, stop: int) -> np.ndarray:
        """Seconds of the buffers ``[start, stop)`` over the best collective allowed, float64 [S]."""
        best = self.prices(self._allowed[0], starts, stop)
        for collective in self._allowed[1:]:
            best = np.minimum(best, self.prices(collective, starts, stop))
        return best

    def choose(self, start: int, stop: int) -> CollectiveName:
        """The cheapest collective allowed for ``[start, stop)``; the sparse one when they cost the same."""
        return min(self._allowed, key=lambda collective: self.price(collective, start, stop))

    def plan(self, stops: Iterable[int]) -> Plan:
        """The plan whose buffers end at ``stops`` (rising places), each with its cheapest collective."""
        cuts = pairwise([0, *stops])
        return Plan(tuple(Group(start, stop, self.choose(start, stop)) for start, stop in cuts))


# Buffers of a plan that are expected.
_FEW_BUFFERS = 16


def optimal_cuts(
    ready: Sequence[float] | np.ndarray,
    cost: Callable[[np.ndarray, int], np.ndarray],
    first_last: int = 0,
    per_buffer: float = 0.0,
) -> list[int]:
    """Cuts the ready order so that the last exchange ends as early as possible: exact, O(L^2) for each buffer used.

    Forward, ``finish[n, j]`` is the earliest time at which tensors 0 to j - 1 can have been exchanged in n buffers::

        finish[n, j] = min over i < j of  max(finish[n - 1, i], ready[j - 1] + n * per_buffer) + cost(i, j)

    as far as n buffers end earlier than fewer do. Backward, each buffer is made as large as the deadline of the buffer
    after it permits. Among all optimal plans this takes one with the fewest buffers, then the earliest cuts: whatever
    the order of evaluation, every rank finds the same plan. It is also the aim of SAFusion's intra-worker adjustment
    (HPDC 2025): a buffer is ready just when the link becomes free.

    Args:
        ready: Seconds at which each tensor is ready, rising [L].
        cost: ``cost(starts, stop)`` -> seconds of the buffers ``[start, stop)`` for int64 starts [S], float64 [S].
            Any function that is not negative.
        first_last: First place at which the last buffer may start, 0 to L - 1.
        per_buffer: Seconds by which each buffer delays everything that is ready from its last tensor on.

    Returns:
        The stop of each buffer, rising, the last one L.

    Raises:
        ValueError: If ``first_last`` leaves no tensor for the last buffer.
    """
    total = len(ready)
    if total == 0:
        return []
    if not 0 <= first_last < total:
        raise ValueError(f"the last buffer must start at a place from 0 to {total - 1}, got first_last={first_last}")
    starts = np.arange(total)
    delays = per_buffer * np.arange(1, total + 1)[:, None]
    finish = np.full((min(total, _FEW_BUFFERS) + 1, total + 1), np.inf)  # more rows when so many buffers pay
    finish[0, 0] = 0.0
    most = 1  # rows of finish that are in use
    for stop in range(1, total + 1):
        first = first_last if stop == total else 0
        busy = cost(starts[first:stop], stop)
        ends = (np.maximum(finish[:most, first:stop], ready[stop - 1] + delays[:most]) + busy).min(axis=1)
        best = np.minimum.accumulate(ends)
        pays = np.flatnonzero(ends < np.concatenate([[np.inf], best[:-1]]))
        most = max(most, int(pays[-1]) + 2)
        while most > len(finish):
            finish = np.concatenate([finish, np.full_like(finish, np.inf)])
        finish[1 + pays, stop] = ends[pays]

    count, stop = int(np.argmin(finish[:, total])), total
    stops, deadline = [], finish[count, total]
    while stop > 0:
        first = first_last if stop == total else 0
        busy = cost(starts[first:stop], stop)
        count -= 1
        ends = np.maximum(finish[count, first:stop], ready[stop - 1] + delays[count]) + busy
        choice = int(np.argmax(ends <= deadline))  # the first that is in time
        stops.append(stop)
        stop = first + choice
        # Rounding of the subtraction must not put the deadline before the earliest possible finish.
        deadline = max(finish[count, stop], deadline - busy[choice])
    return stops[::-1]


def plan_optimal(costs: GroupCosts, *, max_last_share: float = 0.5, bounds: Bounds = NO_BOUNDS) -> Plan:
    """The plan whose last exchange ends first, by the exact programme of :func:`optimal_cuts`.

    Args:
        costs: The agreed numbers.
        max_last_share: Largest share of the model's elements in the last buffer, in (0, 1]; its last tensor is always
            admitted. Nothing hides the last buffer, so a wrong measurement costs most there: the released SAFusion
            planner puts up to 93 % of a model into it. 1 lifts the bound.
        bounds: Elements of a buffer; as few buffers as possible are outside.

    Raises:
        ValueError: If ``max_last_share`` is outside (0, 1] or the costs are not usable.
    """
    check_share(max_last_share)
    pricer = GroupPricer(costs)
    edges = element_edges(costs.numels)

    def charged(starts: np.ndarray, stop: int) -> np.ndarray:
        return pricer.cheapest(starts, stop) + bounds.charge(edges, starts, stop)

    price = pricer.cheapest if bounds == NO_BOUNDS else charged
    first_last = _first_last(costs.numels, max_last_share)
    return pricer.plan(optimal_cuts(costs.ready, price, first_last, costs.per_buffer))


def plan_greedy(costs: GroupCosts, bounds: Bounds = NO_BOUNDS) -> Plan:
    """The papers' rule: the next buffer is ready just when the link becomes free.

    SAFusion (HPDC 2025, intra-worker buffer sizing) asks of every consecutive pair that the exchange of a buffer
    takes at least as long as backward and selection of the next one, and as close to equality as possible. Read
    forward: each buffer takes as many tensors as get ready while the one before it is exchanged, and the first
    buffer is the smallest with which no buffer comes out empty. The rule does not see how much is left for the
    last buffer, which nothing hides; the exact programme without a bound is never worse.

    Args:
        costs: The agreed numbers.
        bounds: Elements of a buffer, kept before the rule.
    """
    pricer = GroupPricer(costs)
    total = len(costs.ready)
    edges = element_edges(costs.numels)
    for first in range(1, total + 1):
        stops = _covering_stops(costs.ready, pricer, first, edges, bounds)
        if stops[-1] == total:
            return pricer.plan(stops)
    return Plan(())


def predict_finish(plan: Plan, costs: GroupCosts) -> float:
    """Seconds from the start of backward to the end of the last exchange of ``plan``.

    Args:
        plan: A plan of the L tensors that ``costs`` describes.
        costs: The agreed numbers.

    Raises:
        ValueError: If the plan covers another number of tensors.
    """
    if plan.num_tensors != len(costs.ready):
        raise ValueError(
            f"the plan covers {plan.num_tensors} tensors but the costs describe {len(costs.ready)}: plan again"
        )
    pricer = GroupPricer(costs)
    free = 0.0
    for count, group in enumerate(plan.groups, 1):
        begin = max(free, costs.ready[group.stop - 1] + count * costs.per_buffer)
        free = begin + pricer.price(group.collective, group.start, group.stop)
    return free


def choose_collective(costs: GroupCosts, start: int, stop: int) -> CollectiveName:
    """The collective that carries tensors ``start`` to ``stop - 1`` in the least predicted time.

    Args:
        costs: The agreed numbers, with the collectives that are allowed.
        start: Place of the first tensor.
        stop: Place after the last tensor.
    """
    return GroupPricer(costs).choose(start, stop)


def check_share(max_last_share: float) -> None:
    """Refuses a share outside (0, 1]."""
    if not 0.0 < max_last_share <= 1.0:
        raise ValueError(f"max_last_share is a share of the model in (0, 1], got {max_last_share}")


def _covering_stops(
    ready: Sequence[float], pricer: GroupPricer, first: int, edges: np.ndarray, bounds: Bounds
) -> list[int]:
    """Stops of the greedy rule with a first buffer of ``first`` tensors; ends early where a buffer would be empty."""
    start, stop = 0, bounds.clamp(edges, 0, first)
    stops = [stop]
    while stop < len(ready):
        busy = pricer.price(pricer.choose(start, stop), start, stop)
        covered = bisect_right(ready, ready[stop - 1] + busy, lo=stop)
        if covered == stop and first < len(ready):  # the last try counts, whatever it looks like
            break
        start, stop = stop, bounds.clamp(edges, stop, covered)
        stops.append(stop)
    return stops


def _first_last(numels: Sequence[int], share: float) -> int:
    """First place at which a last buffer of at most ``share`` of the elements may start."""
    if not numels:
        return 0
    # Empty tensors at the end must not push the last real one out of every last buffer.
    last = next((numel for numel in reversed(numels) if numel), 0)
    room = max(share * sum(numels), last)
    place, held = len(numels) - 1, numels[-1]
    while place > 0 and held + numels[place - 1] <= room:
        place -= 1
        held += numels[place]
    return place


def _check(costs: GroupCosts) -> None:
    lengths = {
        "numels": len(costs.numels),
        "ready": len(costs.ready),
        "sparse_bytes": len(costs.sparse_bytes),
        "dense_bytes": len(costs.dense_bytes),
    }
    if len(set(lengths.values())) > 1:
        raise ValueError(f"costs must hold one number per tensor, got lengths {lengths}")
    ready = np.asarray(costs.ready, dtype=np.float64)
    if not np.isfinite(ready).all() or (np.diff(ready) < 0).any():
        raise ValueError(f"ready times must be finite and rising, got {costs.ready}")
    numbers = (*costs.sparse, *costs.dense, costs.per_buffer, *costs.sparse_bytes, *costs.dense_bytes)
    if not all(0.0 <= number < float("inf") for number in numbers):
        raise ValueError(
            f"costs and bytes must be finite and not negative: sparse={costs.sparse}, dense={costs.dense}, "
            f"per_buffer={costs.per_buffer}"
        )
    if not (costs.sparse_allowed or costs.dense_allowed):
        raise ValueError("no collective is allowed: allow the sparse all-gather, the dense all-reduce, or both")

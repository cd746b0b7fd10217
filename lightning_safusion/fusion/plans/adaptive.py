"""SAFusion's adaptive buffers: the exact programme, the paper's greedy rule, and the policies that plan by them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
from typing_extensions import Unpack

from lightning_safusion.fusion.plans.cadence import Cadence, CadenceOptions
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.policy import FusionPolicy
from lightning_safusion.fusion.plans.pricing import NO_BOUNDS, Bounds, GroupPricer, element_edges
from lightning_safusion.lookup import check_name

Rule = Literal["optimal", "paper"]

# Rows of the table of the exact programme at first: buffers of a plan.
_FEW_BUFFERS = 16


class Adaptive(FusionPolicy):
    """Buffers sized by measured times, the same tensors on all workers (SAFusion, inter- and intra-worker).

    A new plan is kept if the windows with it are shorter by the clock than those before; else the old one comes back.

    Args:
        rule: ``"optimal"``: the exact programme. ``"paper"``: the greedy rule of the SAFusion paper.
        max_last_share: Largest share of the model's elements in the last buffer, in (0, 1] (rule ``"optimal"``).
        cadence: When plans are reviewed, and how large a gain is worth a change.
        options: Arguments of the cadence, one by one; deprecated.
    """

    name = "adaptive"
    needs_costs = True
    sizable = True

    def __init__(
        self,
        rule: Rule = "optimal",
        max_last_share: float = 0.5,
        cadence: Cadence | None = None,
        **options: Unpack[CadenceOptions],
    ) -> None:
        check_name("rule", rule, get_args(Rule))
        if not 0.0 < max_last_share <= 1.0:
            raise ValueError(f"max_last_share is a share of the model in (0, 1], got {max_last_share}")
        self.rule = rule
        self.max_last_share = max_last_share
        self.cadence = Cadence.of("Adaptive", cadence, **options)

    def plan(self, costs: GroupCosts) -> Plan:
        return self.resized(costs)

    def resized(self, costs: GroupCosts, bounds: Bounds = NO_BOUNDS) -> Plan:
        if self.rule == "paper":
            return plan_greedy(costs, bounds)
        return plan_optimal(costs, max_last_share=self.max_last_share, bounds=bounds)


class Tuned(FusionPolicy):
    """Another policy, its sizes reviewed while the job runs: what ``BufferSizeTuner`` makes of a strategy's policy.

    The job begins with the policy's own plan, and its sizes follow once times have been measured.

    Args:
        policy: Its buffers are sized.
        cadence: When plans are reviewed, and how large a gain is worth a change.
        bounds: Elements of a buffer.

    Raises:
        ValueError: If the policy has no sizes to choose, or no buffer can keep the bounds.
    """

    name = "tuned"
    needs_costs = True

    def __init__(self, policy: FusionPolicy, cadence: Cadence | None = None, bounds: Bounds = NO_BOUNDS) -> None:
        if not policy.sizable or policy.streams:
            raise ValueError(f"fusion policy {policy!r} has no sizes to choose: use 'adaptive', 'aligned' or 'behind'")
        self.policy = policy
        self.cadence = cadence or Cadence()
        self.bounds = bounds.check()

    def plan(self, costs: GroupCosts) -> Plan:
        return self.policy.plan(costs)

    def resized(self, costs: GroupCosts, bounds: Bounds = NO_BOUNDS) -> Plan:
        return self.policy.resized(costs, self.bounds)


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
        cost: ``cost(starts, stop)``: seconds, not negative, of the buffers ``[start, stop)``; int64 [S] -> float64 [S].
        first_last: First place at which the last buffer may start, 0 to L - 1.
        per_buffer: Seconds by which each buffer delays everything that is ready from its last tensor on.

    Returns:
        The stop of each buffer, rising, the last one L.
    """
    total = len(ready)
    if total == 0:
        return []
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

    ``max_last_share``: largest share of the model's elements in the last buffer, in (0, 1]; its last tensor is always
    admitted. Nothing hides the last buffer, so a wrong measurement costs most there: the released SAFusion planner puts
    up to 93 % of a model into it. 1 lifts the bound. As few buffers as possible are outside of the bounds.
    """
    pricer = GroupPricer(costs)
    edges = element_edges(costs.numels)

    def charged(starts: np.ndarray, stop: int) -> np.ndarray:
        return pricer.cheapest(starts, stop) + bounds.charge(edges, starts, stop)

    price = pricer.cheapest if bounds == NO_BOUNDS else charged
    # Empty tensors at the end must not push the last real one out of every last buffer.
    last = next((numel for numel in reversed(costs.numels) if numel), 0)
    fits = edges[-1] - edges[:-1] <= max(max_last_share * edges[-1], last)
    first_last = int(np.argmax(fits)) if costs.numels else 0
    return pricer.plan(optimal_cuts(costs.ready, price, first_last, costs.per_buffer))


def plan_greedy(costs: GroupCosts, bounds: Bounds = NO_BOUNDS) -> Plan:
    """The papers' rule: the next buffer is ready just when the link becomes free.

    SAFusion (HPDC 2025, intra-worker buffer sizing) asks of every consecutive pair that the exchange of a buffer
    takes at least as long as backward and selection of the next one, and as close to equality as possible. Read
    forward: each buffer takes as many tensors as get ready while the one before it is exchanged, and the first
    buffer is the smallest with which no buffer is empty. The rule ignores the size of the last buffer, which
    nothing hides; the exact programme without a bound is never worse. Bounds are kept before the rule.
    """
    pricer = GroupPricer(costs)
    total = len(costs.ready)
    edges = element_edges(costs.numels)
    for first in range(1, total + 1):
        stops = _covering_stops(costs.ready, pricer, first, edges, bounds)
        if stops[-1] == total:
            return pricer.plan(stops)
    return Plan(())


def _covering_stops(
    ready: Sequence[float], pricer: GroupPricer, first: int, edges: np.ndarray, bounds: Bounds
) -> list[int]:
    """Stops of the greedy rule with a first buffer of ``first`` tensors; ends early where a buffer would be empty."""
    start, stop = 0, bounds.clamp(edges, 0, first)
    stops = [stop]
    while stop < len(ready):
        busy = pricer.price(pricer.choose(start, stop), start, stop)
        covered = bisect_right(ready, ready[stop - 1] + busy, lo=stop)
        if covered == stop and first < len(ready):  # all in one buffer is the last try
            break
        start, stop = stop, bounds.clamp(edges, stop, covered)
        stops.append(stop)
    return stops

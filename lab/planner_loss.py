"""Random instances, exact plans to compare with, and how far a plan is from the best one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np

from lightning_safusion.fusion.plans.costs import GroupCosts, SelectionCost
from lightning_safusion.fusion.plans.plan import CollectiveName, Plan
from lightning_safusion.fusion.plans.pricing import predict_finish


def predict_behind(plan: Plan, costs: GroupCosts) -> float:
    """Seconds from the start of backward to the end of the last exchange, with selection on the compute stream.

    Args:
        plan: A plan of the L tensors that ``costs`` describes.
        costs: The numbers; of ``arrivals``, ``select`` and ``sparse``, decoding left out.

    Raises:
        ValueError: If the plan covers another number of tensors.
    """
    if plan.num_tensors != len(costs.numels):
        raise ValueError(f"the plan covers {plan.num_tensors} tensors but the costs describe {len(costs.numels)}")
    backward, select = np.diff(costs.arrivals, prepend=0.0), SelectionCost(*costs.select)
    fixed, per_byte = costs.sparse
    compute = link = 0.0
    for group in plan.groups:
        members = slice(group.start, group.stop)
        compute += float(sum(backward[members]) + select(sum(costs.numels[members])))
        link = max(link, compute) + fixed + per_byte * sum(costs.sparse_bytes[members])
    return link


def plan_pareto(costs: GroupCosts) -> Plan:
    """The plan whose last exchange ends first when selection over a merged buffer delays the gradients after it.

    Exact. After ``j`` tensors only two numbers matter: the seconds spent on selection so far, and the end of the last
    exchange. A state that another one beats in both can be dropped; the remaining fronts are a few dozen states long.

    Args:
        costs: The numbers, as in :func:`predict_behind`.
    """
    total = len(costs.numels)
    if total == 0:
        return Plan(())
    elements = np.concatenate([[0], np.cumsum(costs.numels, dtype=np.int64)])
    nbytes = np.cumsum([0.0, *costs.sparse_bytes])
    select, (fixed, per_byte) = SelectionCost(*costs.select), costs.sparse
    # All states kept so far, of all prefixes: how many tensors they cover, what they cost, and where they came from.
    places, parents = np.array([0]), np.array([-1])
    spent, ends = np.array([0.0]), np.array([0.0])
    for stop in range(1, total + 1):
        selection = spent + select(elements[stop] - elements[places])
        exchange = fixed + per_byte * (nbytes[stop] - nbytes[places])
        finish = np.maximum(ends, costs.arrivals[stop - 1] + selection) + exchange
        kept = _front(selection, finish)
        places = np.concatenate([places, np.full(len(kept), stop)])
        parents = np.concatenate([parents, kept])
        spent, ends = np.concatenate([spent, selection[kept]]), np.concatenate([ends, finish[kept]])
    last = np.flatnonzero(places == total)
    state = int(last[np.argmin(ends[last])])
    stops = []
    while state > 0:
        stops.append(int(places[state]))
        state = int(parents[state])
    return Plan.from_stops(stops[::-1])


def _front(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Indices of the pairs that no other pair beats in both numbers; of equal pairs the earliest."""
    order = np.lexsort((second, first))
    best_before = np.concatenate([[np.inf], np.minimum.accumulate(second[order])[:-1]])
    return order[second[order] < best_before]


def all_plans(length: int, collective: CollectiveName = "allgather") -> Iterator[Plan]:
    """All plans of so many tensors, with one collective."""
    for cuts in range(length):
        for inner in combinations(range(1, length), cuts):
            yield Plan.from_stops([*inner, length], collective)


def random_dense(rng: np.random.Generator, length: int) -> GroupCosts:
    """Costs of so many tensors whose buffers are dense."""
    numels = rng.integers(1, 40, length)
    return GroupCosts(
        numels=tuple(numels.tolist()),
        ready=tuple(np.cumsum(rng.uniform(0, 4, length)).tolist()),
        sparse_bytes=(0.0,) * length,
        dense_bytes=tuple((numels * 4.0).tolist()),
        world_size=4,
        sparse=(0.0, 0.0),
        dense=(float(rng.uniform(0.1, 6)), float(rng.uniform(0.005, 0.06))),
        sparse_allowed=False,
    )


def random_behind(rng: np.random.Generator, length: int) -> GroupCosts:
    """Costs of so many tensors with selection after fusion."""
    numels = rng.integers(1, 40, length)
    sorting = SelectionCost(0.0, 0.0, float(rng.uniform(0, 0.02)))
    scanning = SelectionCost(float(rng.uniform(0, 2)), float(rng.uniform(0, 0.05)))
    arrivals = tuple(np.cumsum(rng.uniform(0, 4, length)).tolist())
    selection = sorting if rng.integers(2) else scanning
    return GroupCosts(
        numels=tuple(numels.tolist()),
        ready=arrivals,
        sparse_bytes=tuple((numels * 0.5).tolist()),
        dense_bytes=(0.0,) * length,
        world_size=4,
        sparse=(float(rng.uniform(0.1, 6)), float(rng.uniform(0.02, 0.5))),
        dense=(0.0, 0.0),
        dense_allowed=False,
        arrivals=arrivals,
        select=(selection.fixed, selection.per_element, selection.per_comparison),
    )


def best_dense(costs: GroupCosts) -> float:
    """Earliest finish of all plans with dense buffers."""
    return min(predict_finish(plan, costs) for plan in all_plans(len(costs.numels), "allreduce"))


def best_behind(costs: GroupCosts) -> float:
    """Earliest finish of all plans with selection after fusion."""
    return min(predict_behind(plan, costs) for plan in all_plans(len(costs.numels)))


def losses(
    make: Callable[[np.random.Generator, int], GroupCosts],
    planner: Callable[[GroupCosts], Plan],
    instances: int,
    longest: int = 8,
    seed: int = 0,
) -> np.ndarray:
    """Share by which the planner's finish exceeds the best one, of each random instance."""
    rng = np.random.default_rng(seed)
    lost = []
    for _ in range(instances):
        costs = make(rng, int(rng.integers(1, longest + 1)))
        plan = planner(costs)
        if costs.dense_allowed:
            lost.append(predict_finish(plan, costs) / best_dense(costs) - 1)
        else:
            lost.append(predict_behind(plan, costs) / best_behind(costs) - 1)
    return np.array(lost)

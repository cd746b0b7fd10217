"""Random instances, brute force over all plans, and how far a plan is from the best one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np

from lightning_safusion.fusion.behind import BehindCosts, SelectionCost, predict_behind
from lightning_safusion.fusion.dp import predict_finish
from lightning_safusion.fusion.plan import CollectiveName, GroupCosts, Plan


def all_plans(length: int, collective: CollectiveName = "allgather") -> Iterator[Plan]:
    for cuts in range(length):
        for inner in combinations(range(1, length), cuts):
            edges = [0, *inner, length]
            yield Plan.from_counts(np.diff(edges).tolist(), collective)


def random_dense(rng: np.random.Generator, length: int) -> GroupCosts:
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


def random_behind(rng: np.random.Generator, length: int) -> BehindCosts:
    numels = rng.integers(1, 40, length)
    sorting = SelectionCost(0.0, 0.0, float(rng.uniform(0, 0.02)))
    scanning = SelectionCost(float(rng.uniform(0, 2)), float(rng.uniform(0, 0.05)))
    return BehindCosts(
        numels=tuple(numels.tolist()),
        backward=tuple(rng.uniform(0, 4, length).tolist()),
        sparse_bytes=tuple((numels * 0.5).tolist()),
        selection=sorting if rng.integers(2) else scanning,
        exchange=(float(rng.uniform(0.1, 6)), float(rng.uniform(0.02, 0.5))),
    )


def best_dense(costs: GroupCosts) -> float:
    return min(predict_finish(plan, costs) for plan in all_plans(len(costs.numels), "allreduce"))


def best_behind(costs: BehindCosts) -> float:
    return min(predict_behind(plan, costs) for plan in all_plans(len(costs.numels)))


def losses(
    make: Callable[[np.random.Generator, int], GroupCosts | BehindCosts],
    planner: Callable[..., Plan],
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
        if isinstance(costs, GroupCosts):
            lost.append(predict_finish(plan, costs) / best_dense(costs) - 1)
        else:
            lost.append(predict_behind(plan, costs) / best_behind(costs) - 1)
    return np.array(lost)

"""The published planners: how far they are from the best plan, and their rules written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from lab.planner_loss import (
    all_plans,
    losses,
    plan_pareto,
    predict_behind,
    random_behind,
    random_dense,
)
from lightning_safusion.fusion.plans.adaptive import plan_optimal
from lightning_safusion.fusion.plans.costs import GroupCosts, SelectionCost
from lightning_safusion.fusion.plans.merging import MGWFBP, OMGS
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.policy import CutSearch
from lightning_safusion.fusion.plans.pricing import predict_finish
from tests.fusion.jobs import counts

# The counter-example to greedy merging: each merge delays the start by less than a message costs, but delays add up.
ACCUMULATING = GroupCosts(
    numels=(5, 5, 5),
    ready=(0.0, 0.9, 1.8),
    sparse_bytes=(0.0, 0.0, 0.0),
    dense_bytes=(5.0, 5.0, 5.0),
    world_size=4,
    sparse=(0.0, 0.0),
    dense=(1.0, 1.0),
    sparse_allowed=False,
)


def test_mgwfbp_chains_merges_whose_delays_accumulate() -> None:
    greedy, optimum = MGWFBP().plan(ACCUMULATING), plan_optimal(ACCUMULATING, max_last_share=1.0)
    assert counts(greedy) == [3]
    assert predict_finish(greedy, ACCUMULATING) == pytest.approx(17.8)
    assert counts(optimum) == [1, 2]
    assert predict_finish(optimum, ACCUMULATING) == pytest.approx(17.0)


def test_mgwfbp_released_merges_small_groups_whatever_they_cost() -> None:
    lonely = replace(ACCUMULATING, ready=(0.0, 100.0, 200.0))
    assert counts(MGWFBP().plan(lonely)) == [1, 1, 1]
    assert counts(MGWFBP(min_elements=6).plan(lonely)) == [2, 1]


def test_mgwfbp_misses_the_optimum_sometimes() -> None:
    lost = losses(random_dense, MGWFBP().plan, 50)
    assert 0.01 < lost.max() < 0.5
    assert lost.mean() < 0.06


def test_omgs_misses_the_optimum_often() -> None:
    lost = losses(random_behind, OMGS().plan, 50)
    assert (lost > 1e-9).mean() > 0.3
    assert lost.mean() < 0.1


def omgs_by_hand(costs: GroupCosts) -> list[int]:
    """The rule with the tables of all tensors, recomputed from the start after every merge, as it was published."""
    sizes = [float(n) for n in costs.numels]
    times = np.diff(costs.arrivals, prepend=0.0).tolist()
    nbytes, members, select = list(costs.sparse_bytes), [1] * len(sizes), SelectionCost(*costs.select)
    place = 0
    while place < len(sizes) - 1:
        selected = link = begin = 0.0
        for group in range(place + 1):
            selected += times[group] + float(select(sizes[group]))
            begin = max(link, selected)
            link = begin + costs.sparse[0] + costs.sparse[1] * nbytes[group]
        both = float(select(sizes[place] + sizes[place + 1]))
        wait = times[place + 1] + both - float(select(sizes[place]) + select(sizes[place + 1]))
        wait -= begin - selected
        if wait < costs.sparse[0] - 1e-12:
            for table in (sizes, times, nbytes, members):
                table[place] += table.pop(place + 1)
        else:
            place += 1
    return members


def test_omgs_follows_its_rule() -> None:
    rng = np.random.default_rng(2)
    for _ in range(100):
        costs = random_behind(rng, int(rng.integers(1, 12)))
        assert counts(OMGS().plan(costs)) == omgs_by_hand(costs)


def test_planners_take_no_tensors_and_one() -> None:
    rng = np.random.default_rng(0)
    for planner in (OMGS().plan, plan_pareto):
        assert planner(random_behind(rng, 0)) == Plan(())
        assert counts(planner(random_behind(rng, 1))) == [1]


def test_predictions_refuse_plans_of_other_tensors() -> None:
    with pytest.raises(ValueError, match="3 tensors"):
        predict_behind(Plan.from_stops([3]), random_behind(np.random.default_rng(0), 2))


def searched(measure: Callable[[list[int]], float], tensors: int, groups: int = 2, tolerance: float = 0.0) -> list[int]:
    """The stops that the search ends with."""
    search = CutSearch(tensors, groups, tolerance, windows=1)
    while not search.over:
        search.replay([measure(search.stops)])
    return search.stops


def test_cut_search_finds_the_best_cut_of_a_time_with_one_minimum() -> None:
    for best in (1, 2, 17, 62, 98, 99):
        probes: list[tuple[int, ...]] = []

        def measure(stops: list[int], best: int = best, probes: list[tuple[int, ...]] = probes) -> float:
            probes.append(tuple(stops))
            return 200.0 if len(stops) == 1 else 100.0 + abs(stops[0] - best)

        assert searched(measure, 100) == [best, 100]
        assert len(probes) < 25


def test_cut_search_adds_cuts_as_long_as_they_pay() -> None:
    costs = random_behind(np.random.default_rng(3), 9)

    def measure(stops: list[int]) -> float:
        return predict_behind(Plan.from_stops(stops), costs)

    seconds = [measure(searched(measure, 9, groups)) for groups in (1, 2, 3, 9)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] >= min(predict_behind(plan, costs) for plan in all_plans(9)) - 1e-12
    assert searched(measure, 9, 9, tolerance=1.0) == [9]

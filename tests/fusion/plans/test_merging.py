"""The published planners: how far they are from the best plan, and their rules written out."""

from __future__ import annotations

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
from lightning_safusion.fusion.plans.costs import GroupCosts, SelectionCost
from lightning_safusion.fusion.plans.merging import BehindCosts, plan_mgwfbp, plan_omgs, sparse_plan
from lightning_safusion.fusion.plans.optimal import plan_optimal
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.pricing import predict_finish
from lightning_safusion.fusion.plans.searching import even_cuts, search_cuts

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


def counts(plan: Plan) -> list[int]:
    return [group.stop - group.start for group in plan.groups]


def test_mgwfbp_chains_merges_whose_delays_accumulate() -> None:
    greedy, optimum = plan_mgwfbp(ACCUMULATING), plan_optimal(ACCUMULATING, max_last_share=1.0)
    assert counts(greedy) == [3]
    assert predict_finish(greedy, ACCUMULATING) == pytest.approx(17.8)
    assert counts(optimum) == [1, 2]
    assert predict_finish(optimum, ACCUMULATING) == pytest.approx(17.0)


def test_mgwfbp_released_merges_small_groups_whatever_they_cost() -> None:
    lonely = replace(ACCUMULATING, ready=(0.0, 100.0, 200.0))
    assert counts(plan_mgwfbp(lonely)) == [1, 1, 1]
    assert counts(plan_mgwfbp(lonely, min_elements=6)) == [2, 1]


def test_mgwfbp_is_dense_where_only_dense_is_allowed() -> None:
    assert {group.collective for group in plan_mgwfbp(ACCUMULATING).groups} == {"allreduce"}


def test_mgwfbp_misses_the_optimum_sometimes() -> None:
    lost = losses(random_dense, plan_mgwfbp, 50)
    assert 0.01 < lost.max() < 0.5
    assert lost.mean() < 0.06


def test_omgs_misses_the_optimum_often() -> None:
    lost = losses(random_behind, plan_omgs, 50)
    assert (lost > 1e-9).mean() > 0.3
    assert lost.mean() < 0.1


def omgs_by_hand(costs: BehindCosts) -> list[int]:
    """The rule with the tables of all tensors, recomputed from the start after every merge, as it was published."""
    sizes = [float(n) for n in costs.numels]
    times, nbytes, members = list(costs.backward), list(costs.sparse_bytes), [1] * len(sizes)
    place = 0
    while place < len(sizes) - 1:
        selected = link = begin = 0.0
        for group in range(place + 1):
            selected += times[group] + float(costs.selection(sizes[group]))
            begin = max(link, selected)
            link = begin + float(costs.seconds(nbytes[group]))
        both = float(costs.selection(sizes[place] + sizes[place + 1]))
        wait = times[place + 1] + both - float(costs.selection(sizes[place]) + costs.selection(sizes[place + 1]))
        wait -= begin - selected
        if wait < costs.exchange[0] - 1e-12:
            for table in (sizes, times, nbytes, members):
                table[place] += table.pop(place + 1)
        else:
            place += 1
    return members


def test_omgs_follows_its_rule() -> None:
    rng = np.random.default_rng(2)
    for _ in range(100):
        costs = random_behind(rng, int(rng.integers(1, 12)))
        assert counts(plan_omgs(costs)) == omgs_by_hand(costs)


def test_planners_take_no_tensors_and_one() -> None:
    none = BehindCosts((), (), (), SelectionCost(1.0, 1.0), (1.0, 1.0))
    one = BehindCosts((3,), (1.0,), (1.0,), SelectionCost(1.0, 1.0), (1.0, 1.0))
    for planner in (plan_omgs, plan_pareto):
        assert planner(none) == Plan(())
        assert counts(planner(one)) == [1]


@pytest.mark.parametrize(
    ("field", "value"), [("backward", (-1.0, 0.0)), ("exchange", (float("nan"), 0.0)), ("sparse_bytes", (1.0,))]
)
def test_behind_costs_refuse_numbers_that_make_no_sense(field: str, value: tuple[float, ...]) -> None:
    good = BehindCosts((1, 1), (1.0, 1.0), (1.0, 1.0), SelectionCost(1.0, 1.0), (1.0, 1.0))
    with pytest.raises(ValueError, match=field):
        replace(good, **{field: value})


def test_predictions_refuse_plans_of_other_tensors() -> None:
    costs = BehindCosts((1, 1), (1.0, 1.0), (1.0, 1.0), SelectionCost(1.0, 1.0), (1.0, 1.0))
    with pytest.raises(ValueError, match="3 tensors"):
        predict_behind(sparse_plan([3]), costs)


def test_cut_search_finds_the_best_cut_of_a_time_with_one_minimum() -> None:
    for best in (1, 2, 17, 62, 98, 99):
        probes: list[tuple[int, ...]] = []

        def measure(stops: list[int], best: int = best, probes: list[tuple[int, ...]] = probes) -> float:
            probes.append(tuple(stops))
            return 200.0 if len(stops) == 1 else 100.0 + abs(stops[0] - best)

        assert search_cuts(measure, 100) == [best, 100]
        assert len(probes) < 25


def test_cut_search_adds_cuts_as_long_as_they_pay() -> None:
    costs = random_behind(np.random.default_rng(3), 9)

    def measure(stops: list[int]) -> float:
        return predict_behind(sparse_plan(stops), costs)

    seconds = [measure(search_cuts(measure, 9, groups)) for groups in (1, 2, 3, 9)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] >= min(predict_behind(plan, costs) for plan in all_plans(9)) - 1e-12
    assert search_cuts(measure, 9, 9, tolerance=1.0) == [9]


def test_even_cuts() -> None:
    assert even_cuts(10, 3) == [3, 6, 10]
    assert even_cuts(3, 0) == [1, 2, 3]
    assert even_cuts(2, 5) == [1, 2]

"""Policies of published systems in a job: when they plan, and from what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lab.planner_loss import predict_behind
from lightning_safusion.fusion.plans.merging import MGWFBP, OMGS
from lightning_safusion.fusion.plans.per_tensor import Espresso, HiPress, choose_compressed
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.policy import Cupcake, FusionPolicy
from lightning_safusion.fusion.plans.pricing import GroupPricer, predict_finish
from tests.cluster import assert_conserved
from tests.fusion.jobs import Job, Rank, actions, counts, resumed, stops_of
from tests.fusion.plans.test_merging import searched
from tests.fusion.windows import Make
from tests.quick import slow

PLANNERS: list[tuple[FusionPolicy, str]] = [(MGWFBP(), "allreduce"), (MGWFBP(100), "allreduce"), (OMGS(), "allgather")]
of_planners = pytest.mark.parametrize(("policy", "collective"), PLANNERS, ids=["mgwfbp", "least", "omgs"])


@pytest.mark.parametrize(
    ("policy", "collective", "link"),
    [
        *((*each, "1gbit") for each in PLANNERS),
        (HiPress(bulk_bytes=10**5), "auto", "100gbit-roce"),
        (Espresso(), "auto", "1gbit"),
    ],
    ids=["mgwfbp", "least", "omgs", "hipress", "espresso"],
)
def test_one_plan_from_agreed_times_and_no_trial(policy: FusionPolicy, collective: str, link: str) -> None:
    # gradients come slowly and buffers cost more than any planner knows: a trial would end in the plan before
    rank = Rank(policy, Job(link, backward=3e-3, hidden=0.05), collective=collective)
    first = rank.plan
    assert first == policy.plan(rank.costs)
    made = actions(rank.run(12))
    costs, plan = rank.costs, rank.plan
    assert plan == policy.plan(costs)
    assert made == ["stay" if plan == first else "switch", "freeze"]
    assert plan != first or collective == "auto"
    assert rank.run(80) == []
    assert not any(rank.timed[12:])
    if isinstance(policy, HiPress):
        compressed = [group.collective == "allgather" for group in plan.groups for _ in range(group.start, group.stop)]
        assert compressed == choose_compressed(costs)
        assert 0 < sum(compressed) < 60
        assert max(counts(plan)) > 1
    if isinstance(policy, Espresso):
        assert [group.half for group in plan.groups] == [option == "half" for option in policy.options(costs)]
        assert any(group.half for group in plan.groups)


@of_planners
def test_another_order_is_measured_and_planned_anew(policy: FusionPolicy, collective: str) -> None:
    rank = Rank(policy, Job(backward=3e-3), collective=collective)
    rank.run(20)
    rank.planner.invalidate()  # another density: the measured times hold
    assert rank.plan == policy.plan(rank.costs)
    assert rank.run(20) == []
    rank.planner.invalidate(order_changed=True)
    assert "freeze" in actions(rank.run(12))
    assert rank.plan == policy.plan(rank.costs)


@of_planners
def test_a_resumed_job_keeps_its_plan_or_measures_anew(policy: FusionPolicy, collective: str) -> None:
    for windows, made in ((5, ["switch", "freeze"]), (11, ["switch", "freeze"]), (12, []), (30, [])):
        first = Rank(policy, Job(backward=3e-3), collective=collective)
        first.run(windows)
        again = resumed(first)
        assert again.plan == first.plan
        assert actions(again.run(12)) == made
        assert again.plan == policy.plan(again.costs)


def test_measured_costs_are_those_of_the_job() -> None:
    rank = Rank(OMGS(), Job(backward=3e-3))
    rank.run(12)
    measured, true = rank.costs, rank.true
    assert np.diff(measured.arrivals) == pytest.approx([3e-3] * 59, rel=1e-6)
    assert measured.sparse == pytest.approx(true.sparse, rel=0.05)
    assert float(measured.selection(10**6)) == pytest.approx(40e-6 + 1e-4, rel=0.1)
    plan = rank.plan
    for other in (Plan.from_stops(range(1, 61)), Plan.from_stops([60])):
        assert predict_behind(plan, measured) < predict_behind(other, measured)


# --- Cupcake --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_cupcake_takes_the_steps_of_the_pure_search(groups: int) -> None:
    rank = Rank(Cupcake(groups, windows=3), Job("1gbit", backward=1e-3))
    made = rank.run(200)
    measured, tried = iter(rank.planner.state_dict()["search"]), []

    def measure(stops: Sequence[int]) -> float:
        tried.append(list(stops))
        return next(measured)

    best = searched(measure, 60, groups)
    assert next(measured, None) is None
    assert actions(made) == ["try"] * (len(tried) - 1) + ["freeze"]
    assert [stops_of(plan) for plan in rank.plans[: 4 * len(tried) : 4]] == tried
    assert all(stops_of(plan) == best for plan in rank.plans[4 * len(tried) :])
    assert rank.timed == [True] * (4 * len(tried)) + [False] * (200 - 4 * len(tried))


def test_cupcake_finds_a_good_cut() -> None:
    rank = Rank(Cupcake(windows=3), Job("1gbit", backward=1e-3))
    rank.run(60)
    costs = rank.true
    ends = [predict_finish(GroupPricer(costs).plan([cut, 60]), costs) for cut in range(1, 60)]
    assert predict_finish(rank.plan, costs) < 1.02 * min(ends) < 0.9 * max(ends)


def test_a_search_goes_on_from_a_checkpoint() -> None:
    whole = Rank(Cupcake(3, windows=3), Job("1gbit", backward=1e-3))
    whole.run(160)
    for windows in (1, 10, 21, 159):
        first = Rank(Cupcake(3, windows=3), Job("1gbit", backward=1e-3))
        first.run(windows)
        again = resumed(first)
        assert again.plan == first.plan
        again.run(170)
        assert again.plan == whole.plan
        # the windows since the last trial are measured again, and no others are
        assert again.planner.state_dict()["search"] == pytest.approx(whole.planner.state_dict()["search"])


def test_a_search_begins_anew_where_density_or_order_change() -> None:
    rank = Rank(Cupcake(windows=3), Job("1gbit", backward=1e-3))
    rank.run(20)
    for order_changed in (False, True):
        assert len(rank.planner.state_dict()["search"]) >= 4
        rank.space.set_density(0.03 if order_changed else 0.01)
        rank.planner.invalidate(order_changed)
        assert rank.planner.state_dict()["search"] is None
        assert stops_of(rank.plan) == [60]
        assert rank.run(20)[-1].action == "try"


def test_a_plan_without_measured_windows_is_tried_again() -> None:
    rank = Rank(Cupcake(windows=2), Job())
    plan = rank.plan
    seen = rank.job.window(0, plan, rank.true, rank.space)
    unseen = replace(seen, ready=np.full(60, np.nan))  # no gradient in these windows
    for windows, measured in ((unseen, 0), (seen, 1)):
        for _ in range(3):
            assert rank.plan == plan
            rank.planner.observe(windows, rank.space.shape)
        assert len(rank.planner.state_dict()["search"]) == measured
    assert len(stops_of(rank.plan)) == 2


# --- on virtual workers ---------------------------------------------------------------------------------------------

ROWS: dict[str, dict[str, Any]] = {
    "mgwfbp": {"compressor": "none", "collective": "allreduce", "own_buffers": True},
    "omgs": {"scope": "group", "collective": "allgather"},
    "cupcake": {"scope": "group", "collective": "allgather"},
    "hipress": {"own_buffers": True},
    "espresso": {"own_buffers": True},
}


@pytest.mark.parametrize(
    ("policy", "world_size", "steps"),
    [
        (MGWFBP(windows=4), 2, 30),
        (OMGS(windows=4), 1, 30),
        (Cupcake(windows=1), 3, 30),
        (HiPress(windows=3), 2, 8),
        (Espresso(windows=3), 3, 8),
        *slow([(MGWFBP(windows=4), 5, 30), (OMGS(windows=4), 3, 30), (Cupcake(windows=1), 1, 30)]),
        *slow([(HiPress(windows=3), 5, 8), (Espresso(windows=3), 1, 8)]),
    ],
    ids=repr,
)
def test_nothing_is_lost_and_all_ranks_have_the_same_plan(
    make: Make, policy: FusionPolicy, world_size: int, steps: int
) -> None:
    cluster = make(world_size, measure=True, fusion=policy, **ROWS[policy.name])
    assert_conserved(cluster, steps)
    states = {json.dumps(engine.planner.state_dict()) for engine in cluster.engines}
    assert len(states) == 1
    assert cluster.engines[0].planner.decisions[-1].action == "freeze"

"""The exact programme on jobs whose best plan is known (on any job: test_plan_properties)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion.plans.adaptive import optimal_cuts, plan_greedy, plan_optimal
from lightning_safusion.fusion.plans.costs import GroupCosts, predict_plain_ddp
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.fusion.plans.pricing import predict_finish
from tests.fusion.jobs import stops_of
from tests.fusion.plans.test_plan_properties import all_stops, finish_by_hand


def make_costs(
    ready: list[float],
    numels: list[int],
    sparse: tuple[float, float] = (1.0, 1.0),
    dense: tuple[float, float] = (1.0, 1.0),
    per_buffer: float = 0.0,
    **allowed: bool,
) -> GroupCosts:
    return GroupCosts(
        numels=tuple(numels),
        ready=tuple(ready),
        sparse_bytes=tuple(numels),
        dense_bytes=tuple(4 * n for n in numels),
        world_size=4,
        sparse=sparse,
        dense=dense,
        per_buffer=per_buffer,
        **allowed,
    )


def test_optimal_equals_brute_force_on_twelve_tensors_of_real_numbers() -> None:
    rng = np.random.default_rng(7)
    for _ in range(12):
        costs = make_costs(
            ready=np.cumsum(rng.exponential(1e-3, 12)).tolist(),
            numels=rng.lognormal(8, 2, 12).astype(int).tolist(),
            sparse=(rng.uniform(1e-4, 2e-3), 1e-8),
            dense=(rng.uniform(1e-4, 2e-3), 2e-9),
            per_buffer=rng.uniform(0.0, 1e-3),
        )
        best = min(finish_by_hand(stops, costs) for stops in all_stops(12))
        assert predict_finish(plan_optimal(costs, max_last_share=1.0), costs) == pytest.approx(best, rel=1e-12)


def test_each_buffer_takes_its_cheapest_collective() -> None:
    # Small buffers are latency-bound (all-gather starts cheaper), large ones bandwidth-bound (all-reduce moves less).
    costs = make_costs([0.0, 100.0], [1, 50], sparse=(1.0, 1.0), dense=(5.0, 0.125))
    assert [g.collective for g in plan_optimal(costs).groups] == ["allgather", "allreduce"]


def test_equal_prices_take_the_sparse_collective() -> None:
    costs = make_costs([0.0], [3], sparse=(2.0, 0.0), dense=(2.0, 0.0))
    assert [g.collective for g in plan_optimal(costs).groups] == ["allgather"]


@pytest.mark.parametrize(
    ("allowed", "expected"), [({"sparse_allowed": False}, "allreduce"), ({"dense_allowed": False}, "allgather")]
)
def test_a_collective_that_is_not_allowed_is_never_chosen(allowed: dict[str, bool], expected: str) -> None:
    for sparse, dense in [((0.0, 0.0), (9.0, 9.0)), ((9.0, 9.0), (0.0, 0.0))]:
        costs = make_costs([0.0, 1.0, 2.0], [4, 4, 4], sparse, dense, **allowed)
        assert {g.collective for g in plan_optimal(costs).groups} == {expected}
        assert {g.collective for g in plan_greedy(costs).groups} == {expected}


def test_empty_tensors_at_the_end_do_not_shut_out_the_last_real_one() -> None:
    assert stops_of(plan_optimal(make_costs([0.0, 0.0, 0.0], [100, 0, 0]), max_last_share=0.1)) == [3]
    assert stops_of(plan_optimal(make_costs([0.0, 1.0], [0, 0]))) == [2]


def test_optimal_cuts_takes_any_cost_function() -> None:
    def cost(starts: np.ndarray, stop: int) -> np.ndarray:
        return np.where(stop - starts == 2, 1.0, 10.0)  # pairs are cheap

    assert optimal_cuts([0.0] * 6, cost) == [2, 4, 6]
    assert optimal_cuts([0.0] * 6, cost, first_last=5) == [5, 6]
    assert optimal_cuts([], cost) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ready": (0.0, 1.0, 2.0)}, "one number per tensor"),
        ({"ready": (1.0, 0.0)}, "finite and rising"),
        ({"ready": (0.0, float("nan"))}, "finite and rising"),
        ({"sparse": (-1.0, 0.0)}, "not negative"),
        ({"dense": (float("inf"), 0.0)}, "not negative"),
        ({"per_buffer": -1e-4}, "not negative"),
        ({"sparse_allowed": False, "dense_allowed": False}, "no collective is allowed"),
    ],
)
def test_unusable_costs_are_refused(change: dict[str, object], message: str) -> None:
    costs = replace(make_costs([0.0, 1.0], [1, 2]), **change)
    with pytest.raises(ValueError, match=message):
        plan_optimal(costs)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan.from_stops([3]), "covers 3 tensors but the costs describe 2"),
        (Plan((Group(0, 2, "stream"),)), "'stream' cannot be predicted"),
    ],
)
def test_finishes_that_cannot_be_predicted(plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict_finish(plan, make_costs([0.0, 1.0], [1, 2]))


@pytest.mark.parametrize(
    ("arrivals", "sizes", "end"),
    [
        # buckets of 1, 26 and 4 MiB: 1 to 2.5; from 4, for 26.5; from 30.5, for 4.5
        ((1.0, 2.0, 4.0, 5.0), (1, 20, 6, 4), 35.0),
        ((1.0, 100.0), (1, 2), 102.5),  # the last gradient comes after everything else has gone
        ((), (), 0.0),
    ],
)
def test_plain_ddp_waits_for_gradients_and_for_the_all_reduce_before(
    arrivals: tuple[float, ...], sizes: tuple[int, ...], end: float
) -> None:
    # ready times are with selection, which does not matter here
    ready = [9.0 + arrival for arrival in arrivals]
    costs = replace(make_costs(ready, [size * 2**18 for size in sizes]), arrivals=arrivals)
    assert predict_plain_ddp(costs, LinearCost(0.5, 2.0**-20)) == pytest.approx(end)

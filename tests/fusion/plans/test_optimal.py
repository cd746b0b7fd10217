"""The exact programme on jobs whose best plan is known (on any job: test_plan_properties)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_safusion.fusion.plans.adaptive import optimal_cuts, plan_greedy, plan_optimal
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.fusion.plans.pricing import GroupPricer, predict_finish
from tests.fusion.plans.test_plan_properties import all_stops, finish_by_hand


def make_costs(
    ready: list[float],
    numels: list[int],
    sparse: tuple[float, float] = (1.0, 1.0),
    dense: tuple[float, float] = (1.0, 1.0),
    sparse_bytes: list[float] | None = None,
    per_buffer: float = 0.0,
    **allowed: bool,
) -> GroupCosts:
    return GroupCosts(
        numels=tuple(numels),
        ready=tuple(ready),
        sparse_bytes=tuple(numels if sparse_bytes is None else sparse_bytes),
        dense_bytes=tuple(4 * n for n in numels),
        world_size=4,
        sparse=sparse,
        dense=dense,
        per_buffer=per_buffer,
        **allowed,
    )


def stops_of(plan: Plan) -> list[int]:
    return [group.stop for group in plan.groups]


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


def test_counter_example_of_the_greedy_merge_rule() -> None:
    # Merging whenever the next gradient arrives within one start-up time chains all three: 1.8 + 1 + 15 = 17.8.
    costs = make_costs([0.0, 0.9, 1.8], [5, 5, 5], sparse=(1.0, 1.0), dense_allowed=False)
    assert predict_finish(Plan.from_stops([3]), costs) == pytest.approx(17.8)
    plan = plan_optimal(costs, max_last_share=1.0)
    assert stops_of(plan) == [1, 3]
    assert predict_finish(plan, costs) == 17.0


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


def test_equal_ready_times_make_one_buffer() -> None:
    costs = make_costs([2.0] * 6, [1, 2, 3, 4, 5, 6])
    assert stops_of(plan_optimal(costs, max_last_share=1.0)) == [6]


def test_zero_costs_make_one_buffer() -> None:
    costs = make_costs([0.0, 1.0, 2.0], [1, 2, 3], sparse=(0.0, 0.0), dense=(0.0, 0.0))
    plan = plan_optimal(costs, max_last_share=1.0)
    assert stops_of(plan) == [3]
    assert predict_finish(plan, costs) == 2.0


def test_free_latency_hides_everything_but_the_last_tensor() -> None:
    costs = make_costs([1.0, 2.0, 3.0, 4.0], [1, 1, 1, 1], sparse=(0.0, 1.0), dense_allowed=False)
    assert predict_finish(plan_optimal(costs), costs) == 5.0


def test_single_tensor() -> None:
    costs = make_costs([3.0], [7], sparse=(1.0, 2.0), dense_allowed=False)
    for plan in (plan_optimal(costs, max_last_share=0.01), plan_greedy(costs)):
        assert plan == Plan((Group(0, 1),))
        assert predict_finish(plan, costs) == 3.0 + 1.0 + 14.0


def test_no_tensor() -> None:
    costs = make_costs([], [])
    assert plan_optimal(costs) == plan_greedy(costs) == Plan(())
    assert predict_finish(Plan(()), costs) == 0.0


def test_empty_tensors_at_the_end_do_not_shut_out_the_last_real_one() -> None:
    costs = make_costs([0.0, 0.0, 0.0], [100, 0, 0])
    assert stops_of(plan_optimal(costs, max_last_share=0.1)) == [3]


def test_all_tensors_empty() -> None:
    costs = make_costs([0.0, 1.0], [0, 0])
    assert stops_of(plan_optimal(costs)) == [2]


def skewed_costs(shape: str) -> GroupCosts:
    """Sizes in ready order, classifier first. VGG: the first hold nearly all. ResNet: they fall towards the input."""
    if shape == "vgg":
        numels = [1000, 4_096_000, 4096, 16_777_216, 4096, 102_760_448]
        for width, before in [(512, 512)] * 7 + [(512, 256), (256, 256), (256, 128), (128, 64), (64, 3)]:
            numels += [width, width * before * 9]
    else:
        numels = [1000, 2_048_000]
        for width, blocks in [(512, 3), (256, 6), (128, 4), (64, 3)]:
            numels += [4 * width, 4 * width * width, width, 9 * width * width, width, 4 * width * width] * blocks
    ready = np.cumsum(np.asarray(numels) * 2e-10 + 5e-5)
    return make_costs(
        ready=ready.tolist(),
        numels=numels,
        sparse=(4e-4, 7 * 8e-10),
        dense=(8e-4, 2 * 7 / 8 * 8e-10),
        sparse_bytes=[max(1.0, 0.01 * n) * 8 for n in numels],
    )


@pytest.mark.parametrize("shape", ["vgg", "resnet"])
def test_skewed_sizes(shape: str) -> None:
    costs = skewed_costs(shape)
    best = predict_finish(plan_optimal(costs, max_last_share=1.0), costs)
    length = len(costs.ready)
    for count in (1, 2, 4, 8, 16, length):
        stops = [*range(count, length, count), length]
        assert best <= predict_finish(GroupPricer(costs).plan(stops), costs) * (1 + 1e-12)
    assert best <= predict_finish(plan_greedy(costs), costs) * (1 + 1e-12)
    assert best >= costs.ready[-1] + min(costs.sparse[0], costs.dense[0])


def test_planning_is_pure() -> None:
    costs = skewed_costs("resnet")
    copy = skewed_costs("resnet")
    assert plan_optimal(costs).digest == plan_optimal(copy).digest == plan_optimal(costs).digest
    assert plan_greedy(costs).digest == plan_greedy(copy).digest
    assert costs == copy


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


def test_finish_of_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="covers 3 tensors but the costs describe 2"):
        predict_finish(Plan.from_stops([3]), make_costs([0.0, 1.0], [1, 2]))


def test_finish_of_a_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="'stream' cannot be predicted"):
        predict_finish(Plan((Group(0, 2, "stream"),)), make_costs([0.0, 1.0], [1, 2]))

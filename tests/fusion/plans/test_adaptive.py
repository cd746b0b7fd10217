"""When to plan again, and when a new plan is worth a change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_safusion.fusion.plans.adaptive import Adaptive, Tuned, plan_greedy, plan_optimal
from lightning_safusion.fusion.plans.cadence import Cadence, ReplanSchedule
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.fusion.plans.policy import WFBP, Aligned, FusionPolicy, Naive, Single
from lightning_safusion.fusion.plans.pricing import Bounds, GroupPricer, predict_finish
from lightning_safusion.fusion.replan import predicted_gain
from tests.fusion.jobs import counts
from tests.fusion.plans.test_plan_properties import all_stops


def model(fixed: float = 3e-4, per_byte: float = 6e-8) -> GroupCosts:
    rng = np.random.default_rng(2)
    numels = rng.lognormal(9, 2, 60).astype(int).tolist()
    return GroupCosts(
        numels=tuple(numels),
        ready=tuple(np.cumsum(rng.exponential(4e-4, 60)).tolist()),
        sparse_bytes=tuple(float(max(8, n // 12)) for n in numels),
        dense_bytes=tuple(4.0 * n for n in numels),
        world_size=4,
        sparse=(fixed, per_byte),
        dense=(2 * fixed, per_byte / 2),
    )


def noisy(costs: GroupCosts, rng: np.random.Generator, noise: float) -> GroupCosts:
    def shaken(number: float) -> float:
        return float(number * (1 + rng.uniform(-noise, noise)))

    gaps = np.diff(costs.ready, prepend=0.0) * (1 + rng.uniform(-noise, noise, len(costs.ready)))
    return replace(
        costs,
        ready=tuple(np.cumsum(gaps).tolist()),
        sparse=(shaken(costs.sparse[0]), shaken(costs.sparse[1])),
        dense=(shaken(costs.dense[0]), shaken(costs.dense[1])),
    )


@pytest.mark.parametrize(
    ("cadence", "due"),
    [
        (Cadence(warmup_windows=20, warmup_every=5, every=50), [5, 10, 15, 20, 70, 120, 170]),
        (Cadence(warmup_windows=10, warmup_every=5, every=20, freeze_after=60), [5, 10, 30, 50]),
        (Cadence(warmup_windows=20, warmup_every=5, freeze_after=12), [5, 10]),
        (Cadence(freeze_after=0), []),
        (Cadence.once(5), [5]),
    ],
)
def test_plans_are_reviewed_often_in_the_warm_up_and_rarely_afterwards(cadence: Cadence, due: list[int]) -> None:
    schedule = ReplanSchedule(cadence)
    for window in range(1, 181):
        assert schedule.due_within(3) == bool({window, window + 1, window + 2} & {*due})
        assert schedule.advance() == (window in due)
        assert schedule.threshold == (0.01 if window <= cadence.warmup_windows else 0.03)


@pytest.mark.parametrize(
    "options",
    [
        {"warmup_every": 0},
        {"every": 0},
        {"warmup_windows": -1},
        {"freeze_after": -2},
        {"threshold": 1.0},
        {"warmup_threshold": -0.1},
    ],
)
def test_bad_schedules_are_refused(options: dict[str, float]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name} .*got {value}"):
        Cadence(**options)  # type: ignore[arg-type]  # what is refused


def test_options_of_a_cadence_are_taken_one_by_one_for_one_more_release() -> None:
    with pytest.warns(DeprecationWarning, match=r"write Adaptive\(cadence=Cadence\(every=3, freeze_after=None\)\)"):
        policy = Adaptive(every=3, freeze_after=None)
    assert policy.cadence == Cadence(every=3)
    with pytest.raises(TypeError, match="every as well"):
        Adaptive(cadence=Cadence(), every=3)
    with pytest.raises(TypeError, match="evry"):
        Adaptive(evry=3)  # type: ignore[call-arg]  # the mistake


def test_policy_plans_by_its_rule() -> None:
    costs = model()
    assert Adaptive().plan(costs) == plan_optimal(costs)
    assert Adaptive(max_last_share=0.1).plan(costs) == plan_optimal(costs, max_last_share=0.1)
    assert Adaptive(rule="paper").plan(costs) == plan_greedy(costs)


def test_each_run_has_a_schedule_of_its_own() -> None:
    policy = Adaptive(cadence=Cadence(every=3))
    first, second = policy.schedule(), policy.schedule()
    assert first.cadence is second.cadence is policy.cadence
    first.advance()
    assert second.windows == 0


def test_predicted_gain_is_the_share_of_the_finish_that_is_saved() -> None:
    costs = model()
    current, proposed = Plan.from_stops(range(1, 61)), plan_optimal(costs)
    gain = predicted_gain(current, proposed, costs)
    assert 0 < gain == 1 - predict_finish(proposed, costs) / predict_finish(current, costs)
    assert predicted_gain(proposed, current, costs) < 0
    assert predicted_gain(proposed, proposed, costs) == 0


def test_a_plan_that_no_longer_fits_is_left_at_any_price() -> None:
    costs = model()
    proposed = plan_optimal(costs)
    assert predicted_gain(Plan.from_stops([30]), proposed, costs) == np.inf
    sparse_only = replace(costs, dense_allowed=False)
    dense = Plan((Group(0, 60, "allreduce"),))
    assert predicted_gain(dense, plan_optimal(sparse_only), sparse_only) == np.inf
    stream = Plan((Group(0, 60, "stream"),))
    assert predicted_gain(stream, proposed, costs) == np.inf
    assert predicted_gain(stream, stream, costs) == 0


@pytest.mark.parametrize("rule", ["optimal", "paper"])
def test_noise_below_half_the_threshold_never_changes_the_plan(rule: str) -> None:
    """Shaken by e, the times of any plan move by at most e: no plan seems better than the optimum by more than 2 e."""
    costs = model()
    rng = np.random.default_rng(4)
    policy = Adaptive(rule=rule, max_last_share=1.0)  # type: ignore[arg-type]  # a value of the Literal
    current = plan_optimal(costs, max_last_share=1.0)
    proposals = set()
    for _ in range(100):
        shaken = noisy(costs, rng, 0.014)
        proposed = policy.plan(shaken)
        proposals.add(proposed.digest)
        assert predicted_gain(current, proposed, shaken) <= 0.03
    assert len(proposals) > 5  # the noise did move the planner


def sizes(plan: Plan, costs: GroupCosts) -> list[int]:
    return [sum(costs.numels[group.start : group.stop]) for group in plan.groups]


@pytest.mark.parametrize("policy", [Adaptive(), Adaptive(rule="paper"), Aligned(4)], ids=repr)
def test_bounds_hold_for_every_rule(policy: FusionPolicy) -> None:
    costs = model()
    low, high = Bounds(min_elements=1_000_000), Bounds(max_elements=100_000)
    assert any(held < 1_000_000 for held in sizes(policy.resized(costs), costs)[:-1])
    assert any(held > 100_000 for held in sizes(policy.resized(costs), costs))
    assert all(held >= 1_000_000 for held in sizes(Tuned(policy, bounds=low).resized(costs), costs)[:-1])
    plan = Tuned(policy, bounds=high).resized(costs)
    for group, held in zip(plan.groups, sizes(plan, costs), strict=True):
        assert held <= 100_000 or group.stop - group.start == 1  # a larger tensor alone


def test_the_exact_programme_is_the_best_within_bounds() -> None:
    numels = (30, 40, 50, 20, 60, 10, 40)
    costs = replace(
        model(fixed=2e-3, per_byte=1e-4),
        numels=numels,
        ready=tuple(np.cumsum([4e-3] * 7).tolist()),
        sparse_bytes=tuple(float(n) for n in numels),
        dense_bytes=tuple(4.0 * n for n in numels),
    )
    bounds = Bounds(60, 110)

    def keeps(plan: Plan) -> bool:
        held = sizes(plan, costs)
        return all(60 <= size <= 110 for size in held[:-1]) and held[-1] <= 110

    plans = map(GroupPricer(costs).plan, all_stops(7))
    best = min(predict_finish(plan, costs) for plan in plans if keeps(plan))
    plan = plan_optimal(costs, max_last_share=1.0, bounds=bounds)
    assert keeps(plan)
    assert predict_finish(plan, costs) == pytest.approx(best)
    assert not keeps(plan_optimal(costs, max_last_share=1.0))


@pytest.mark.parametrize(
    ("bounds", "text"), [(Bounds(-1), "min_elements.*-1"), (Bounds(5, 4), "min_elements=5.*got 4"), (Bounds(0, 0), "0")]
)
def test_bounds_that_cannot_hold_are_refused(bounds: Bounds, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Tuned(Aligned(), bounds=bounds)


def test_aligned_finds_the_best_number_of_tensors() -> None:
    costs = model()
    best = min(predict_finish(Aligned(size).plan(costs), costs) for size in range(1, 61))
    plan = Aligned(1).resized(costs)
    assert len({*counts(plan)[:-1]}) == 1  # a fixed number
    assert predict_finish(plan, costs) == pytest.approx(best, rel=0.01)
    assert Aligned(60).resized(costs) == plan  # whatever it was made with


@pytest.mark.parametrize("policy", [Single(), WFBP(), Naive()], ids=repr)
def test_what_has_no_sizes_cannot_be_tuned(policy: FusionPolicy) -> None:
    with pytest.raises(ValueError, match=f"{type(policy).__name__}.*no sizes"):
        Tuned(policy)

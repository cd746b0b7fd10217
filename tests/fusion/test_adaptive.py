"""When to plan again, and when a new plan is worth a change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_safusion.fusion.adaptive import Adaptive, should_switch
from lightning_safusion.fusion.dp import plan_greedy, plan_optimal, predict_finish
from lightning_safusion.fusion.plan import Group, GroupCosts, Plan
from lightning_safusion.fusion.registry import resolve_fusion
from lightning_safusion.fusion.replan import ReplanSchedule


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


def test_schedule_is_dense_in_the_warm_up_and_sparse_afterwards() -> None:
    schedule = ReplanSchedule(warmup_windows=20, warmup_every=5, every=50)
    due = [window for window in range(1, 181) if schedule.advance()]
    assert due == [5, 10, 15, 20, 70, 120, 170]


def test_threshold_rises_after_the_warm_up() -> None:
    schedule = ReplanSchedule(warmup_windows=10)
    thresholds = {}
    for window in range(1, 13):
        schedule.advance()
        thresholds[window] = schedule.threshold
    assert thresholds[10] == 0.01
    assert thresholds[11] == 0.03


def test_frozen_schedule() -> None:
    schedule = ReplanSchedule(warmup_windows=20, warmup_every=5, freeze_after=12)
    assert [window for window in range(1, 200) if schedule.advance()] == [5, 10]
    assert not any(ReplanSchedule(freeze_after=0).advance() for _ in range(100))


def test_schedule_resumes_where_it_was_interrupted() -> None:
    whole, first = ReplanSchedule(), ReplanSchedule()
    expected = [whole.advance() for _ in range(200)]
    done = [first.advance() for _ in range(73)]
    second = ReplanSchedule()
    second.load_state_dict(first.state_dict())
    assert done + [second.advance() for _ in range(127)] == expected


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
    for kind in (ReplanSchedule, Adaptive):
        with pytest.raises(ValueError, match=f"{name} .*got {value}"):
            kind(**options)


def test_bad_policy_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'greedy'.*'optimal', 'paper'"):
        Adaptive(rule="greedy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 0"):
        Adaptive(max_last_share=0)


def test_policy_plans_by_its_rule() -> None:
    costs = model()
    assert Adaptive().plan(costs) == plan_optimal(costs)
    assert Adaptive(max_last_share=0.1).plan(costs) == plan_optimal(costs, max_last_share=0.1)
    assert Adaptive(rule="paper").plan(costs) == plan_greedy(costs)


def test_policy_hands_its_cadence_to_each_schedule() -> None:
    policy = Adaptive(warmup_windows=4, warmup_every=2, every=3, threshold=0.2)
    schedule = policy.schedule()
    assert [window for window in range(1, 12) if schedule.advance()] == [2, 4, 7, 10]
    assert schedule.threshold == 0.2
    assert policy.schedule().windows == 0  # each run counts for itself
    assert resolve_fusion("adaptive").schedule() is not None


def test_switches_for_a_gain_above_the_threshold_only() -> None:
    costs = model()
    current, proposed = Plan.from_counts([1] * 60), plan_optimal(costs)
    gain = 1 - predict_finish(proposed, costs) / predict_finish(current, costs)
    assert gain > 0
    assert should_switch(current, proposed, costs, gain * 0.99)
    assert not should_switch(current, proposed, costs, gain * 1.01)
    assert not should_switch(proposed, current, costs, 0.0)  # never for the worse
    assert not should_switch(proposed, proposed, costs, 0.0)


def test_switches_when_the_current_plan_no_longer_fits() -> None:
    costs = model()
    proposed = plan_optimal(costs)
    assert should_switch(Plan.from_counts([30]), proposed, costs, 0.9)
    sparse_only = replace(costs, dense_allowed=False)
    dense = Plan((Group(0, 60, "allreduce"),))
    assert should_switch(dense, plan_optimal(sparse_only), sparse_only, 0.9)
    stream = Plan((Group(0, 60, "stream"),))
    assert should_switch(stream, proposed, costs, 0.9)
    assert not should_switch(stream, stream, costs, 0.0)


@pytest.mark.parametrize("rule", ["optimal", "paper"])
def test_noise_below_half_the_threshold_never_changes_the_plan(rule: str) -> None:
    """Shaken by e, the times of any plan move by at most e: no plan seems better than the optimum by more than 2 e."""
    costs = model()
    rng = np.random.default_rng(4)
    policy = Adaptive(rule=rule, max_last_share=1.0)  # type: ignore[arg-type]
    current = plan_optimal(costs, max_last_share=1.0)
    proposals = set()
    for _ in range(100):
        shaken = noisy(costs, rng, 0.014)
        proposed = policy.plan(shaken)
        proposals.add(proposed.digest)
        assert not should_switch(current, proposed, shaken, 0.03)
    assert len(proposals) > 5  # the noise did move the planner


def test_follows_a_link_that_becomes_slow() -> None:
    fast, slow = model(), model(fixed=3e-3, per_byte=1e-6)
    current = plan_optimal(fast)
    proposed = plan_optimal(slow)
    assert should_switch(current, proposed, slow, 0.03)
    assert not should_switch(proposed, plan_optimal(slow), slow, 0.03)  # and then stays

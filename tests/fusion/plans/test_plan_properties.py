"""Plans for jobs that Hypothesis makes: partitions, pure, and as good as brute force says they can be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.planner_loss import best_behind, best_dense, plan_pareto, predict_behind, random_behind, random_dense
from lightning_safusion.fusion.plans.adaptive import plan_greedy, plan_optimal
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.merging import MGWFBP, OMGS
from lightning_safusion.fusion.plans.policy import FusionPolicy
from lightning_safusion.fusion.plans.pricing import predict_finish
from tests.fusion.jobs import stops_of
from tests.fusion.plans.test_policies import POLICIES, costs_of


def whole(below: int) -> st.SearchStrategy[float]:
    """Whole numbers: many ties, and sums without rounding."""
    return st.integers(0, below - 1).map(float)


@st.composite
def costs_of_a_link(draw: st.DrawFn, longest: int = 9) -> GroupCosts:
    """Costs of small whole numbers; one collective or both."""
    length = draw(st.integers(1, longest))

    def each(values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=length, max_size=length))

    numels = [int(n) for n in each(whole(12))]
    sparse_allowed, dense_allowed = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    return GroupCosts(
        numels=tuple(numels),
        ready=tuple(accumulate(each(whole(draw(st.sampled_from([1, 4, 20])))))),
        sparse_bytes=tuple(each(whole(8))),
        dense_bytes=tuple(4.0 * n for n in numels),
        world_size=4,
        sparse=(draw(whole(8)), draw(whole(4))),
        dense=(draw(whole(8)), draw(whole(3)) / 4),
        per_buffer=draw(whole(4)),
        sparse_allowed=sparse_allowed,
        dense_allowed=dense_allowed,
    )


@st.composite
def models(draw: st.DrawFn) -> GroupCosts:
    """A model's tensors, from none to some dozens and from empty ones to very long ones, on a nominal link."""
    numels = draw(st.lists(st.one_of(st.integers(0, 10), st.integers(0, 10**9)), max_size=60))
    return costs_of(numels, world_size=draw(st.sampled_from([2, 4, 32])))


def all_stops(length: int) -> Iterator[list[int]]:
    for cuts in range(length):
        for inner in combinations(range(1, length), cuts):
            yield [*inner, length]


def finish_by_hand(stops: list[int], costs: GroupCosts) -> float:
    """The timeline written out, with the cheapest collective of each buffer."""
    free = 0.0
    for place, (start, stop) in enumerate(pairwise([0, *stops])):
        options = []
        if costs.sparse_allowed:
            options.append(costs.sparse[0] + costs.sparse[1] * sum(costs.sparse_bytes[start:stop]))
        if costs.dense_allowed:
            options.append(costs.dense[0] + costs.dense[1] * sum(costs.dense_bytes[start:stop]))
        free = max(free, costs.ready[stop - 1] + (place + 1) * costs.per_buffer) + min(options)
    return free


def last_share_fits(stops: list[int], costs: GroupCosts, share: float) -> bool:
    start = stops[-2] if len(stops) > 1 else 0
    floor = next((n for n in reversed(costs.numels) if n), 0)
    return sum(costs.numels[start:]) <= max(share * sum(costs.numels), floor)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@given(costs=models())
def test_a_plan_covers_every_tensor_once_in_order_and_is_pure(policy: FusionPolicy, costs: GroupCosts) -> None:
    plan = policy.plan(costs)
    covered = [place for group in plan.groups for place in range(group.start, group.stop)]
    assert covered == list(range(len(costs.numels)))
    again = policy.plan(replace(costs))
    assert (again, again.digest) == (plan, plan.digest)
    best = predict_finish(plan_optimal(costs, max_last_share=1.0), costs)
    assert best <= predict_finish(plan, costs) * (1 + 1e-12)


@settings(max_examples=40)
@given(costs=costs_of_a_link())
def test_the_exact_programme_equals_brute_force(costs: GroupCosts) -> None:
    finishes = [(finish_by_hand(stops, costs), stops) for stops in all_stops(len(costs.ready))]
    best = min(finish for finish, _ in finishes)
    plan = plan_optimal(costs, max_last_share=1.0)
    assert predict_finish(plan, costs) == finish_by_hand(stops_of(plan), costs) == best
    if not costs.dense_allowed:  # of equals the fewest buffers, then the earliest cuts
        optimal = [stops for finish, stops in finishes if finish == best]
        assert stops_of(plan) == min(optimal, key=lambda stops: (len(stops), stops[::-1]))


@settings(max_examples=40)
@given(costs=costs_of_a_link(), share=st.sampled_from([0.01, 0.3, 0.7]))
def test_a_bounded_last_buffer_equals_brute_force(costs: GroupCosts, share: float) -> None:
    allowed = [stops for stops in all_stops(len(costs.ready)) if last_share_fits(stops, costs, share)]
    plan = plan_optimal(costs, max_last_share=share)
    assert last_share_fits(stops_of(plan), costs, share)
    assert predict_finish(plan, costs) == min(finish_by_hand(stops, costs) for stops in allowed)


@settings(max_examples=40)
@given(costs=costs_of_a_link(longest=30))
def test_the_papers_rule_keeps_its_promise(costs: GroupCosts) -> None:
    """Every buffer but the last is exchanged for at least as long as the next one takes to get ready, and could not
    have waited for a tensor more; the first is the smallest with which this works."""
    costs = replace(costs, sparse_allowed=True, dense_allowed=False, per_buffer=0.0)
    plan = plan_greedy(costs)
    length = len(costs.ready)
    for before, group in pairwise(plan.groups):
        covered = covered_until(costs, before.start, before.stop)
        assert covered >= costs.ready[group.stop - 1]
        assert group.stop == length or covered <= costs.ready[group.stop]
    assert all(not covers(costs, smaller) for smaller in range(1, plan.groups[0].stop))


def covered_until(costs: GroupCosts, start: int, stop: int) -> float:
    """When the exchange of a buffer that leaves at once has ended."""
    return costs.ready[stop - 1] + costs.sparse[0] + costs.sparse[1] * sum(costs.sparse_bytes[start:stop])


def covers(costs: GroupCosts, first: int) -> bool:
    """Whether buffers that each hide the wait for the next one reach the end, if the first has so many tensors."""
    start, stop = 0, first
    while stop < len(costs.ready):
        until = sum(ready <= covered_until(costs, start, stop) for ready in costs.ready)
        if until <= stop:
            return False
        start, stop = stop, until
    return True


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), length=st.integers(1, 9))
def test_no_published_rule_beats_the_best_plan(seed: int, length: int) -> None:
    behind = random_behind(np.random.default_rng(seed), length)
    best = best_behind(behind)
    assert predict_behind(plan_pareto(behind), behind) == pytest.approx(best, rel=1e-12)
    assert predict_behind(OMGS().plan(behind), behind) >= best * (1 - 1e-12)
    dense = random_dense(np.random.default_rng(seed), length)
    assert predict_finish(MGWFBP().plan(dense), dense) >= best_dense(dense) * (1 - 1e-12)

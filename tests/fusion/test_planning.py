"""The planner's decisions on a simulated job: its windows follow from the plan, the link and the computation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from lab.virtual.transport import local_transports
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.fusion.plans.adaptive import Adaptive, Tuned
from lightning_safusion.fusion.plans.cadence import Cadence
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.policy import WFBP, Aligned, Cupcake, FusionPolicy, Single
from lightning_safusion.fusion.replan import Decision
from tests.comm.exchanges import in_threads
from tests.fusion.jobs import SHAPES, Job, Rank, actions, resumed, stops_of
from tests.quick import slow


class StartsWith(Adaptive):
    """Adaptive, from a start that is not its own."""

    def __init__(self, start: FusionPolicy) -> None:
        super().__init__()
        self._start = start

    def plan(self, costs: GroupCosts) -> Plan:
        return self._start.plan(costs)


BAD_STARTS = [
    StartsWith(Single()),
    StartsWith(WFBP()),
    Tuned(Aligned(1000)),
    Tuned(Aligned(1)),
    Tuned(StartsWith(Single())),
]


LINKS_OF_STARTS = ("100mbit", "1gbit", "10gbit")


@pytest.mark.parametrize(
    ("policy", "link"),
    [
        pytest.param(policy, link, marks=() if i % 3 == j else pytest.mark.slow)
        for i, policy in enumerate(BAD_STARTS)
        for j, link in enumerate(LINKS_OF_STARTS)
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_a_bad_start_is_left_within_fifty_windows(policy: FusionPolicy, link: str) -> None:
    rank = Rank(policy, Job(link, noise=0.05))
    start = rank.finish
    decisions = rank.run(50)
    assert rank.finish < 1.03
    assert start > 1.02 or "switch" not in actions(decisions)


def test_a_switch_is_followed_by_what_it_has_saved() -> None:
    rank = Rank(Tuned(Aligned(1000)), Job(backward=1e-3))
    switch, verdict = (d for d in rank.run(12) if d.action != "stay")
    assert (switch.action, switch.rival, verdict.action) == ("switch", 1, "keep")
    assert verdict.buffers == switch.buffers > 1
    assert verdict.window == switch.window + 7  # one to settle, six to measure
    assert switch.predicted == verdict.predicted
    assert verdict.measured == pytest.approx(1 - verdict.seconds / switch.seconds)
    assert verdict.measured == pytest.approx(switch.predicted, rel=0.15)


@pytest.mark.parametrize("seed", [0, *slow((1, 2))])
def test_noise_does_not_make_it_flap(seed: int) -> None:
    rank = Rank(StartsWith(WFBP()), Job(noise=0.05, seed=seed))
    rank.run(60)
    assert set(actions(rank.run(400))) == {"stay"}
    assert len(set(rank.plans[60:])) == 1


@pytest.mark.parametrize(
    ("policy", "phase"),
    [
        (Adaptive(), 0),
        (Tuned(Adaptive(rule="paper")), 37),
        *slow((Tuned(Adaptive(rule="paper")) if phase % 2 else Adaptive(), phase) for phase in (13, 47, 49, 48)),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_link_that_becomes_slow_is_followed_within_a_hundred_windows(policy: FusionPolicy, phase: int) -> None:
    rank = Rank(policy, Job("1gbit", backward=5e-3, noise=0.02))
    rank.run(100 + phase)
    assert rank.finish < 1.03
    rank.job.link = "100mbit"
    assert rank.finish > 1.1  # the old plan would not do
    decisions = rank.run(100)
    assert "switch" in actions(decisions)
    assert rank.finish < 1.03


def test_a_gain_that_does_not_come_is_given_back_and_not_tried_again() -> None:
    job = Job(backward=5e-3, hidden=0.05)  # buffers cost more than the model knows
    rank = Rank(Tuned(Aligned(1000)), job)
    made = [d for d in rank.run(40) if d.action != "stay"]
    assert actions(made) == ["switch", "revert"]
    assert made[1].buffers == 1
    assert made[1].measured < 0 < made[1].predicted
    assert set(actions(rank.run(400))) == {"stay"}
    assert rank.plan.groups[0].stop == len(SHAPES)
    job.link, job.hidden = "100mbit", 0.0  # other costs: another chance
    assert actions(rank.run(100))[:3].count("switch") == 1
    assert rank.finish < 1.03


def test_a_broken_promise_covers_similar_plans() -> None:
    """Noise makes the proposals differ; none of them is a new idea."""
    rank = Rank(Tuned(Adaptive()), Job(backward=2e-3, hidden=0.05, noise=0.01))
    first = rank.plan
    rank.planner.current = Single().plan(rank.true)
    made = rank.run(600)
    assert first != rank.plan
    assert 1 <= actions(made).count("switch") <= 3
    assert actions(made).count("revert") == actions(made).count("switch")


def test_a_frozen_plan_stays_once_its_trial_has_ended() -> None:
    rank = Rank(Tuned(Aligned(1000), Cadence(freeze_after=6)), Job(backward=1e-3))
    assert actions(rank.run(200)) == ["switch", "freeze", "keep", "stay"]
    never = Rank(Tuned(Aligned(1000), Cadence(freeze_after=0)), Job())
    assert never.run(100) == []
    assert not any(never.timed)


def test_reviews_are_preceded_by_timed_windows_and_no_others_are() -> None:
    rank = Rank(Adaptive(cadence=Cadence(warmup_windows=10, every=50)), Job(backward=5e-3))
    rank.run(60)
    assert [(d.window, d.action) for d in rank.run(100)] == [(110, "stay"), (160, "stay")]
    assert [place for place in range(60, 160) if rank.timed[place]] == [*range(102, 110), *range(152, 160)]
    rank.job.link = "100mbit"
    switch = rank.run(55)[0]
    assert (switch.window, switch.action) == (210, "switch")
    assert all(rank.timed[202:215])  # its trial is timed as well


@pytest.mark.parametrize("policy", [Adaptive(), Cupcake(windows=2)], ids=repr)
def test_windows_without_times_decide_nothing(policy: FusionPolicy) -> None:
    rank = Rank(policy, Job())
    for _ in range(60):
        rank.planner.plan(rank.space.shape)
        rank.planner.observe(None, rank.space.shape)
    assert not rank.planner.decisions


@pytest.mark.parametrize(("policy", "stops"), [(Tuned(Aligned(1000)), [60]), (Cupcake(3), [20, 40, 60])], ids=repr)
def test_modelled_costs_are_never_reviewed(policy: FusionPolicy, stops: list[int]) -> None:
    rank = Rank(policy, Job())
    rank.planner = Planner(policy, rank.transport, "allgather", prior=None)
    assert rank.run(60) == []
    assert stops_of(rank.plan) == stops


@pytest.mark.parametrize(("windows", "hidden"), [(7, 0.0), (11, 0.05), *slow([(4, 0.05), (30, 0.0), (7, 0.05)])])
def test_a_resumed_job_makes_the_same_decisions(windows: int, hidden: float) -> None:
    def start() -> Rank:
        return Rank(Tuned(Aligned(1000)), Job(backward=1e-3, hidden=hidden))

    whole, first = start().run(40), start()
    made = first.run(windows)
    again = resumed(first)
    assert again.planner.state_dict() == first.planner.state_dict()
    made += again.run(40)

    def essence(decisions: Sequence[Decision]) -> list[tuple[Any, ...]]:
        return [(d.action, d.buffers, d.rival, d.measured and round(d.measured, 6)) for d in decisions]

    changes = [row for row in essence(made) if row[0] != "stay"]
    assert changes == [row for row in essence(whole) if row[0] != "stay"]
    assert changes[0][0] == "switch"


def test_a_new_density_or_order_ends_a_trial() -> None:
    rank = Rank(Tuned(Aligned(1000)), Job(backward=1e-3))
    assert actions(rank.run(8)) == ["switch"]
    rank.space.set_density(0.01)
    rank.planner.invalidate()
    assert rank.planner.state_dict()["trials"]["trial"] is None
    assert "keep" not in actions(rank.run(8))
    rank.planner.invalidate(order_changed=True)
    assert rank.planner.state_dict()["profile"] is None
    rank.run(60)
    assert rank.finish < 1.03


def yielding(link: str = "25gbit", hidden: float = 0.01, yields: bool = True, **job: float) -> Rank:
    """A job in which plain DDP may replace the engine, unless ``yields`` is false."""
    return Rank(Adaptive(), Job(link, hidden=hidden, **job), collective="auto", yields=yields)


@pytest.mark.parametrize("link", ["1gbit", "25gbit"])
def test_plain_ddp_takes_over_where_the_work_of_selection_is_more_than_the_exchange(link: str) -> None:
    rank = yielding(link)
    decisions = rank.run(200)
    fast = link == "25gbit"
    assert rank.planner.dense_for_good == fast
    if fast:
        # the third review in a row, and the end of the trial; none follows
        assert [(each.action, each.window) for each in decisions[-2:]] == [("dense", 15), ("keep", 22)]
        plan = rank.plan
        assert {group.collective for group in plan.groups} == {"allreduce"}
        rank.planner.invalidate()
        assert not rank.planner.dense_for_good  # another density: judged anew


def test_plain_ddp_does_not_take_over_where_its_exchange_is_slower_than_predicted() -> None:
    rank = yielding(surprise=200.0)
    (trial,) = [each for each in rank.run(300) if each.action == "revert"]
    assert trial.measured < -1
    assert not rank.planner.dense_for_good
    dense = [all(group.collective == "allreduce" for group in plan.groups) for plan in rank.plans]
    assert sum(dense) < 15  # and never again in so short a run
    assert not any(dense[30:])


@pytest.mark.parametrize("windows", [18, 22], ids=["on trial", "agreed"])
@pytest.mark.parametrize("measures", [True, False])
def test_what_everything_dense_took_elsewhere_is_forgotten(windows: int, measures: bool) -> None:
    first = yielding()
    assert [each.action for each in first.run(windows)][-1] == ("dense" if windows == 18 else "keep")
    again = yielding("100mbit", 0.0)
    again.planner = Planner(
        again.policy, again.transport, "auto", again.job.lines if measures else None, yields=measures
    )
    again.planner.load_state_dict(json.loads(json.dumps(first.planner.state_dict())), again.space.shape)
    again.run(100)
    assert not again.planner.dense_for_good
    dense = [all(group.collective == "allreduce" for group in plan.groups) for plan in again.plans]
    assert not any(dense)


def test_where_a_residual_remains_the_plan_before_comes_back() -> None:
    rank = yielding()
    rank.run(15)
    before = rank.plans[-1]
    rank.run(7)
    assert rank.planner.dense_for_good
    rank.planner.keep_engine(rank.space.shape)
    assert not rank.planner.dense_for_good
    assert rank.plan == before
    assert actions(rank.planner.decisions)[-1] == "revert"
    assert "dense" not in actions(rank.run(100))  # another trial needs four times as many reviews


@pytest.mark.parametrize("earlier", [None, {"pending": None, "reviews": 2, "wanted": 3}])
def test_a_checkpoint_of_an_earlier_version_says_nothing_of_plain_ddp(earlier: dict[str, Any] | None) -> None:
    rank = yielding()
    rank.run(10)
    state = rank.planner.state_dict()
    state |= {"handover": earlier}
    if earlier is None:
        del state["handover"]
    rank.planner.load_state_dict(state, rank.space.shape)
    rank.run(100)
    assert rank.planner.dense_for_good


def test_an_engine_that_cannot_be_replaced_stays() -> None:
    rank = yielding(yields=False)
    rank.run(200)
    assert not rank.planner.dense_for_good


def test_ranks_decide_alike_though_none_has_measured_the_same() -> None:
    def run(transport: Transport) -> tuple[list[Decision], list[int], float]:
        job = Job("1gbit", backward=5e-3, noise=0.05, late=0.1 * transport.rank, seed=transport.rank)
        mine = Rank(StartsWith(Single()), job, transport)
        made = mine.run(80)
        mine.job.link = "100mbit"
        made += mine.run(100)
        return made, [plan.digest for plan in mine.plans], mine.finish

    results = in_threads(local_transports(3, timeout=20.0), run)
    assert results[0] == results[1] == results[2]
    assert actions(results[0][0]).count("switch") >= 2
    assert results[0][2] < 1.05


def test_the_rank_that_began_last_says_how_long_a_window_took() -> None:
    def run(transport: Transport) -> float | None:
        return Rank(Adaptive(), Job(late=5.0 * transport.rank), transport).run(5)[-1].seconds

    seconds = in_threads(local_transports(2, timeout=20.0), run)
    assert seconds[0] == seconds[1]
    assert 0.03 < seconds[0] < 0.1


class Differs(Single):
    """A grouping that is the same on all ranks for its first plan."""

    cadence = Cadence()

    def __init__(self, rank: int) -> None:
        self._rank, self._plans = rank, 0

    def plan(self, costs: GroupCosts) -> Plan:
        self._plans += 1
        return Adaptive().plan(costs) if self._rank and self._plans > 1 else super().plan(costs)


def test_plans_that_differ_after_a_review_are_told_before_a_window_uses_them() -> None:
    def run(transport: Transport) -> str:
        rank = Rank(Differs(transport.rank), Job("1gbit", backward=5e-3), transport)
        with pytest.raises(RuntimeError, match="that another rank does not have: policy Differs") as told:
            rank.run(200)
        return str(told.value)

    assert len({*in_threads(local_transports(2, timeout=10.0), run)}) == 2


class Returns(FusionPolicy):
    """A grouping with a mistake."""

    name = "returns"

    def __init__(self, plan: Any) -> None:
        self.made = plan

    def plan(self, costs: GroupCosts) -> Plan:
        plan: Plan = self.made
        return plan


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, r"grouping Returns\(made=None\) has to return a Plan, .*, got None of type NoneType"),
        ([1, 2], r"got \[1, 2\] of type list"),
        (Plan.from_stops([1]), "has made a plan of 1 tensors, there are"),
        (Plan.from_stops([1, 99]), "has made a plan of 99 tensors, there are"),
    ],
    ids=["nothing", "stops", "too few", "too many"],
)
def test_a_grouping_that_makes_no_plan_is_named(made: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        Rank(Returns(made), Job()).run(1)

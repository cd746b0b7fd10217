"""Which worker the others wait for: when one is named, and that its slowness does not pass for that of a link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.virtual.transport import local_transports
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.fusion.plans.adaptive import Adaptive
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.policy import Cupcake, FusionPolicy
from lightning_safusion.fusion.slowest import OwnTimes, SlowestWorker, SlowWorker, WorkerTimes
from tests.cluster import specs
from tests.comm.exchanges import in_threads
from tests.fusion.jobs import Rank, Together

LAYOUT = Layout(specs([(1,)] * 3))
TAIL = 0.02  # seconds from the last gradient of the slowest rank to the end of a window


@dataclass
class Team:
    """Ranks that end every window together, the time of the slowest one and some more after the one before."""

    ranks: int
    steps: int = 0
    now: float = 0.0
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.own = [OwnTimes(rank, self.ranks) for rank in range(self.ranks)]
        self.rule = SlowestWorker([f"h{rank}" for rank in range(self.ranks)], self.said.append)

    def window(self, *own_s: float) -> None:
        """All ranks have a window, before which each has worked for so long."""
        end = self.now + max(own_s) + TAIL
        for rank, (times, seconds) in enumerate(zip(self.own, own_s, strict=True)):
            off = 100.0 * rank
            ready = np.array([np.nan, off + self.now + seconds, off + self.now])  # in any order, and one is missing
            times.add(WindowEvents(self.steps, 0.1, LAYOUT, ready, (), off + end))
        self.steps, self.now = self.steps + 1, end

    def review(self, *own_s: float, windows: int = 5) -> SlowWorker | None:
        """A review after windows in which the ranks took so long; returns the worker that is named."""
        for _ in range(windows):
            self.window(*own_s)
        self.rule.review(np.min([times.to_vector() for times in self.own], axis=0))
        return self.rule.slow


@pytest.mark.parametrize(("others", "rank"), [([0.1], 1), ([0.1, 0.099, 0.101, 0.1], 4)])
def test_a_slow_worker_is_named_at_the_second_review_and_until_the_second_without_it(
    others: list[float], rank: int
) -> None:
    team = Team(len(others) + 1)
    assert team.review(*others, 0.1) is None
    assert team.review(*others, 0.14) is None
    slow = team.review(*others, 0.15)
    assert slow is not None
    assert (slow.rank, slow.host, slow.since) == (rank, f"h{rank}", 6)  # the window of a review itself does not count
    assert slow.waiting_s == pytest.approx(0.05)
    assert slow.step_s == pytest.approx(0.15 + TAIL)
    line = (
        f"rank {rank} on host h{rank} is slow: the others wait 50.0 ms of every step of 170.0 ms for it, since step 6"
    )
    assert team.said == [line]
    assert team.review(*others, 0.1) is not None
    assert team.review(*others, 0.12) is not None  # slow again: neither is news
    assert team.review(*others, 0.1) is not None
    assert team.review(*others, 0.1) is None
    assert team.said == [line, f"the others no longer wait for rank {rank} on host h{rank}"]


@pytest.mark.parametrize("pair", [(0.1, 0.104), (0.01, 0.0109)], ids=["5 %", "1 ms"])
def test_a_little_slower_is_not_slow(pair: tuple[float, float]) -> None:
    team = Team(2)
    assert [team.review(*pair) for _ in range(4)] == [None] * 4
    assert team.rule.times is not None
    assert team.rule.times.own_s == pytest.approx(pair)
    assert team.rule.times.rest_s == pytest.approx((TAIL + pair[1] - pair[0], TAIL))


def test_what_is_about_the_limit_does_not_flap() -> None:
    team = Team(2)
    assert [team.review(0.1, own) for own in (0.106, 0.104) * 4] == [None] * 8  # never twice in succession
    team.review(0.1, 0.106)
    assert all(team.review(0.1, own) is not None for own in (0.106, 0.104, 0.102, 0.103) * 4)
    assert len(team.said) == 1


def test_noise_of_many_workers_names_none() -> None:
    team, rng = Team(16), np.random.default_rng(0)
    for _ in range(100):
        for _ in range(5):
            team.window(*(0.1 * rng.uniform(0.95, 1.05, 16)))
        assert team.review(windows=0) is None


def test_another_worker_takes_its_place_only_if_it_is_slower_again() -> None:
    team = Team(4)
    for _ in range(2):
        team.review(0.1, 0.1, 0.1, 0.15)
    ranks = [slow.rank for own in (0.155, 0.155, 0.2, 0.2) if (slow := team.review(0.1, 0.1, own, 0.15))]
    assert ranks == [3, 3, 2, 2]
    assert [line.split()[1] for line in team.said] == ["3", "2"]


def test_a_pause_a_gap_and_few_windows_say_nothing() -> None:
    team = Team(2)
    for _ in range(3):
        team.window(0.1, 0.1)
        team.window(5.0, 0.1)  # validation, on rank 0 alone
        team.steps += 1  # a window without times
        team.window(9.0, 0.1)
        assert team.review(0.1, 0.1, windows=6) is None
    assert team.rule.times is not None
    assert team.rule.times.own_s == pytest.approx((0.1, 0.1))
    before = team.rule.times
    team.review(0.1, 0.9, windows=3)
    assert team.rule.times is before
    team.review(0.1, 0.9, windows=3)  # with those of the review before
    assert team.rule.times.own_s == pytest.approx((0.1, 0.9))


def test_without_the_times_of_all_ranks_nothing_is_said() -> None:
    team = Team(2)
    for own in team.own:
        own.add(WindowEvents(0, 0.1, LAYOUT, np.array([np.nan]), (), 0.0))
    for step in range(1, 9):
        for rank, own in enumerate(team.own):
            ready = np.array([np.nan if rank else step - 0.5])
            own.add(WindowEvents(step, 0.1, LAYOUT, ready, (), float(step)))
    assert team.review(windows=0) is None
    assert team.rule.times is None


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=9))
def test_others_are_all_but_the_rank_itself(own: list[float]) -> None:
    others = WorkerTimes(0, 1.0, tuple(own), tuple(own)).others_s
    assert others == pytest.approx([np.median(np.delete(own, rank)) for rank in range(len(own))])


def trained(
    policy: Callable[[], FusionPolicy], loading: Sequence[float], paces: Sequence[float], windows: int = 60
) -> list[tuple[SlowWorker | None, GroupCosts]]:
    """Who is named on each rank, and the costs there, after a job of ranks with these times."""

    def rank(transport: Transport) -> tuple[SlowWorker | None, GroupCosts]:
        job = Together(rank=transport.rank, loading=loading, paces=paces)
        one = Rank(policy(), job, transport)
        one.planner = Planner(one.policy, transport, "allgather", job.lines, hosts=["a"] * len(paces))
        one.run(windows)
        return one.planner.slowest.slow, one.costs

    return in_threads(local_transports(len(paces), timeout=20.0), rank)


@pytest.mark.parametrize(
    ("loading", "paces"),
    [([1e-3, 0.2], [5e-4, 5e-4]), ([1e-3, 1e-3], [5e-4, 5e-3]), ([0.1, 0.1, 0.3], [2e-3, 5e-4, 5e-4])],
    ids=["loading", "backward", "both"],
)
def test_a_slow_worker_does_not_pass_for_a_slow_link(loading: list[float], paces: list[float]) -> None:
    alike = [loading[0]] * len(loading), [paces[0]] * len(paces)
    (nobody, link), *_ = trained(Adaptive, *alike)
    assert nobody is None
    results = trained(Adaptive, loading, paces)
    slow, costs = results[0]
    assert all(result == results[0] for result in results)
    assert slow is not None
    assert slow.rank == len(paces) - 1
    assert costs.sparse == pytest.approx(link.sparse, rel=0.05)


def test_a_search_that_tries_plans_names_a_slow_worker() -> None:
    (slow, _), (other, _) = trained(lambda: Cupcake(windows=6), [0.01, 0.1], [5e-4, 5e-4])
    assert slow == other
    assert slow is not None
    assert (slow.rank, slow.waiting_s) == (1, pytest.approx(0.09))

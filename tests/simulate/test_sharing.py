"""Cores that tasks share, against times worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from lightning_safusion.simulate.sharing import SharedCores, fair_shares


def ends(cores: float, tasks: Sequence[tuple[float, float, float]]) -> list[float]:
    """When tasks end that begin at a time, take some seconds alone, and ask for a share of a core."""
    machine = SharedCores(cores)
    done = [math.nan] * len(tasks)

    def begin(number: int, seconds: float, demand: float) -> None:
        machine.start(seconds, demand, 1, lambda: done.__setitem__(number, machine.clock))

    for number, (at, seconds, demand) in enumerate(tasks):
        machine.start(at, 0.0, 1, lambda n=number, s=seconds, d=demand: begin(n, s, d))
    machine.run()
    return done


@pytest.mark.parametrize(
    ("demands", "counts", "cores", "shares"),
    [
        ([1.0], [1], 2, [1.0]),
        ([1.0, 1.0], [1, 1], 1, [0.5, 0.5]),
        ([1.0, 1.0, 1.0], [1, 1, 1], 2, [2 / 3] * 3),
        ([1.0, 0.1], [2, 4], 2, [0.8, 0.1]),
        # eight threads on two cores: those that ask for half a core have no more than the others
        ([0.5, 1.0], [4, 4], 2, [0.25, 0.25]),
        ([0.0, 1.0], [3, 3], 2, [0.0, 2 / 3]),
    ],
)
def test_shares_are_fair(demands: list[float], counts: list[int], cores: float, shares: list[float]) -> None:
    assert fair_shares(demands, counts, cores) == pytest.approx(shares)


def test_two_tasks_on_one_core_take_twice_as_long() -> None:
    assert ends(1, [(0, 1, 1), (0, 1, 1)]) == pytest.approx([2, 2])
    assert ends(2, [(0, 1, 1), (0, 1, 1)]) == pytest.approx([1, 1])


def test_three_tasks_on_two_cores() -> None:
    assert ends(2, [(0, 1, 1)] * 3) == pytest.approx([1.5] * 3)
    # two thirds of a core each until the short one ends at 1.5 s, then a whole one
    assert ends(2, [(0, 1, 1), (0, 2, 1), (0, 2, 1)]) == pytest.approx([1.5, 2.5, 2.5])


def test_a_task_that_comes_later_slows_down_what_is_left() -> None:
    # alone for a second; then one second is left of the first and two of the other
    assert ends(1, [(0, 2, 1), (1, 2, 1)]) == pytest.approx([3, 4])
    assert ends(2, [(0, 2, 1), (0, 2, 1), (1, 1, 1)]) == pytest.approx([2.5, 2.5, 2.5])


def test_who_asks_for_little_is_not_slowed_down() -> None:
    # a quarter of the core for a second: the other has three quarters of it meanwhile
    assert ends(1, [(0, 1, 0.25), (0, 1, 1)]) == pytest.approx([1, 1.25])


def test_sleep_takes_no_core() -> None:
    assert ends(1, [(0, 1, 1), (0, 3, 0), (0, 3, 0)]) == pytest.approx([1, 3, 3])


def test_threads_of_a_task_go_on_together() -> None:
    machine, done = SharedCores(2), []
    machine.start(1.0, 1.0, 4, lambda: done.append(machine.clock))
    machine.run()
    assert done == pytest.approx([2.0])


def test_with_cores_for_all_tasks_do_not_meet() -> None:
    assert ends(math.inf, [(0, 1, 1)] * 100) == pytest.approx([1] * 100)

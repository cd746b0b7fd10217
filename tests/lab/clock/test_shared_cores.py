"""Cores that tasks share, against times worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pytest

from lab.clock.cores import SharedCores, fair_shares

# So short that threads that compute share all cores nearly evenly.
SLICE = 1e-3


def ends(cores: float, tasks: Sequence[tuple[float, float, float]], timeslice: float = SLICE) -> list[float]:
    """When tasks end that begin at a time, take some seconds alone, and ask for a share of a core; 1: they compute."""
    machine = SharedCores(cores, timeslice)
    done = [math.nan] * len(tasks)

    def begin(number: int, seconds: float, demand: float) -> None:
        def end() -> None:
            done[number] = machine.clock

        if demand == 1:
            machine.compute(seconds, end)
        else:
            machine.carry(seconds, end, demand)

    for number, (at, seconds, demand) in enumerate(tasks):
        machine.carry(at, partial(begin, number, seconds, demand))
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
    assert ends(1, [(0, 1, 1), (0, 1, 1)]) == pytest.approx([2, 2], abs=2 * SLICE)
    assert ends(2, [(0, 1, 1), (0, 1, 1)]) == pytest.approx([1, 1])


def test_three_tasks_on_two_cores() -> None:
    assert ends(2, [(0, 1, 1)] * 3) == pytest.approx([1.5] * 3, abs=2 * SLICE)
    # two thirds of a core each until the short one ends at 1.5 s, then a whole one
    assert ends(2, [(0, 1, 1), (0, 2, 1), (0, 2, 1)]) == pytest.approx([1.5, 2.5, 2.5], abs=2 * SLICE)


def test_a_task_that_comes_later_slows_down_the_others() -> None:
    # alone for a second; then one second is left of the first and two of the other
    assert ends(1, [(0, 2, 1), (1, 2, 1)]) == pytest.approx([3, 4], abs=2 * SLICE)
    assert ends(2, [(0, 2, 1), (0, 2, 1), (1, 1, 1)]) == pytest.approx([2.5, 2.5, 2.5], abs=2 * SLICE)


def test_small_demands_are_met_in_full() -> None:
    # a quarter of the core for a second: the other has three quarters of it meanwhile
    assert ends(1, [(0, 1, 0.25), (0, 1, 1)]) == pytest.approx([1, 1.25])


def test_sleep_takes_no_core() -> None:
    assert ends(1, [(0, 1, 1), (0, 3, 0), (0, 3, 0)]) == pytest.approx([1, 3, 3])


def test_first_come_first_served_in_slices() -> None:
    assert ends(1, [(0, 1, 1), (0, 1, 1)], timeslice=10) == pytest.approx([1, 2])
    assert ends(1, [(0, 1, 1), (0, 1, 1)], timeslice=0.5) == pytest.approx([1.5, 2])
    assert ends(2, [(0, 1, 1)] * 3, timeslice=10) == pytest.approx([1, 1, 2])
    # alone for 3 s, the first has used up its slice: the other comes in between
    assert ends(1, [(0, 5, 1), (3, 1, 1)], timeslice=1) == pytest.approx([6, 5])


def test_carrying_data_takes_cores_from_computing() -> None:
    assert ends(1, [(0, 1, 0.25), (0, 1, 1)], timeslice=10) == pytest.approx([1, 1.25])
    # three threads want a core and a half of two; a sleeper wants none
    assert ends(2, [(0, 4, 0.5), (0, 1.5, 1), (0, 1.5, 1), (0, 7, 0)], timeslice=10) == pytest.approx([4, 2, 2, 7])


def test_threads_of_a_task_run_together() -> None:
    machine, done = SharedCores(2), []
    machine.compute(1.0, lambda: done.append(machine.clock), threads=4)
    machine.run()
    assert done == pytest.approx([2.0])


def test_with_cores_for_all_tasks_do_not_meet() -> None:
    assert ends(math.inf, [(0, 1, 1)] * 100) == pytest.approx([1] * 100)

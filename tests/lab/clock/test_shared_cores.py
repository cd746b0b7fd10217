"""Cores that tasks share, against times worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pytest

from lab.clock.cores import SharedCores, fair_shares

# So short that threads that compute share all cores nearly evenly.
SLICE = 1e-3


def ends(cores: float, tasks: Sequence[tuple[float, float, float]], timeslice: float) -> list[float]:
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


FAIR, LONG = 2 * SLICE, 10.0


@pytest.mark.parametrize(
    ("cores", "tasks", "expected", "apart", "timeslice"),
    [
        # threads that compute share the cores
        (1, [(0, 1, 1), (0, 1, 1)], [2, 2], FAIR, SLICE),
        (2, [(0, 1, 1), (0, 1, 1)], [1, 1], 0, SLICE),
        (2, [(0, 1, 1)] * 3, [1.5] * 3, FAIR, SLICE),
        # two thirds of a core each until the short one ends at 1.5 s, then a whole one
        (2, [(0, 1, 1), (0, 2, 1), (0, 2, 1)], [1.5, 2.5, 2.5], FAIR, SLICE),
        # one that comes later: alone for a second; then one second is left of the first and two of the other
        (1, [(0, 2, 1), (1, 2, 1)], [3, 4], FAIR, SLICE),
        (2, [(0, 2, 1), (0, 2, 1), (1, 1, 1)], [2.5, 2.5, 2.5], FAIR, SLICE),
        # small demands are met in full: a quarter of the core for a second, the other has three quarters meanwhile
        (1, [(0, 1, 0.25), (0, 1, 1)], [1, 1.25], 0, SLICE),
        # sleep takes no core
        (1, [(0, 1, 1), (0, 3, 0), (0, 3, 0)], [1, 3, 3], 0, SLICE),
        # first come, first served, in slices
        (1, [(0, 1, 1), (0, 1, 1)], [1, 2], 0, LONG),
        (1, [(0, 1, 1), (0, 1, 1)], [1.5, 2], 0, 0.5),
        (2, [(0, 1, 1)] * 3, [1, 1, 2], 0, LONG),
        # alone for 3 s, the first has used up its slice: the other comes in between
        (1, [(0, 5, 1), (3, 1, 1)], [6, 5], 0, 1),
        # carrying data takes cores from computing
        (1, [(0, 1, 0.25), (0, 1, 1)], [1, 1.25], 0, LONG),
        # three threads want a core and a half of two; a sleeper wants none
        (2, [(0, 4, 0.5), (0, 1.5, 1), (0, 1.5, 1), (0, 7, 0)], [4, 2, 2, 7], 0, LONG),
        # with cores for all, tasks do not meet
        (math.inf, [(0, 1, 1)] * 100, [1] * 100, 0, SLICE),
    ],
)
def test_tasks_end_when_they_should(
    cores: float, tasks: list[tuple[float, float, float]], expected: list[float], apart: float, timeslice: float
) -> None:
    assert ends(cores, tasks, timeslice) == pytest.approx(expected, abs=apart or None)


def test_threads_of_a_task_run_together() -> None:
    machine, done = SharedCores(2), []
    machine.compute(1.0, lambda: done.append(machine.clock), threads=4)
    machine.run()
    assert done == pytest.approx([2.0])

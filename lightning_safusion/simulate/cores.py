"""Threads that share the cores of one machine, on a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

#: Seconds for which a thread keeps a core that others wait for: a tick of Linux at 250 Hz.
TIMESLICE = 4e-3
# Rounding errors of a task's remaining seconds.
_INSTANT = 1e-12


def fair_shares(demands: Sequence[float], counts: Sequence[int], cores: float) -> list[float]:
    """Max-min fair shares of the cores: small demands are met in full, the others have equal shares.

    Args:
        demands: Share of a core that each thread of a task asks for, 0 to 1.
        counts: Threads of each task.
        cores: Cores of the machine.
    """
    shares = [0.0] * len(demands)
    left, threads = cores, sum(counts)
    for place in sorted(range(len(demands)), key=lambda each: demands[each]):
        shares[place] = min(demands[place], left / threads)
        left -= counts[place] * shares[place]
        threads -= counts[place]
    return shares


@dataclass(eq=False)
class _Task:
    left: float  # seconds at full speed
    demand: float
    threads: int
    then: Callable[[], None]
    slice: float = inf  # seconds that it keeps its core, if it computes
    first: Callable[[], None] | None = None  # called once, when it gets a core
    speed: float = 0.0


class SharedCores:
    """A machine on which tasks start when others end.

    Threads that compute have a core each, first come, first served, for a slice of time if others wait. Tasks that
    carry data or sleep have as much of the cores as they ask for, or their fair share; the rest is left for computing.

    Args:
        cores: Cores of the machine; infinitely many: tasks do not affect each other.
        timeslice: Seconds.

    Attributes:
        clock: Seconds since the beginning.
    """

    def __init__(self, cores: float, timeslice: float = TIMESLICE) -> None:
        self.cores = cores
        self.timeslice = timeslice
        self.clock = 0.0
        self._carrying: list[_Task] = []
        self._computing: list[_Task] = []  # those that have a core first

    def compute(
        self, seconds: float, then: Callable[[], None], threads: int = 1, first: Callable[[], None] | None = None
    ) -> None:
        """Begins to compute for ``seconds`` on ``threads`` that run together, with a core for each; calls ``first``
        when they get their cores, ``then`` when they have ended."""
        self._computing.append(_Task(seconds, 1.0, threads, then, self.timeslice, first))

    def carry(self, seconds: float, then: Callable[[], None], demand: float = 0.0, threads: int = 1) -> None:
        """Begins to carry data, or to sleep, for ``seconds`` if each thread has the share of a core that it asks for;
        with a ``demand`` of 0 it only takes time."""
        self._carrying.append(_Task(seconds, demand, threads, then))

    def run(self) -> None:
        """Advances the clock until no task is left."""
        while tasks := [*self._carrying, *self._computing]:
            waiting = self._set_speeds(tasks)
            step = min(task.left / task.speed for task in tasks if task.speed > 0)
            if waiting:
                step = min(step, *(task.slice / task.speed for task in self._computing if task.speed > 0))
            self.clock += step
            for task in tasks:
                task.left -= step * task.speed
                task.slice -= step * task.speed
            self._carrying = [task for task in self._carrying if task.left > _INSTANT]
            computing = [task for task in self._computing if task.left > _INSTANT]
            used_up = [task for task in computing if task.slice <= _INSTANT]
            for task in used_up:
                task.slice = self.timeslice
            self._computing = [task for task in computing if task not in used_up] + used_up if waiting else computing
            for task in tasks:
                if task.left <= _INSTANT:
                    task.then()

    def _set_speeds(self, tasks: Sequence[_Task]) -> bool:
        """Sets the speed of each task; returns whether a thread waits for a core."""
        shares = fair_shares([task.demand for task in tasks], [task.threads for task in tasks], self.cores)
        for task, share in zip(tasks, shares, strict=True):
            task.speed = share / task.demand if task.demand > 0 else 1.0
        free = self.cores - sum(task.threads * task.demand * task.speed for task in self._carrying)
        running: list[_Task] = []
        left = self.cores
        for task in self._computing:
            task.speed = 0.0
            if task.threads <= left or not running:
                running.append(task)
                left -= task.threads
        threads = sum(task.threads for task in running)
        for task in running:
            task.speed = min(1.0, free / threads)
            if task.first is not None:
                task.first()
                task.first = None
        return len(running) < len(self._computing)

"""One iteration of workers that compute, select and do the network's work on the cores of one machine.

Every worker is a thread with a programme: computing, the engine's hooks, selections, launches, waits, decoding. A
collective runs when all workers have launched it; its first part, latency, hides behind the one before it, the rest has
the link for itself, and on each worker it asks for a share of a core meanwhile. Everything slows down where that is
more than the machine has. A worker that slept too long, since no core was free when it woke up, sleeps less the next
time: its sleep stands for an accelerator, which does not wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from statistics import fmean

import numpy as np

from lab.clock.costs import HostCluster, HostCost, HostJob
from lightning_safusion.profiling.trace import Trace
from lightning_safusion.tools.plan.cluster import CollectiveCost
from lightning_safusion.tools.plan.schedule import Iteration, Message, Schedule, Stream, Timer
from lightning_safusion.tools.plan.systems import build_schedule

#: Seconds for which a thread keeps a core that others wait for: a tick of Linux at 250 Hz.
TIMESLICE = 4e-3
# Rounding errors of a task's remaining seconds.
_INSTANT = 1e-12
# The steps of a worker; it stops where time has to pass.
_Program = Iterator[None]


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


def simulate(trace: Trace, cluster: HostCluster, schedule: Schedule, iteration: int = 0) -> Iteration:
    """Runs one iteration in the steady state; another number of the iteration draws other jitter.

    Raises:
        ValueError: If messages leave at ticks, or when each worker has filled a buffer.
    """
    if isinstance(schedule.launch, Timer | Stream):
        raise ValueError("the clock of shared cores has only messages that are known before the iteration")
    return HostRun(trace, cluster, schedule, iteration).result()


def mean_iteration(trace: Trace, cluster: HostCluster, schedule: Schedule, iterations: int = 20) -> Iteration:
    """The mean of seconds and waits over iterations with different jitter; one iteration if none jitters."""
    runs = [simulate(trace, cluster, schedule, each) for each in range(iterations if cluster.jitter else 1)]
    seconds, waited = fmean(run.seconds for run in runs), fmean(run.waited for run in runs)
    return replace(runs[0], seconds=seconds, waited=waited)


def run_system(name: str, job: HostJob) -> Iteration:
    """The mean iteration of one row."""
    assert isinstance(job.cluster, HostCluster)
    return mean_iteration(job.trace, job.cluster, build_schedule(name, job))


@dataclass(eq=False)
class _Exchange:
    """A collective of one iteration.

    Args:
        cost: Its cost.
        missing: Steps of each worker before it can begin.
        ready: When each worker was ready for it.
        done: It has ended.
        waiting: Workers that wait for its end.
    """

    cost: HostCost
    missing: list[int]
    ready: list[float]
    done: bool = False
    waiting: list[int] = field(default_factory=list)


class HostRun:
    """One iteration of messages that are known before it, on the processors of the cluster."""

    def __init__(self, trace: Trace, cluster: HostCluster, schedule: Schedule, iteration: int) -> None:
        self.trace, self.cluster, self.schedule = trace, cluster, schedule
        host = self.host = cluster.host
        total = len(trace.tensors)
        # without jitter, workers that have a core each do the same at the same time: one stands for all of them
        alike = cluster.jitter == 0 and host.cores >= 1
        self.workers, self.alike = (1, cluster.workers) if alike else (cluster.workers, 1)
        self.cores = SharedCores(host.cores * cluster.workers)
        self.pace, self.noise = cluster.draw_factors(iteration, self.workers, total)
        self.select = schedule.select or [0.0] * total
        self.host_select = schedule.host_select or [0.0] * total
        self.ends = [0.0] * self.workers
        self.debts = [0.0] * self.workers  # seconds that each worker has slept too long: the next sleeps are shorter
        self.under_way = 0  # collectives
        # what waits for the link, and for a second thread of each worker that selects; the first of them has it
        self.link: deque[Callable[[], None]] = deque()
        self.selectors: list[deque[Callable[[], None]]] = [deque() for _ in range(self.workers)]
        self.sent = [(message, self._gather(message)) for message in schedule.messages]
        self.settles = {
            message.last: self._exchange(message.settle) for message in schedule.messages if message.settle is not None
        }
        self.programs = [self._program(worker) for worker in range(self.workers)]
        for worker in range(self.workers):
            self._advance(worker)
        self.cores.run()

    def _exchange(self, cost: CollectiveCost, steps: int = 1) -> _Exchange:
        return _Exchange(HostCost.of(cost), [steps] * self.workers, [0.0] * self.workers)

    def _gather(self, message: Message) -> _Exchange:
        return self._exchange(message.cost, 1 + sum(self.host_select[place] > 0 for place in message.tensors))

    def _program(self, worker: int) -> _Program:
        waiting = deque(self.sent)
        yield from self._leave(worker, waiting, -1)
        yield from self._forward(worker)
        for place, tensor in enumerate(self.trace.tensors):
            seconds = tensor.backward * float(self.pace[worker] * self.noise[worker, place])
            hook = self.host.hook if self.schedule.engine else 0.0
            yield from self._compute(worker, seconds, self.host.backward, hook)
            if self.host_select[place] > 0:
                for message, exchange in self.sent:
                    if place in message.tensors:
                        self._select_on_host(worker, self.host_select[place], exchange)
            else:
                yield from self._busy(worker, self.select[place])
            yield from self._leave(worker, waiting, place)
        for message, exchange in self.sent:
            yield from self._await(worker, exchange)
            yield from self._busy(worker, message.decode)
        if self.schedule.engine:
            yield from self._busy(worker, self.host.drain(len(self.sent)))
        yield from self._compute(worker, self.trace.optimizer, self.host.optimizer)

    def _leave(self, worker: int, waiting: deque[tuple[Message, _Exchange]], place: int) -> _Program:
        """Selects for and launches the messages that are complete with the tensor at ``place``."""
        while waiting and waiting[0][0].last <= place:
            message, exchange = waiting.popleft()
            yield from self._busy(worker, message.select)
            self._launch(worker, exchange)

    def _forward(self, worker: int) -> _Program:
        """Waits for parameters that settle late; each group is launched when the one before it begins."""
        waiting = deque(self.settles[place] for place in sorted(self.settles, reverse=True))
        if waiting:
            self._launch(worker, waiting.popleft())
        for place in reversed(range(len(self.trace.tensors))):
            if place in self.settles:
                yield from self._await(worker, self.settles[place])
                if waiting:
                    self._launch(worker, waiting.popleft())
            seconds = self.trace.tensors[place].forward * float(self.pace[worker])
            yield from self._compute(worker, seconds, self.host.forward)

    def _await(self, worker: int, exchange: _Exchange) -> _Program:
        if not exchange.done:
            exchange.waiting.append(worker)
            yield

    def _compute(self, worker: int, seconds: float, share: float, more: float = 0.0) -> _Program:
        asleep = self.host.asleep * (1 - share) * seconds
        yield from self._busy(worker, share * seconds + more, asleep)

    def _busy(self, worker: int, busy: float, asleep: float = 0.0) -> _Program:
        """Seconds of a worker's thread: first asleep, then on a core."""
        if asleep + busy <= 0:
            return
        begin = self.cores.clock

        def wake() -> None:
            if busy > 0:
                self.cores.compute(busy, partial(self._advance, worker), self.alike, awake)
            else:
                awake()
                self._advance(worker)

        def awake() -> None:
            if asleep > 0:
                self.debts[worker] += self.cores.clock - begin - asleep

        if asleep > 0:
            self.cores.carry(max(0.0, asleep - self.debts[worker]), wake)
        else:
            wake()
        yield

    def _advance(self, worker: int) -> None:
        """Takes the next steps of a worker, up to one that takes time."""
        try:
            next(self.programs[worker])
        except StopIteration:
            self.ends[worker] = self.cores.clock

    def _select_on_host(self, worker: int, seconds: float, exchange: _Exchange) -> None:
        waiting = self.selectors[worker]

        def end() -> None:
            waiting.popleft()
            self._launch(worker, exchange)
            if waiting:
                waiting[0]()

        waiting.append(lambda: self.cores.compute(seconds, end, self.alike))
        if len(waiting) == 1:
            waiting[0]()

    def _launch(self, worker: int, exchange: _Exchange) -> None:
        """One step less before a collective can begin; begins it when none is left on any worker."""
        exchange.missing[worker] -= 1
        exchange.ready[worker] = self.cores.clock
        if not any(exchange.missing):
            cost = exchange.cost
            hidden = cost.processor_hidden if not self.under_way else 0.0
            self.under_way += 1
            self._carry(cost.hidden, hidden, partial(self._transfer, exchange))

    def _carry(self, seconds: float, processor: float, then: Callable[[], None]) -> None:
        demand = min(1.0, processor / seconds) if seconds > 0 else 0.0
        self.cores.carry(seconds, then, demand, self.cluster.workers)

    def _transfer(self, exchange: _Exchange) -> None:
        cost = exchange.cost
        seconds, processor = cost.seconds - cost.hidden, cost.processor - cost.processor_hidden

        def end() -> None:
            self.under_way -= 1
            exchange.done = True
            self.link.popleft()
            if self.link:
                self.link[0]()
            for worker in exchange.waiting:
                self._advance(worker)

        self.link.append(lambda: self._carry(seconds, processor, end))
        if len(self.link) == 1:
            self.link[0]()

    def result(self) -> Iteration:
        """The result of the iteration."""
        exchanges = [*(exchange for _, exchange in self.sent), *self.settles.values()]
        total = sum((exchange.cost for exchange in exchanges), CollectiveCost())
        selected = sum(self.select) + sum(message.select for message, _ in self.sent)
        return Iteration(
            float(np.mean(self.ends)),
            self.trace.seconds,
            selected,
            selected + sum(message.decode for message, _ in self.sent),
            total.nbytes,
            total.node_bytes,
            sum(message.collectives for message, _ in self.sent) + len(self.settles),
            waited=sum(float(np.mean(max(e.ready) - np.array(e.ready))) for e in exchanges),
        )

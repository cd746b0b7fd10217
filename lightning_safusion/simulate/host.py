"""One iteration of workers that compute, select and carry the network's work on the cores of one machine.

Every worker is a thread with a programme: computing, the engine's hooks, selections, launches, waits, decoding. A
collective runs when all workers have launched it; its first part, latency, hides behind the one before it, the rest has
the link for itself, and on each worker it asks for a share of a core all the while. Everything slows down where that is
more than the machine has. A worker that slept too long, since it found no core when it woke up, sleeps less the next
time: what it sleeps through stands for an accelerator, which does not wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lightning_safusion.simulate.cluster import Cluster, CollectiveCost
from lightning_safusion.simulate.jitter import draw_factors
from lightning_safusion.simulate.measured import Host
from lightning_safusion.simulate.schedule import Ahead, Interval, Iteration, Message, Planned, Resource, Schedule
from lightning_safusion.simulate.sharing import SharedCores
from lightning_safusion.simulate.trace import Trace

# What a worker does, step by step: it stops where time has to pass.
_Program = Iterator[None]


@dataclass(eq=False)
class _Exchange:
    """A collective of one iteration.

    Args:
        cost: What it takes.
        label: Of the timeline.
        missing: What each worker still has to do before it can begin.
        ready: When each worker was ready for it.
        done: It has ended.
        waiting: Workers that do nothing else until then.
    """

    cost: CollectiveCost
    label: str
    missing: list[int]
    ready: list[float]
    done: bool = False
    waiting: list[int] = field(default_factory=list)


def simulate_host(trace: Trace, cluster: Cluster, host: Host, schedule: Schedule, iteration: int) -> Iteration:
    """Runs one iteration of messages that are known before it, on the processors of the cluster."""
    return _HostRun(trace, cluster, host, schedule, iteration).result()


class _HostRun:
    """State of one iteration."""

    def __init__(self, trace: Trace, cluster: Cluster, host: Host, schedule: Schedule, iteration: int) -> None:
        self.trace, self.cluster, self.host, self.schedule = trace, cluster, host, schedule
        # without jitter, workers that have a core each do the same at the same time: one stands for all of them
        alike = cluster.jitter == 0 and host.cores >= 1
        self.workers, self.alike = (1, cluster.workers) if alike else (cluster.workers, 1)
        self.cores = SharedCores(host.cores * cluster.workers)
        self.pace, self.noise = draw_factors(cluster, iteration, self.workers, len(trace.tensors))
        self.ends = [0.0] * self.workers
        self.debts = [0.0] * self.workers  # what each worker has slept too long, and the next sleeps are shorter by
        self.queue: deque[_Exchange] = deque()  # latency over, waiting for the link
        self.under_way = 0
        self.link_busy = False
        self.intervals: list[Interval] = []
        self.exchanges: list[_Exchange] = []
        self.collectives = 0
        # selections on a second thread of each worker: seconds, and the exchange that waits for it
        self.offloads: list[deque[tuple[float, _Exchange, str]]] = [deque() for _ in range(self.workers)]
        messages = schedule.launch.messages if isinstance(schedule.launch, Planned) else ()
        self.messages: list[Message] = sorted(messages, key=lambda message: max(message.tensors))
        self.programs = self._programs()
        for worker in range(self.workers):
            self._advance(worker)
        self.cores.run()

    def _programs(self) -> list[_Program]:
        launch = self.schedule.launch
        if isinstance(launch, Ahead):
            ahead = self._exchange(launch.cost, "weights")
            return [self._ahead(worker, ahead, launch.update) for worker in range(self.workers)]
        host = self.schedule.host_select
        gathers, settles = [], {}
        for message in self.messages:
            offloaded = sum(host[place] > 0 for place in message.tensors) if host is not None else 0
            label = f"{min(message.tensors)}-{max(message.tensors)}"
            gathers.append(self._exchange(message.cost, label, 1 + offloaded, message.collectives))
            if message.settle is not None:
                settles[max(message.tensors)] = self._exchange(message.settle, "settle")
        return [self._planned(worker, gathers, settles) for worker in range(self.workers)]

    def _exchange(self, cost: CollectiveCost, label: str, needed: int = 1, collectives: int = 1) -> _Exchange:
        self.collectives += collectives
        exchange = _Exchange(cost, label, [needed] * self.workers, [0.0] * self.workers)
        self.exchanges.append(exchange)
        return exchange

    def _ahead(self, worker: int, exchange: _Exchange, update: float) -> _Program:
        self._launch(worker, exchange)
        yield from self._forward(worker, {})
        for place in range(len(self.trace.tensors)):
            yield from self._backward(worker, place)
        yield from self._await(worker, exchange)
        yield from self._busy(worker, "compute", "update", update)
        yield from self._optimizer(worker)

    def _planned(self, worker: int, gathers: list[_Exchange], settles: dict[int, _Exchange]) -> _Program:
        yield from self._forward(worker, settles)
        schedule, at = self.schedule, 0
        hook = self.host.hook if schedule.engine else 0.0
        for place, tensor in enumerate(self.trace.tensors):
            yield from self._backward(worker, place, hook)
            if schedule.host_select is not None and schedule.host_select[place] > 0:
                for message, exchange in zip(self.messages, gathers, strict=True):
                    if place in message.tensors:
                        self._offload(worker, schedule.host_select[place], exchange, tensor.name)
            else:
                yield from self._busy(worker, "select", tensor.name, schedule.select[place])
            while at < len(gathers) and max(self.messages[at].tensors) <= place:
                yield from self._busy(worker, "select", gathers[at].label, self.messages[at].select)
                self._launch(worker, gathers[at])
                at += 1
        for message, exchange in zip(self.messages, gathers, strict=True):
            yield from self._await(worker, exchange)
            fixed = self.cluster.device.decode_fixed if message.decode > 0 else 0.0
            yield from self._busy(worker, "compute", f"decode {exchange.label}", message.decode + fixed)
        if schedule.engine:
            yield from self._busy(worker, "compute", "drain", self.host.drain(len(gathers)))
        yield from self._optimizer(worker)

    def _forward(self, worker: int, settles: dict[int, _Exchange]) -> _Program:
        """Parameters that settle late hold it up; each group is launched when the one before it begins."""
        waiting = deque(settles[place] for place in sorted(settles, reverse=True))
        if waiting:
            self._launch(worker, waiting.popleft())
        for place in reversed(range(len(self.trace.tensors))):
            if place in settles:
                yield from self._await(worker, settles[place])
                if waiting:
                    self._launch(worker, waiting.popleft())
            seconds = self.trace.tensors[place].forward * float(self.pace[worker])
            yield from self._compute(worker, "forward", seconds, self.host.forward)

    def _backward(self, worker: int, place: int, hook: float = 0.0) -> _Program:
        tensor = self.trace.tensors[place]
        seconds = tensor.backward * float(self.pace[worker] * self.noise[worker, place])
        yield from self._compute(worker, tensor.name, seconds, self.host.backward, hook)

    def _optimizer(self, worker: int) -> _Program:
        yield from self._compute(worker, "optimizer", self.trace.optimizer, self.host.optimizer)

    def _await(self, worker: int, exchange: _Exchange) -> _Program:
        if not exchange.done:
            exchange.waiting.append(worker)
            yield

    def _compute(self, worker: int, label: str, seconds: float, share: float, more: float = 0.0) -> _Program:
        asleep = self.host.asleep * (1 - share) * seconds
        yield from self._busy(worker, "compute", label, share * seconds + more, asleep)

    def _busy(self, worker: int, resource: Resource, label: str, busy: float, asleep: float = 0.0) -> _Program:
        """Seconds of a worker's thread: first asleep, then on a core."""
        if asleep + busy <= 0:
            return
        begin = self.cores.clock

        def end() -> None:
            if worker == 0:
                self.intervals.append(Interval(resource, label, begin, self.cores.clock))
            self._advance(worker)

        def wake() -> None:
            if busy > 0:
                self.cores.compute(busy, end, self.alike, awake)
            else:
                awake()
                end()

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

    def _offload(self, worker: int, seconds: float, exchange: _Exchange, label: str) -> None:
        self.offloads[worker].append((seconds, exchange, label))
        if len(self.offloads[worker]) == 1:
            self._select_on_host(worker)

    def _select_on_host(self, worker: int) -> None:
        (seconds, exchange, label), begin = self.offloads[worker][0], self.cores.clock

        def end() -> None:
            if worker == 0:
                self.intervals.append(Interval("host", label, begin, self.cores.clock))
            self.offloads[worker].popleft()
            self._launch(worker, exchange)
            if self.offloads[worker]:
                self._select_on_host(worker)

        self.cores.compute(seconds, end, self.alike)

    def _launch(self, worker: int, exchange: _Exchange) -> None:
        """One thing less to do before a collective can begin; begins it when nothing is left on any worker."""
        exchange.missing[worker] -= 1
        exchange.ready[worker] = self.cores.clock
        if not any(exchange.missing):
            cost = exchange.cost
            hidden = cost.processor_hidden if not self.under_way else 0.0
            self.under_way += 1
            self._carry(cost.hidden, hidden, partial(self._arrive, exchange))

    def _carry(self, seconds: float, processor: float, then: Callable[[], None]) -> None:
        demand = min(1.0, processor / seconds) if seconds > 0 else 0.0
        self.cores.carry(seconds, then, demand, self.cluster.workers)

    def _arrive(self, exchange: _Exchange) -> None:
        self.queue.append(exchange)
        if not self.link_busy:
            self._transfer()

    def _transfer(self) -> None:
        self.link_busy = True
        exchange, begin = self.queue.popleft(), self.cores.clock
        cost = exchange.cost

        def end() -> None:
            self.link_busy = False
            self.under_way -= 1
            self.intervals.append(Interval("link", exchange.label, begin, self.cores.clock))
            exchange.done = True
            if self.queue:
                self._transfer()
            waiting, exchange.waiting = exchange.waiting, []
            for worker in waiting:
                self._advance(worker)

        self._carry(cost.seconds - cost.hidden, cost.processor - cost.processor_hidden, end)

    def result(self) -> Iteration:
        sent = sum((exchange.cost for exchange in self.exchanges), CollectiveCost())
        waited = sum(float(np.mean(max(e.ready) - np.array(e.ready))) for e in self.exchanges)
        selected = sum(self.schedule.select) + sum(message.select for message in self.messages)
        if self.schedule.host_select is not None:
            on_host = np.array(self.schedule.host_select) > 0
            selected -= float(np.array(self.schedule.select)[on_host].sum())
        return Iteration(
            float(np.mean(self.ends)),
            self.trace.seconds,
            selected,
            sent.nbytes,
            sent.node_bytes,
            self.collectives,
            waited,
            tuple(self.intervals),
        )

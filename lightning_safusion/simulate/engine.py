"""One iteration on a clock: what computes, what selects, what is sent, and who waits for whom.

Every worker has four resources that do one thing at a time: the compute stream, the host's selector, the bus between
device and host, and the link, which takes collectives first come, first served. A collective begins when the last
worker is ready for it. Workers share nothing else, so that their jitter enters there and nowhere else.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from statistics import fmean

import numpy as np

from lightning_safusion.fusion.plans.ticking import fuse_ready
from lightning_safusion.simulate.cluster import Cluster, CollectiveCost
from lightning_safusion.simulate.host import simulate_host
from lightning_safusion.simulate.jitter import draw_factors, lognormal
from lightning_safusion.simulate.schedule import Ahead, Interval, Iteration, Message, Planned, Schedule, Stream, Timer
from lightning_safusion.simulate.trace import Trace


def simulate(trace: Trace, cluster: Cluster, schedule: Schedule, iteration: int = 0) -> Iteration:
    """Runs one iteration in the steady state; another number of the iteration draws other jitter.

    Raises:
        ValueError: If the schedule describes other tensors than the trace.
    """
    total = len(trace.tensors)
    if len(schedule.select) != total:
        raise ValueError(f"the schedule describes {len(schedule.select)} tensors, the trace {total}")
    if cluster.host is not None and isinstance(schedule.launch, Planned | Ahead):
        return simulate_host(trace, cluster, cluster.host, schedule, iteration)
    run = _Run(trace, cluster, schedule, iteration)
    if isinstance(schedule.launch, Planned):
        run.planned(schedule.launch)
    elif isinstance(schedule.launch, Timer):
        run.timer(schedule.launch)
    elif isinstance(schedule.launch, Ahead):
        run.ahead(schedule.launch)
    else:
        run.stream(schedule.launch)
    # what the host's work takes is known only where all messages are: this one comes out too short beside those
    return replace(run.result(), comparable=cluster.host is None)


def mean_iteration(trace: Trace, cluster: Cluster, schedule: Schedule, iterations: int = 20) -> Iteration:
    """The mean over iterations with different jitter, with the timeline of the first; one iteration if none jitters."""
    if cluster.jitter == 0 and not isinstance(schedule.launch, Stream):
        iterations = 1
    runs = [simulate(trace, cluster, schedule, iteration) for iteration in range(iterations)]
    return replace(
        runs[0],
        seconds=fmean(run.seconds for run in runs),
        select=fmean(run.select for run in runs),
        nbytes=fmean(run.nbytes for run in runs),
        node_bytes=fmean(run.node_bytes for run in runs),
        waited=fmean(run.waited for run in runs),
        collectives=round(fmean(run.collectives for run in runs)),
    )


class _Run:
    """State of one iteration. Arrays are [workers], or [workers, L]."""

    def __init__(self, trace: Trace, cluster: Cluster, schedule: Schedule, iteration: int) -> None:
        self.trace, self.cluster, self.schedule = trace, cluster, schedule
        # without jitter and with the same quotas all workers do the same at the same time
        alike = cluster.jitter == 0 and not isinstance(schedule.launch, Stream)
        self.workers = 1 if alike else cluster.workers
        total = len(trace.tensors)
        pace, noise = draw_factors(cluster, iteration, self.workers, total)
        self.rng = np.random.default_rng([cluster.seed, 2, iteration])  # of what thresholds let through
        self.backward = np.array([tensor.backward for tensor in trace.tensors]) * pace[:, None] * noise
        self.clock = self._forward(pace)
        self.link_free = 0.0
        self.host_free, self.bus_free = np.zeros(self.workers), np.zeros(self.workers)
        self.ready = np.zeros((self.workers, total))
        self.selected = np.full(self.workers, float(sum(schedule.select)))
        if schedule.host_select is not None:
            on_host = np.array(schedule.host_select) > 0
            self.selected -= float(np.array(schedule.select)[on_host].sum())
        self.sent = CollectiveCost()
        self.collectives = 0
        self.waited = 0.0
        self.first_busy = 0
        self.decodes: list[tuple[float, float]] = []  # arrival and duration of what is computed with at the end

    def _forward(self, pace: np.ndarray) -> np.ndarray:
        """When each worker's forward pass ends; parameters that settle late hold it up."""
        self.intervals: list[Interval] = []
        clock, free, launched = np.zeros(self.workers), 0.0, 0.0
        launch = self.schedule.launch
        messages = launch.messages if isinstance(launch, Planned) else ()
        settles = {max(m.tensors): m.settle for m in messages if m.settle is not None}
        for place in reversed(range(len(self.trace.tensors))):
            if (settle := settles.get(place)) is not None:
                # launched when the group before it begins its forward pass; the first, as soon as backward has ended
                begin = max(free, launched)
                free = begin + settle.seconds
                self.intervals.append(Interval("link", "settle", begin, free))
                clock = np.maximum(clock, free)
                launched = float(clock.max())
            clock = clock + self.trace.tensors[place].forward * pace
        self.intervals.append(Interval("compute", "forward", 0.0, float(clock[0])))
        return clock

    def _compute(self, place: int) -> None:
        """Backward and selection of one tensor; afterwards ``ready`` holds when it can be sent."""
        busy = self.clock < self.link_free
        begin = float(self.clock[0])
        self.clock = self.clock + self.backward[:, place] * (1.0 + self.cluster.device.contention * busy)
        self.intervals.append(Interval("compute", self.trace.tensors[place].name, begin, float(self.clock[0])))
        host = self.schedule.host_select[place] if self.schedule.host_select is not None else 0.0
        if host > 0:
            self._select_on_host(place, host)
            return
        self._select(self.trace.tensors[place].name, self.schedule.select[place])
        self.ready[:, place] = self.clock

    def _select_on_host(self, place: int, seconds: float) -> None:
        name, copied = self.trace.tensors[place].name, np.maximum(self.clock, self.bus_free)
        self.bus_free = copied + self.trace.tensors[place].numel * 4 / self.cluster.device.pcie
        begin = np.maximum(self.bus_free, self.host_free)
        self.host_free = begin + seconds
        self.ready[:, place] = self.host_free
        self.intervals.append(Interval("bus", name, float(copied[0]), float(self.bus_free[0])))
        self.intervals.append(Interval("host", name, float(begin[0]), float(self.host_free[0])))

    def _select(self, label: str, seconds: float) -> None:
        if seconds > 0:
            begin = float(self.clock[0])
            self.clock = self.clock + seconds
            self.intervals.append(Interval("select", label, begin, begin + seconds))

    def _send(self, message: Message, ready: np.ndarray, label: str, not_before: float = 0.0) -> None:
        """Puts a collective on the link; ``ready`` is when each worker could begin."""
        all_ready = max(float(ready.max()), not_before)
        self.waited += float((ready.max() - ready).mean())
        if all_ready > self.link_free:
            self.first_busy = message.tensors[0] if message.tensors else 0
        begin = max(all_ready, self.link_free)
        self.link_free = begin + message.cost.seconds
        decode = message.decode + (self.cluster.device.decode_fixed if message.decode > 0 else 0.0)
        if self.cluster.device.decodes_last:
            self.decodes.append((self.link_free, decode))
        else:
            self.link_free += decode
        self.sent = self.sent + message.cost
        self.collectives += message.collectives
        self.intervals.append(Interval("link", label, begin, self.link_free))

    def planned(self, launch: Planned) -> None:
        waiting = sorted(launch.messages, key=lambda message: max(message.tensors))
        at = 0
        for place in range(len(self.trace.tensors)):
            self._compute(place)
            while at < len(waiting) and max(waiting[at].tensors) <= place:
                message, at = waiting[at], at + 1
                ready = self.ready[:, list(message.tensors)].max(axis=1)
                label = f"{min(message.tensors)}-{max(message.tensors)}"
                if message.select > 0:
                    self._select(label, message.select)
                    self.selected += message.select
                    ready = np.maximum(ready, self.clock)
                self._send(message, ready, label)
        for message in launch.messages:
            if message.settle is not None:
                self.sent = self.sent + message.settle
                self.collectives += 1

    def timer(self, launch: Timer) -> None:
        total = len(self.trace.tensors)
        for place in range(total):
            self._compute(place)
        everywhere = self.ready.max(axis=0)
        first = self.ready.min(axis=0)  # somebody asks from here on
        sent, now = 0, launch.cycle * ceil(float(first[0]) / launch.cycle)
        while sent < total:
            end = now
            if first[sent] <= now:
                end += launch.negotiate
                stop = sent
                while stop < total and everywhere[stop] <= now:
                    stop += 1
                for begin, close in fuse_ready(launch.nbytes, sent, stop, launch.threshold):
                    end += launch.launch
                    places = range(begin, close)
                    self._send(launch.cost(places), self.ready[:, close - 1], f"{begin}-{close - 1}", end)
                sent = stop
            now = max(now + launch.cycle, end, self.link_free)

    def stream(self, launch: Stream) -> None:
        total = len(self.trace.tensors)
        for place in range(total):
            self._compute(place)
        factors = lognormal(self.rng, launch.spread, (self.workers, total))
        limits = np.array(self.trace.numels)
        kept = np.clip(np.array(launch.entries) * factors, 1, limits).cumsum(axis=1)
        rounds = np.ceil(kept[:, -1] / launch.capacity).astype(int)
        for number in range(int(rounds.max())):
            # a buffer is closed by the tensor that fills it; who has sent everything goes on with empty ones
            full = np.minimum((number + 1) * launch.capacity, kept[:, -1])
            closing = (kept < full[:, None]).sum(axis=1)
            ready = self.ready[np.arange(self.workers), closing]
            self._send(replace(launch.cost, tensors=(int(closing.max()),)), ready, f"round {number}")

    def ahead(self, launch: Ahead) -> None:
        self._send(Message((), launch.cost), np.zeros(self.workers), "weights")
        for place in range(len(self.trace.tensors)):
            self._compute(place)
        self.decodes.append((self.link_free, launch.update))

    def result(self) -> Iteration:
        end = max(float(self.clock.max()), float(self.host_free.max()))
        for arrived, seconds in self.decodes:
            end = max(end, arrived) + seconds
        end = max(end, self.link_free)
        optimizer = self.trace.optimizer
        if optimizer > 0:
            self.intervals.append(Interval("compute", "optimizer", end, end + optimizer))
        return Iteration(
            end + optimizer,
            self.trace.seconds,
            float(self.selected.max()),
            self.sent.nbytes,
            self.sent.node_bytes,
            self.collectives,
            self.waited,
            tuple(self.intervals),
            self.first_busy,
        )

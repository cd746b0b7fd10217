"""One iteration on a clock: computing, selection, collectives, and the waits between them.

Every worker has four resources that do one thing at a time: the compute stream, which selects and decodes too, the
host's selector, the bus between device and host, and the link, which takes collectives first come, first served. A
collective begins when the last worker is ready for it. Workers share nothing else, so that their jitter enters there
and nowhere else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean
from typing import Any

import numpy as np

from lightning_safusion.fusion.plans.ticking import fuse_ready
from lightning_safusion.profiling.trace import Trace
from lightning_safusion.tools.plan.cluster import Cluster, CollectiveCost, lognormal
from lightning_safusion.tools.plan.schedule import Iteration, Message, Schedule, Stream, Timer


def simulate(trace: Trace, cluster: Cluster, schedule: Schedule, iteration: int = 0) -> Iteration:
    """Runs one iteration in the steady state; another number of the iteration draws other jitter."""
    run = _Run(trace, cluster, schedule, iteration)
    if isinstance(schedule.launch, Timer):
        run.timer(schedule.launch)
    elif isinstance(schedule.launch, Stream):
        run.stream(schedule.launch)
    else:
        run.planned(schedule.messages)
    return run.result()


def mean_iteration(trace: Trace, cluster: Cluster, schedule: Schedule, iterations: int = 20) -> Iteration:
    """The mean over iterations with different jitter; one iteration if none jitters."""
    if cluster.jitter == 0 and not isinstance(schedule.launch, Stream):
        iterations = 1
    runs = [simulate(trace, cluster, schedule, iteration) for iteration in range(iterations)]
    varying = ("seconds", "device", "nbytes", "node_bytes", "waited", "collectives")
    means: dict[str, Any] = {name: fmean(getattr(run, name) for run in runs) for name in varying}
    return replace(runs[0], **means | {"collectives": round(means["collectives"])})


@dataclass(eq=False)
class _Arrival:
    at: float
    seconds: float  # of decoding it
    decoded: np.ndarray  # which workers have, bool [workers]


class _Run:
    """State of one iteration. Arrays are [workers], or [workers, L]."""

    def __init__(self, trace: Trace, cluster: Cluster, schedule: Schedule, iteration: int) -> None:
        self.trace, self.cluster, self.schedule = trace, cluster, schedule
        total = len(trace.tensors)
        # without jitter and with the same quotas all workers do the same at the same time
        alike = cluster.jitter == 0 and not isinstance(schedule.launch, Stream)
        self.workers = 1 if alike else cluster.workers
        pace, noise = cluster.draw_factors(iteration, self.workers, total)
        self.rng = np.random.default_rng([cluster.seed, 2, iteration])  # of the entries that thresholds select
        self.backward = np.array([tensor.backward for tensor in trace.tensors]) * pace[:, None] * noise
        self.select = schedule.select or [0.0] * total
        self.host_select = schedule.host_select or [0.0] * total
        self.selected = float(sum(self.select))
        self.clock = self._forward(pace)
        self.link_free = 0.0
        self.host_free, self.bus_free = np.zeros(self.workers), np.zeros(self.workers)
        self.ready = np.zeros((self.workers, total))
        self.sent = CollectiveCost()
        self.collectives = 0
        self.waited = 0.0
        self.first_busy = 0
        self.arrived: deque[_Arrival] = deque()  # in the order of the link, until all workers have decoded them
        self.decoded, self.end = 0.0, schedule.end

    def _forward(self, pace: np.ndarray) -> np.ndarray:
        """Of each worker, which waits for parameters that settle late."""
        clock, free, launched = np.zeros(self.workers), 0.0, 0.0
        settles = {message.last: message.settle for message in self.schedule.messages}
        for place in reversed(range(len(self.trace.tensors))):
            if (settle := settles.get(place)) is not None:
                # launched when the group before it begins its forward pass; the first, as soon as backward has ended
                free = max(free, launched) + settle.seconds
                clock = np.maximum(clock, free)
                launched = float(clock.max())
            clock = clock + self.trace.tensors[place].forward * pace
        return clock

    def _compute(self, place: int) -> None:
        if not self.cluster.device.processors:
            self._decode_arrived()
        self.clock = self.clock + self.backward[:, place]
        if self.host_select[place] > 0:
            copied = np.maximum(self.clock, self.bus_free)
            self.bus_free = copied + self.trace.tensors[place].numel * 4 / self.cluster.device.pcie
            self.host_free = np.maximum(self.bus_free, self.host_free) + self.host_select[place]
            self.ready[:, place] = self.host_free
        else:
            self.clock = self.clock + self.select[place]
            self.ready[:, place] = self.clock

    def _decode_arrived(self) -> None:
        for arrival in self.arrived:
            now = ~arrival.decoded & (arrival.at <= self.clock)
            if not now.any():
                break
            self.clock = self.clock + np.where(now, arrival.seconds, 0.0)
            arrival.decoded |= now
        while self.arrived and self.arrived[0].decoded.all():
            self.arrived.popleft()

    def _compute_all(self) -> None:
        for place in range(len(self.trace.tensors)):
            self._compute(place)

    def _send(self, message: Message, ready: np.ndarray, not_before: float = 0.0) -> None:
        """``ready``: when each worker could begin."""
        all_ready = max(float(ready.max()), not_before)
        self.waited += float((ready.max() - ready).mean())
        if all_ready > self.link_free:
            self.first_busy = min(message.tensors, default=0)
        self.link_free = max(all_ready, self.link_free) + message.cost.seconds
        if message.decode > 0:
            self.arrived.append(_Arrival(self.link_free, message.decode, np.zeros(self.workers, bool)))
        self.decoded += message.decode
        self.end += message.commit
        self.sent = self.sent + message.cost
        self.collectives += message.collectives

    def planned(self, messages: Sequence[Message]) -> None:
        waiting = deque(messages)
        while waiting and not waiting[0].tensors:
            self._send(waiting.popleft(), np.zeros(self.workers))
        for place in range(len(self.trace.tensors)):
            self._compute(place)
            while waiting and waiting[0].last <= place:
                message = waiting.popleft()
                ready = self.ready[:, list(message.tensors)].max(axis=1)
                if message.select > 0:
                    self.clock = self.clock + message.select
                    self.selected += message.select
                    ready = np.maximum(ready, self.clock)
                self._send(message, ready)
        for message in messages:
            if message.settle is not None:
                self.sent = self.sent + message.settle
                self.collectives += 1

    def timer(self, launch: Timer) -> None:
        self._compute_all()
        total = len(self.trace.tensors)
        everywhere = self.ready.max(axis=0)
        first = self.ready.min(axis=0)  # from then on a worker asks for it
        sent, cycle = 0, launch.policy.cycle_s
        now = cycle * ceil(float(first[0]) / cycle)
        while sent < total:
            end = now
            if first[sent] <= now:
                end += launch.negotiate
                stop = sent
                while stop < total and everywhere[stop] <= now:
                    stop += 1
                for begin, close in fuse_ready(launch.nbytes, sent, stop, launch.policy.threshold_bytes):
                    end += launch.launch
                    self._send(launch.message(range(begin, close)), self.ready[:, close - 1], end)
                sent = stop
            now = max(now + cycle, end, self.link_free)

    def stream(self, launch: Stream) -> None:
        self._compute_all()
        factors = lognormal(self.rng, launch.spread, (self.workers, len(self.trace.tensors)))
        limits = np.array(self.trace.numels)
        kept = np.clip(np.array(launch.entries) * factors, 1, limits).cumsum(axis=1)
        rounds = np.ceil(kept[:, -1] / launch.capacity).astype(int)
        for number in range(int(rounds.max())):
            # a buffer is closed by the tensor that fills it; a worker that has sent everything sends empty ones
            full = np.minimum((number + 1) * launch.capacity, kept[:, -1])
            closing = (kept < full[:, None]).sum(axis=1)
            self._send(launch.message, self.ready[np.arange(self.workers), closing])

    def result(self) -> Iteration:
        clock = self.clock
        for arrival in self.arrived:
            clock = np.where(arrival.decoded, clock, np.maximum(clock, arrival.at) + arrival.seconds)
        end = max(float(clock.max()), float(self.host_free.max()), self.link_free)
        return Iteration(
            end + self.end + self.trace.optimizer,
            self.trace.seconds,
            self.selected,
            self.selected + self.decoded + self.end,
            self.sent.nbytes,
            self.sent.node_bytes,
            self.collectives,
            self.waited,
            self.first_busy,
        )

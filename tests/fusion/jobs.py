"""A simulated job: its windows follow from the plan, the link and the computation; and what tests ask of plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from lab.virtual.transport import local_transports
from lightning_safusion.comm.cost import LINKS, LinearCost
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.events import BufferEvents, WindowEvents
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.fusion.plans.adaptive import Tuned
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.policy import FusionPolicy
from lightning_safusion.fusion.plans.pricing import predict_finish
from lightning_safusion.fusion.replan import Decision
from lightning_safusion.fusion.space import GradientSpace
from tests.cluster import settings, specs

WORKERS = 4  # of the simulated job; the planner itself runs alone, or on as many ranks as a test asks for
SHAPES = [(int(n),) for n in np.random.default_rng(2).lognormal(9, 2, 60)]
SELECT, DECODE = LinearCost(40e-6, 1e-10), LinearCost(40e-6, 1e-10)


@dataclass
class Job:
    """What a window of a known computation over a known link looks like to one rank.

    Args:
        link: Name of the link; may be changed.
        backward: Seconds from one gradient to the next.
        noise: Every duration is off by up to this share.
        hidden: Seconds that each sparse buffer costs after everything that is recorded.
        surprise: Factor by which an all-reduce takes longer than anybody could know.
        late: Seconds by which this rank begins before the one that all wait for.
    """

    link: str = "1gbit"
    backward: float = 5e-4
    noise: float = 0.0
    hidden: float = 0.0
    surprise: float = 1.0
    late: float = 0.0
    seed: int = 0
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    @property
    def lines(self) -> dict[str, LinearCost]:
        """Costs of the collectives."""
        return {
            "allgather": LINKS[self.link].allgather(WORKERS),
            "allreduce": LINKS[self.link].allreduce(WORKERS),
        }

    def true(self, costs: GroupCosts) -> GroupCosts:
        """The costs as they are, for what a planner believes of the same tensors."""
        gather, reduce = self.lines["allgather"], self.lines["allreduce"]
        ready = self.backward * np.arange(len(costs.numels)) + SELECT.per_byte * np.cumsum(costs.numels)
        ready = ready + DECODE.per_byte * np.cumsum(costs.sparse_bytes)
        return replace(
            costs,
            ready=tuple(ready.tolist()),
            sparse=(gather.fixed, gather.per_byte),
            dense=(reduce.fixed, reduce.per_byte),
            per_buffer=SELECT.fixed + DECODE.fixed,
        )

    def shaken(self, seconds: float) -> float:
        """A duration, disturbed."""
        return float(seconds * (1 + self.rng.uniform(-self.noise, self.noise)))

    def window(self, step: int, plan: Plan, costs: GroupCosts, space: GradientSpace) -> WindowEvents:
        """What happens in a window with ``plan``."""
        now = 1000.0 * (1 + self.seed) + step  # any origin: no two ranks have the same
        begin, free = now + self.late, 0.0
        ready, buffers, moment = np.empty(len(costs.numels)), [], begin
        for group in plan.groups:
            for place in range(group.start, group.stop):
                ready[place] = moment
                moment += self.shaken(self.backward)
            closed = ready[group.stop - 1]
            elements = sum(costs.numels[group.start : group.stop])
            launched = closed + self.shaken(SELECT(elements))
            moment += launched - closed
            sizes = costs.sparse_bytes if group.collective == "allgather" else costs.dense_bytes
            sent = round(sum(sizes[group.start : group.stop]))
            factor = self.surprise if group.collective == "allreduce" else 1.0
            free = max(free, launched) + factor * self.shaken(self.lines[group.collective](sent))
            places = range(group.start, group.stop)
            moments = (closed, launched, launched, launched, free, free, free)
            buffers.append(BufferEvents(places, group.collective, elements, elements, sent, 3 * sent, *moments, free))
        ready[0] -= self.late
        done, drained = [], 0.0
        for each in buffers:
            arrived = max(each.finished, drained, moment)
            drained = arrived + self.shaken(DECODE(each.bytes_sent))
            done.append(replace(each, awaited=arrived, arrived=arrived, decoded=drained))
        drained += self.hidden * sum(group.collective == "allgather" for group in plan.groups)
        return WindowEvents(step, 0.05, space.layout, ready, tuple(done), drained)


@dataclass
class Together(Job):
    """A rank of a job in which all end a window at once, and an exchange begins when the last rank has launched.

    Args:
        rank: This one; no two ranks' clocks agree.
        loading: Seconds of each rank from the end of a window to its first gradient in the next.
        paces: Seconds of each rank from one gradient to the next.
    """

    rank: int = 0
    loading: Sequence[float] = ()
    paces: Sequence[float] = ()
    ended: float = 0.0

    def window(self, step: int, plan: Plan, costs: GroupCosts, space: GradientSpace) -> WindowEvents:
        places = np.arange(len(costs.numels))
        ready = [self.ended + early + pace * places for early, pace in zip(self.loading, self.paces, strict=True)]
        free, buffers, off = 0.0, [], 1000.0 * self.rank
        for group in plan.groups:
            launched = [own[group.stop - 1] for own in ready]
            sent = round(sum(costs.sparse_bytes[group.start : group.stop]))
            free = max(free, *launched) + self.lines["allgather"](sent)
            elements = sum(costs.numels[group.start : group.stop])
            moments = (*[launched[self.rank]] * 4, free, ready[self.rank][-1], free, free)
            own = (range(group.start, group.stop), group.collective, elements, elements, sent, 3 * sent)
            buffers.append(BufferEvents(*own, *(off + moment for moment in moments)))
        self.ended = free
        return WindowEvents(step, 0.05, space.layout, off + ready[self.rank], tuple(buffers), off + free)


class Rank:
    """One rank of the job with a planner of its own."""

    def __init__(
        self,
        policy: FusionPolicy,
        job: Job,
        transport: Transport | None = None,
        collective: Any = "allgather",
        yields: bool = False,
    ) -> None:
        self.job, self.policy = job, policy
        self.transport = transport or local_transports(1)[0]
        engine = build_engine(settings(), specs(SHAPES), self.transport, torch.device("cpu"), JobTraits(measure=False))
        self.space = engine.space
        self.space.set_density(0.05)
        self.planner = Planner(policy, self.transport, collective, job.lines, yields=yields)
        self.plans: list[Plan] = []
        self.timed: list[bool] = []

    @property
    def plan(self) -> Plan:
        """Of the next window."""
        return self.planner.plan(self.space.shape)

    @property
    def costs(self) -> GroupCosts:
        """What the planner believes."""
        return self.planner.costs(self.space.shape)

    @property
    def true(self) -> GroupCosts:
        return self.job.true(self.costs)

    @property
    def finish(self) -> float:
        """When the last exchange of the plan in use ends, without noise, over the best static plan's end."""
        policy = self.policy.policy if isinstance(self.policy, Tuned) else self.policy
        return predict_finish(self.plan, self.true) / predict_finish(policy.resized(self.true), self.true)

    def run(self, windows: int) -> list[Decision]:
        """Runs windows; returns the decisions made in them."""
        made = []
        for _ in range(windows):
            plan = self.plan
            self.timed.append(self.planner.wants_times)
            events = self.job.window(len(self.plans), plan, self.true, self.space)
            before = len(self.planner.decisions)
            self.planner.observe(events, self.space.shape)
            made += list(self.planner.decisions)[before:]
            self.planner.decisions.clear()
            self.plans.append(plan)
        return made


def actions(decisions: Sequence[Decision]) -> list[str]:
    return [decision.action for decision in decisions]


def resumed(rank: Rank) -> Rank:
    """The job in a new process, from its checkpoint."""
    again = Rank(rank.policy, rank.job, collective=rank.planner.collective)
    again.planner.load_state_dict(json.loads(json.dumps(rank.planner.state_dict())), again.space.shape)
    again.plans = list(rank.plans)
    return again


def stops_of(plan: Plan) -> list[int]:
    return [group.stop for group in plan.groups]


def counts(plan: Plan) -> list[int]:
    """Tensors of each buffer."""
    return [group.stop - group.start for group in plan.groups]

"""The Planner: keeps the plan in use, feeds the policy with agreed costs, and changes the plan between windows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from lightning_safusion.comm.cost import CollectiveChoice, LinearCost
from lightning_safusion.comm.transport.interface import Transport, during
from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.fusion.plans.cadence import Cadence, ReplanSchedule
from lightning_safusion.fusion.plans.costs import GroupCosts, JobShape, ddp_buckets, predict_plain_ddp
from lightning_safusion.fusion.plans.plan import CollectiveName, Group, Plan
from lightning_safusion.fusion.plans.policy import CutSearch, FusionPolicy
from lightning_safusion.fusion.plans.pricing import GroupPricer, predict_finish
from lightning_safusion.fusion.plans.profile import AgreedProfile, job_costs
from lightning_safusion.fusion.plans.ticking import Horovod
from lightning_safusion.fusion.recorder import RECENT_WINDOWS, ProfileRecorder, WindowSpans
from lightning_safusion.fusion.replan import Action, Decision, Review, Trial, Trials, predicted_gain
from lightning_safusion.fusion.slowest import OwnTimes, SlowestWorker
from lightning_safusion.literal import plural

_DECISIONS = 512  # latest ones that are kept
_AGREEING = "a step, when workers agree on a plan"


class Planner:
    """Makes plans from numbers that all ranks have agreed on, so that their plans are equal.

    Args:
        policy: Cuts the ready order.
        transport: Communicator for the agreements (between windows only).
        collective: ``"auto"`` lets each buffer take what is predicted to be cheaper.
        prior: Costs of ``"allgather"`` and ``"allreduce"`` before anything else was measured, equal on all ranks; None
            plans with modelled costs and never with measured ones (a seeded run then repeats bit for bit).
        announce: Called with a line when buffers take other collectives, or a slow worker was found.
        yields: Plain DDP may replace the engine if that is faster.
        hosts: Names of the workers' hosts by rank; empty if they are not known.
    """

    def __init__(
        self,
        policy: FusionPolicy,
        transport: Transport,
        collective: CollectiveChoice = "auto",
        prior: Mapping[str, LinearCost] | None = None,
        announce: Callable[[str], None] | None = None,
        yields: bool = False,
        hosts: Sequence[str] = (),
    ) -> None:
        self.policy = policy
        self.transport = transport
        self.collective = collective
        self.prior = prior
        self.current: Plan | None = None  #: in use; None before the first plan and after :meth:`invalidate`
        self.replans = 0  #: changes of the plan: buffers of the plan before are not used any more
        self.opening = False  #: the latest window sends more than later ones (the engine sets it): plain DDP waits
        self.latest: Review | None = None  #: that had measured windows
        self._announce = announce
        self._announced: tuple[bool, bool] | None = None  # whether dense and sparse buffers were in the latest line
        schedule = policy.schedule() if prior is not None else None
        self._schedule = schedule or ReplanSchedule(Cadence(freeze_after=0))
        self.decisions: deque[Decision] = deque(maxlen=_DECISIONS)  #: oldest first; the same on all ranks
        self._profile: AgreedProfile | None = None
        self._recorder: ProfileRecorder | None = None
        self._search: CutSearch | None = None
        self._tick_costs: GroupCosts | None = None  # of :meth:`fuse`
        self._spans = WindowSpans(self._schedule.cadence.trial_windows)
        self._verified = True
        self._trials = Trials(yields)
        self.slowest = SlowestWorker(hosts, announce)  #: the worker that the others wait for, by the reviews
        self._own = OwnTimes(transport.rank, transport.world_size)

    @property
    def dense_for_good(self) -> bool:
        """Whether some reviews in a row have found every buffer dense, or plain DDP faster; the same on all ranks."""
        return self._trials.agreed

    @property
    def wants_times(self) -> bool:
        """Whether a decision needs the times of the collectives of the next window; the same on all ranks."""
        if self._search is not None:
            return not self._search.over
        ahead = max(RECENT_WINDOWS, self._schedule.cadence.trial_windows + 1)
        return self.on_trial or self._schedule.due_within(ahead)

    @property
    def on_trial(self) -> bool:
        """Whether a plan, or plain DDP, is tried out; the same on all ranks."""
        return self._trials.trial is not None and not self._trials.agreed

    def plan(self, shape: JobShape) -> Plan:
        """The plan of the next window."""
        if self.current is None:
            self.current = self._make(self.costs(shape))
            self._verified = False
            self._describe(self.current, shape)
        return self.current

    def invalidate(self, order_changed: bool = False) -> None:
        """Drops the plan: quotas have changed, or the order (then measured times are dropped as well)."""
        self.current = self._search = self._tick_costs = None
        self._trials.drop()
        self._spans.restart()
        on_trial = self._schedule.cadence.on_trial
        if order_changed:
            self._profile = self._recorder = self._trials.broken = None
            if not on_trial:
                self._schedule.windows = 0  # the one plan was made for another order
        if self.opening and on_trial:
            self._schedule.windows = 0  # plans are reviewed often again; under a ramp they would never be

    def fuse(self, shape: JobShape, start: int, stop: int) -> list[Group]:
        """The buffers of the tensors at places ``[start, stop)``, which a tick has found ready on all ranks."""
        self._tick_costs = self._tick_costs or self.costs(shape)
        return cast("Horovod", self.policy).fuse(self._tick_costs, start, stop)  # no other policy has ticks

    def fallback(self, shape: JobShape, sparse: bool = False) -> CollectiveName:
        """The collective for tensors that no plan covers; ``sparse``: at any cost, if there is something to select."""
        costs = self.costs(shape)
        if sparse and costs.sparse_allowed:
            costs = replace(costs, dense_allowed=False)
        return GroupPricer(costs).choose(0, len(costs.numels))

    def _make(self, costs: GroupCosts) -> Plan:
        if self.policy.streams and costs.sparse_allowed:
            return Plan.from_stops(range(1, len(costs.numels) + 1), "stream")
        if self._search is None and self.prior is not None and costs.numels:
            self._begin_search(len(costs.numels))
        if self._search is not None:
            return GroupPricer(costs).plan(self._search.stops)
        plan = self.policy.plan(costs) if self._profile is None else self.policy.resized(costs)
        return _checked(plan, self.policy, len(costs.numels))

    def _begin_search(self, tensors: int, measured: Sequence[float] = ()) -> None:
        self._search = self.policy.search(tensors)
        if self._search is not None:
            self._search.replay(measured)
            self._spans = WindowSpans(self._search.windows)

    def costs(self, shape: JobShape) -> GroupCosts:
        """The costs by what is agreed now; a pure function of that and of the quotas."""
        return job_costs(shape, self.collective, self._profile, self.prior)

    def observe(self, events: WindowEvents | None, shape: JobShape) -> None:
        """Records a planned window that has ended; may agree on a new plan. Called at the same point on all ranks.

        ``events``: None, on all ranks, if times were not recorded.

        Raises:
            RuntimeError: If ranks hold different plans.
        """
        if not self._verified:
            self.verify(shape.device)
        if events is not None:
            self._own.add(events)
        if self._search is not None:
            self._search_on(self._search, events, shape)
            return
        if self.prior is None or self._schedule.cadence.freeze_after == 0 or self._trials.agreed:
            return
        if self._recorder is None:
            # the first window sets up communicators and warms up kernels: its times are not those of the others
            self._recorder = ProfileRecorder(len(shape))
        elif events is not None:
            self._recorder.record(events)
            self._spans.add(events)
        due = self._schedule.advance()
        if self.on_trial:
            due = self._spans.full  # no review before the trial has ended
        if self.current is None or self._recorder.windows < 2:
            return
        if due:
            with during(_AGREEING):
                self._profile = self._recorder.agree(self.transport, self.prior, shape.device, self._profile)
                self._review(self.current, shape, self.prior)
        if self._schedule.windows == self._schedule.cadence.freeze_after:
            self._decide("freeze", self.current, shape)

    def _search_on(self, search: CutSearch, events: WindowEvents | None, shape: JobShape) -> None:
        if search.over or events is None:
            return
        self._spans.add(events)
        if not self._spans.full:
            return
        with during(_AGREEING):
            seconds = self._agree_window(shape.device)
            self._spans.restart()
            if math.isfinite(seconds):  # a plan without measured windows is tried again
                search.replay([seconds])
            plan = GroupPricer(self.costs(shape)).plan(search.stops)
            self._decide("freeze" if search.over else "try", plan, shape, seconds=seconds)

    def _agree_window(self, device: str) -> float:
        seconds, times = self._spans.agree_median(self.transport, device, self._own.to_vector())
        self.slowest.review(times)
        return seconds

    def _review(self, current: Plan, shape: JobShape, prior: Mapping[str, LinearCost]) -> None:
        """Ends the trial if there is one; changes to the plan that the agreed costs call for, if it promises enough."""
        costs, seconds = self.costs(shape), self._agree_window(shape.device)
        review = Review(seconds, predict_plain_ddp(costs, prior["allreduce"]))
        if math.isfinite(seconds):
            self.latest = review
        trial = self._trials.trial
        if trial is not None and not self._end_trial(trial, current, seconds, shape):
            return
        sparse = any(group.collective != "allreduce" for group in current.groups)
        if sparse and not self.opening and self._trials.plain_ddp_due(review):
            self._trials.trial = Trial(current, seconds)
            plan = GroupPricer(replace(costs, sparse_allowed=False)).plan(ddp_buckets(costs.dense_bytes))
            self._decide("dense", plan, shape, seconds=seconds)
            return
        proposed = current if self._schedule.over else self._make(costs)
        gain = predicted_gain(current, proposed, costs)
        if not self._schedule.cadence.on_trial:
            self._decide("stay" if proposed == current else "switch", proposed, shape, seconds=seconds)
        elif gain > self._trials.required(current, costs, self._schedule.threshold):
            if math.isfinite(seconds) and math.isfinite(gain):  # else the change is for good
                self._trials.trial = Trial(current, seconds, gain, predict_finish(current, costs))
            self._decide("switch", proposed, shape, predicted=gain, seconds=seconds)
        else:
            self._decide("stay", current, shape, proposed, predicted=gain, seconds=seconds)
            self._trials.count_dense(not sparse and costs.sparse_allowed and not self.opening)

    def _end_trial(self, trial: Trial, current: Plan, seconds: float, shape: JobShape) -> bool:
        stays, saved = self._trials.judge(trial, seconds)
        numbers = {"predicted": trial.promised, "measured": saved, "seconds": seconds}
        if stays:
            self._decide("keep", current, shape, current if self._trials.agreed else trial.previous, **numbers)
        else:
            self._decide("revert", trial.previous, shape, current, **numbers)
        return stays and not self._trials.agreed

    def keep_engine(self, shape: JobShape) -> None:
        """Plain DDP does not replace the engine now; its next trial needs more reviews. Collective; between windows."""
        trial = self._trials.trial
        self._trials.decline()
        if trial is not None:
            self._decide("revert", trial.previous, shape)

    def use(self, plan: Plan, shape: JobShape) -> None:
        """Changes to this plan, the same on all ranks, until costs call for another. Collective; between windows."""
        self._trials.drop()
        self._change(plan, shape)
        self.verify(shape.device)

    def _change(self, plan: Plan, shape: JobShape) -> None:
        self.current = plan
        self.replans += 1
        self._spans.restart()
        self._describe(plan, shape)

    def _decide(
        self, action: Action, plan: Plan, shape: JobShape, rival: Plan | None = None, **numbers: float | None
    ) -> None:
        """Changes to a plan, unless it is in use, and records why; by default its rival is the one in use before."""
        before = self.current or plan
        if plan != before:
            self._change(plan, shape)
        self.verify(shape.device)  # whether or not it has changed here: it may have elsewhere
        known = {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}
        rivals = len((rival or before).groups)
        self.decisions.append(Decision(self._schedule.windows, action, len(plan.groups), rivals, **known))

    def _describe(self, plan: Plan, shape: JobShape) -> None:
        """Announces which collectives a plan uses, once for each combination, so that a dense run is recognised."""
        dense = sum(group.collective == "allreduce" for group in plan.groups)
        sparse = len(plan.groups) - dense
        kinds = (dense > 0, sparse > 0)
        if self._announce is None or kinds == self._announced:
            return
        self._announced = kinds
        buffers = plural(len(plan.groups), "buffer")
        text = f"{plan.num_tensors} tensors travel in {buffers}, {sparse} sparse and {dense} dense"
        if dense and self.collective == "auto" and not shape.all_dense:
            text += "; dense ones are predicted to be faster here (collective='allgather' sends every buffer sparse)"
        self._announce(text)

    def verify(self, device: str) -> None:
        """Checks that all ranks hold the same plan. Collective; waits for the device."""
        if self.current is None:
            return
        digest = self.current.digest
        bounds = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
        with during(_AGREEING):
            self.transport.all_reduce(bounds, "max").wait()
        if bounds.tolist() != [digest, -digest]:
            raise RuntimeError(
                f"rank {self.transport.rank} holds a fusion plan with hash {digest:#x} that another rank does not "
                f"have: policy {self.policy!r} is not a pure function of the costs"
            )
        self._verified = True

    def state_dict(self) -> dict[str, Any]:
        """Plan, agreed costs and decisions under way: plain values, the same on all ranks, without measured times."""
        trial = self._trials.trial
        plan = trial.previous if trial is not None and trial.promised is None else self.current
        return {
            "plan": None if plan is None else plan.to_list(),
            "profile": None if self._profile is None else self._profile.to_vector().tolist(),
            "replans": self.replans,
            "schedule": {"windows": self._schedule.windows},
            **self._trials.state_dict(),
            "search": None if self._search is None else self._search.measured,
        }

    def load_state_dict(self, state: dict[str, Any], shape: JobShape) -> None:
        """Restores what :meth:`state_dict` returned; the layout must have the order it was made for.

        Raises:
            ValueError: If the plan is of another number of tensors.
        """
        self.current, self._recorder, self._profile = None, None, None
        self._spans.restart()
        self.replans = int(state["replans"])
        self._schedule.windows = int(state["schedule"]["windows"])
        if state["profile"] is not None:
            self._profile = AgreedProfile.from_vector(np.array(state["profile"]))
        elif not self._schedule.cadence.on_trial:
            self._schedule.windows = 0  # times measured for the one plan are not in the checkpoint
        if state["plan"] is not None:
            plan = Plan.from_list(state["plan"])
            if plan.num_tensors != len(shape):
                raise ValueError(f"the plan is of {plan.num_tensors} tensors, the model has {len(shape)}")
            self.current, self._verified = plan, False
            self._describe(plan, shape)
        self._trials.load_state_dict(state)
        self._search = None
        if (measured := state.get("search")) is not None:
            self._begin_search(len(shape), measured)


def _checked(plan: object, policy: FusionPolicy, tensors: int) -> Plan:
    """What a policy, which may be one of a user's, has made for so many tensors."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"the grouping {policy!r} has to return a Plan, as of GroupPricer(costs).plan(stops), got {plan!r:.80} of "
            f"type {type(plan).__name__}"
        )
    if plan.num_tensors != tensors:
        raise ValueError(f"the grouping {policy!r} has made a plan of {plan.num_tensors} tensors, there are {tensors}")
    return plan

"""The Planner: keeps the plan in use, feeds the policy with agreed costs, and changes the plan between windows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lightning_safusion.comm.cost import CollectiveChoice, LinearCost
from lightning_safusion.comm.transport.interface import Transport, during
from lightning_safusion.fusion.announcer import Announcer
from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.fusion.handover import Handover
from lightning_safusion.fusion.plans.adaptive import predicted_gain
from lightning_safusion.fusion.plans.cadence import Cadence, ReplanSchedule
from lightning_safusion.fusion.plans.costs import GroupCosts, JobShape, ddp_buckets
from lightning_safusion.fusion.plans.plan import CollectiveName, Group, Plan
from lightning_safusion.fusion.plans.policy import FusionPolicy, Single
from lightning_safusion.fusion.plans.pricing import GroupPricer
from lightning_safusion.fusion.plans.profile import AgreedProfile, job_costs
from lightning_safusion.fusion.plans.ticking import Horovod
from lightning_safusion.fusion.recorder import RECENT_WINDOWS, ProfileRecorder, agree, record_events
from lightning_safusion.fusion.replan import Action, Decision, Trials
from lightning_safusion.fusion.search import TimedSearch
from lightning_safusion.fusion.spans import WindowSpans

# Decisions that are kept for whoever wants to know.
_DECISIONS = 512

# All windows feed one profile: a tensor that a window leaves stale has no arrival in it.
_KIND = "all"

_AGREEING = "a step, when workers agree on a plan"


class Planner:
    """Makes plans from what all ranks have agreed on, so that all make the same.

    Args:
        policy: Cuts the ready order.
        transport: Communicator for the agreements (between windows only).
        collective: ``"auto"`` lets each buffer take what is predicted to be cheaper.
        prior: Costs of ``"allgather"`` and ``"allreduce"`` before anything else was measured, equal on all ranks; None
            plans with modelled costs and never with measured ones (a seeded run then repeats bit for bit).
        announce: Told in one line what travels how, whenever that changes.
        yields: Plain DDP may do the rest of the job if that is faster.

    Attributes:
        decisions: The latest decisions, oldest first; the same on all ranks.
        replans: Changes of the plan: buffers of the plan before are of no use any more.
    """

    def __init__(
        self,
        policy: FusionPolicy,
        transport: Transport,
        collective: CollectiveChoice = "auto",
        prior: Mapping[str, LinearCost] | None = None,
        announce: Callable[[str], None] | None = None,
        yields: bool = False,
    ) -> None:
        self.policy = policy
        self.transport = transport
        self.collective = collective
        self.prior = prior
        self.current: Plan | None = None
        self.replans = 0
        self._announcer = Announcer(announce)
        schedule = policy.schedule() if prior is not None else None
        self._schedule = schedule or ReplanSchedule(Cadence(freeze_after=0))
        self.decisions: deque[Decision] = deque(maxlen=_DECISIONS)
        self._profile: AgreedProfile | None = None
        self._recorder: ProfileRecorder | None = None
        self._trials = Trials()
        self._search: TimedSearch | None = None
        self._fusing: GroupCosts | None = None  # what buffers are fused by, until it changes
        self._spans = WindowSpans(self._schedule.cadence.trial_windows)
        self._verified = True
        self._handover = Handover(yields)

    @property
    def dense_for_good(self) -> bool:
        """Whether measured times have put every buffer on the dense all-reduce, or plain DDP ahead, for some reviews.

        The same on all ranks.
        """
        return self._handover.agreed

    @property
    def wants_times(self) -> bool:
        """Whether a decision needs to know when the collectives of the next window end; the same on all ranks."""
        ahead = max(RECENT_WINDOWS, self._schedule.cadence.trial_windows + 1)
        if self._search is not None:
            return not self._search.search.over
        return self._on_trial or self._schedule.due_within(ahead)

    @property
    def _on_trial(self) -> bool:
        return self._trials.pending is not None or self._handover.on_trial

    def plan(self, shape: JobShape) -> Plan:
        """The plan of the next window."""
        if self.current is None:
            self.current = self._make(self.costs(shape))
            self._verified = False
            self._tell(self.current, shape)
        return self.current

    def invalidate(self, order_changed: bool = False) -> None:
        """Drops the plan: quotas have changed, or the order (then measured times are void too)."""
        self.current = self._search = self._fusing = None
        self._handover.drop()
        self._trials.drop()
        self._spans.restart()
        if order_changed:
            self._profile = self._recorder = None
            self._trials.reset()
            if not self._schedule.cadence.on_trial:
                self._schedule.restart()  # the one plan was made for another order

    def fuse(self, shape: JobShape, start: int, stop: int) -> list[Group]:
        """The buffers of tensors that a timer-driven policy has found ready on all ranks.

        Raises:
            TypeError: If the policy is another one.
        """
        if not isinstance(self.policy, Horovod):
            raise TypeError(f"fusion={self.policy.name!r} has a plan, and fuses nothing at the ticks of a clock")
        if self._fusing is None:
            self._fusing = self.costs(shape)
        return self.policy.fuse(self._fusing, start, stop)

    def fallback(self, shape: JobShape, sparse: bool = False) -> CollectiveName:
        """The collective for tensors that no plan covers.

        Args:
            shape: Sizes and quotas of the tensors.
            sparse: Whatever it costs, where there is something to select.
        """
        costs = self.costs(shape)
        if sparse and costs.sparse_allowed:
            costs = replace(costs, dense_allowed=False)
        return Single().plan(costs).groups[0].collective

    def _make(self, costs: GroupCosts) -> Plan:
        if self.policy.streams and costs.sparse_allowed:
            return Plan(tuple(Group(place, place + 1, "stream") for place in range(len(costs.numels))))
        if self._search is None and self.prior is not None and costs.numels:
            self._search = self._searching(len(costs.numels))
        if self._search is not None:
            return GroupPricer(costs).plan(self._search.search.stops)
        return self.policy.plan(costs) if self._profile is None else self.policy.resized(costs)

    def _searching(self, tensors: int) -> TimedSearch | None:
        search = self.policy.search(tensors)
        return None if search is None else TimedSearch(search)

    def costs(self, shape: JobShape) -> GroupCosts:
        """The agreed numbers as they stand; a pure function of them and of the quotas."""
        return job_costs(shape, self.collective, self._profile, self.prior)

    def observe(self, events: WindowEvents | None, shape: JobShape) -> None:
        """Takes in a planned window that has ended; may agree on a new plan. Called at the same point on all ranks.

        Args:
            events: What happened in it; None, on all ranks, if that was not taken down.
            shape: Sizes and quotas of the tensors.

        Raises:
            RuntimeError: If ranks hold different plans.
        """
        if not self._verified:
            self.verify(shape.device)
        if self._search is not None:
            with during(_AGREEING):
                self._try_next(self._search, events, shape)
        if self.prior is None or self._schedule.cadence.freeze_after == 0 or self._handover.agreed:
            return
        if self._recorder is None:
            # the first windows set up communicators and warm up kernels; their times say nothing of the rest
            self._recorder = ProfileRecorder(len(shape))
        elif events is not None:
            record_events(self._recorder, _KIND, events)
            self._spans.add(events)
        due = self._schedule.advance()
        if self._on_trial:
            due = self._spans.full  # no review before the verdict
        if self.current is None or self._recorder.windows(_KIND) < 2:
            return
        if due:
            with during(_AGREEING):
                known = self._profile
                self._profile = agree(self._recorder, self.transport, _KIND, self.prior, shape.device, known=known)
                self._review(self.current, shape)
        if self._schedule.windows == self._schedule.cadence.freeze_after:
            self._decide("freeze", self.current, self.current)

    def _review(self, current: Plan, shape: JobShape) -> None:
        """Ends the trial if there is one; changes to the plan that the agreed costs call for, if it promises enough."""
        seconds = self._spans.agree_median(self.transport, shape.device)
        costs = self.costs(shape)
        if self._handover.on_trial:
            self._hand_over(current, seconds, shape)
            return
        if self._trials.pending is not None and not self._judge(current, seconds, shape):
            return
        sparse = any(group.collective != "allreduce" for group in current.groups)
        if sparse and self.prior is not None and self._handover.due(costs, self.prior["allreduce"], seconds):
            self._handover.begin(current, seconds)
            plan = GroupPricer(replace(costs, sparse_allowed=False)).plan(ddp_buckets(costs.dense_bytes))
            self._change(plan, shape)
            self._decide("dense", plan, current, None, None, seconds)
            return
        proposed = current if self._schedule.over else self._make(costs)
        if not self._schedule.cadence.on_trial:
            self._adopt(proposed, current, seconds, shape)
            return
        gain = predicted_gain(current, proposed, costs)
        if gain <= self._trials.required(current, costs, self._schedule.threshold):
            self._decide("stay", current, proposed, gain, None, seconds)
            self._handover.count_dense(not sparse and costs.sparse_allowed)
            return
        self._change(proposed, shape)
        self._trials.begin(current, costs, gain, seconds)
        self._decide("switch", proposed, current, gain, None, seconds)

    def _hand_over(self, current: Plan, seconds: float, shape: JobShape) -> None:
        """Leaves the rest to plain DDP if dense windows are as short as was predicted, or goes back."""
        gain = self._handover.judge(seconds)
        if self._handover.agreed:
            self._decide("keep", current, current, None, gain, seconds)
        else:
            self.go_on(shape, gain, seconds)

    def go_on(self, shape: JobShape, gain: float | None = None, seconds: float | None = None) -> None:
        """Does without plain DDP, for a while at least. Collective; between windows.

        Args:
            shape: Sizes and quotas of the tensors.
            gain: Share of a window that everything dense has saved, if that was tried.
            seconds: Median window of the trial.
        """
        tried, previous = self.current, self._handover.decline()
        if tried is not None and previous is not None:
            self._change(previous, shape)
            self._decide("revert", previous, tried, None, gain, seconds)

    def _adopt(self, proposed: Plan, current: Plan, seconds: float, shape: JobShape) -> None:
        """Uses a plan whatever it promises."""
        if proposed != current:
            self._change(proposed, shape)
        self._decide("stay" if proposed == current else "switch", proposed, current, None, None, seconds)

    def _try_next(self, timed: TimedSearch, events: WindowEvents | None, shape: JobShape) -> None:
        """Takes a window into the search; goes on with the next plan, or with the best one in the end."""
        search = timed.search
        if search.over or events is None or self.current is None or not timed.add(events):
            return
        tried, seconds = self.current, timed.advance(self.transport, shape.device)
        plan = GroupPricer(self.costs(shape)).plan(search.stops)
        if plan != tried:
            self._change(plan, shape)
        self._decide("freeze" if search.over else "try", plan, tried, None, None, seconds)

    def _judge(self, current: Plan, seconds: float, shape: JobShape) -> bool:
        """Keeps the plan on trial, or goes back; returns whether it was kept."""
        trial, gain = self._trials.judge(seconds)
        if gain > 0:
            self._decide("keep", current, trial.previous, trial.promised, gain, seconds)
            return True
        self._change(trial.previous, shape)
        self._decide("revert", trial.previous, current, trial.promised, gain, seconds)
        return False

    def use(self, plan: Plan, shape: JobShape) -> None:
        """Goes on with this plan, the same on all ranks, until costs call for another. Collective; between windows."""
        self._trials.drop()
        self._handover.drop()
        self._change(plan, shape)

    def _change(self, plan: Plan, shape: JobShape) -> None:
        self.current = plan
        self.replans += 1
        self._spans.restart()
        self._tell(plan, shape)
        self.verify(shape.device)

    def _decide(self, action: Action, plan: Plan, rival: Plan, *numbers: float | None) -> None:
        """Notes a decision that has been carried out: predicted and measured gain, and the median window."""
        known = [None if number is None or not math.isfinite(number) else number for number in numbers]
        counts = len(plan.groups), len(rival.groups)
        self.decisions.append(Decision(self._schedule.windows, action, *counts, *known))

    def _tell(self, plan: Plan, shape: JobShape) -> None:
        self._announcer.tell(plan, self.collective == "auto" and not shape.all_dense)

    def verify(self, device: str) -> None:
        """Checks that all ranks hold the same plan. Collective; waits for the device.

        Args:
            device: Where the gradients live, as torch writes it.

        Raises:
            RuntimeError: If another rank holds another plan.
        """
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
        """Where the tuning stands: plain values, the same on all ranks; what it measured since is left out."""
        plan = self._handover.previous or self.current
        return {
            "plan": None if plan is None else plan.to_list(),
            "profile": None if self._profile is None else self._profile.to_vector().tolist(),
            "replans": self.replans,
            "schedule": self._schedule.state_dict(),
            "trials": self._trials.state_dict(),
            "handover": self._handover.state_dict(),
            "search": None if self._search is None else self._search.search.measured,
        }

    def load_state_dict(self, state: dict[str, Any], shape: JobShape) -> None:
        """Restores what :meth:`state_dict` returned; the layout must have the order it was made for.

        Raises:
            ValueError: If the plan is of another number of tensors.
        """
        self.current, self._recorder, self._profile = None, None, None
        self._spans.restart()
        self.replans = int(state["replans"])
        self._schedule.load_state_dict(state["schedule"])
        if state["profile"] is not None:
            self._profile = AgreedProfile.from_vector(np.array(state["profile"]))
        elif not self._schedule.cadence.on_trial:
            self._schedule.restart()  # what the one plan was to be made from has not outlived the job
        if state["plan"] is not None:
            plan = Plan.from_list(state["plan"])
            if plan.num_tensors != len(shape):
                raise ValueError(f"the plan is of {plan.num_tensors} tensors, the model has {len(shape)}")
            self.current, self._verified = plan, False
            self._tell(plan, shape)
        self._trials.load_state_dict(state["trials"])
        if "handover" in state:  # older checkpoints have none
            self._handover.load_state_dict(state["handover"])
        self._search = None
        if (measured := state.get("search")) is not None:
            self._search = self._searching(len(shape))
            if self._search is not None:
                self._search.search.replay(measured)

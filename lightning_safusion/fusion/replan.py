"""When the plan changes, and when plain DDP replaces the engine. Pure: all ranks decide alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion.plans.costs import GroupCosts, predict_plain_ddp
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.pricing import predict_finish

# Reviews in a row that must find every buffer dense, or plain DDP faster.
_REVIEWS = 3
# Share of a window that plain DDP must save: the change is final.
_GAIN = 0.03
#: Share by which the engine's dense windows may be longer than those before: DDP has less work besides the exchange.
LENIENCE = 0.1
# After a trial of plain DDP that failed, so many times as many reviews are needed.
_PATIENCE = 4

Action = Literal["stay", "switch", "dense", "keep", "revert", "freeze", "try"]


@dataclass(frozen=True)
class Decision:
    """Result of a review; the same on all ranks.

    Args:
        window: Planned windows before it.
        action: ``"stay"``: no plan promises enough. ``"switch"``: to another plan, on trial. ``"dense"``: every buffer
            is dense, on trial, since plain DDP is predicted to be faster. ``"keep"``: the trial has succeeded.
            ``"revert"``: it has failed, or a residual remains, and the plan before is back. ``"freeze"``: the plan
            stays from now on. ``"try"``: a search measures another plan.
        buffers: Buffers of the plan in force from here on.
        rival: Buffers of the plan it was compared with.
        predicted: Share of the backward pass and exchange that the newer of both plans saves by the costs of the
            review that proposed it; None where ``action`` is ``"freeze"``.
        measured: Share that it saved by the clock; None before that is known.
        seconds: Median window (first gradient to last mean) with the plan in force before the decision; None if no
            window was measured.
    """

    window: int
    action: Action
    buffers: int
    rival: int
    predicted: float | None = None
    measured: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Review:
    """What a review has measured and predicted; the same on all ranks.

    Args:
        seconds: Median window, from the first gradient to the last mean.
        plain_ddp: The same under plain DDP, by prediction.
    """

    seconds: float
    plain_ddp: float


def predicted_gain(current: Plan, proposed: Plan, costs: GroupCosts) -> float:
    """Share of the time to the end of the last exchange that ``proposed`` saves.

    Args:
        current: The plan in use.
        proposed: What the policy would use now.
        costs: The agreed numbers that both are compared with.

    Returns:
        At most 1; infinite when ``current`` no longer fits: it covers other tensors, or uses a collective that is not
        allowed.
    """
    if current == proposed:
        return 0.0
    allowed = {"allgather": costs.sparse_allowed, "allreduce": costs.dense_allowed}
    fits = all(allowed.get(group.collective, False) for group in current.groups)
    if current.num_tensors != proposed.num_tensors or not fits:
        return math.inf
    finish = predict_finish(current, costs)
    return 1.0 - predict_finish(proposed, costs) / finish if finish > 0 else 0.0


def plain_ddp_window(costs: GroupCosts, allreduce: LinearCost) -> float:
    """Seconds that a window is predicted to take under plain DDP.

    Args:
        costs: The agreed numbers.
        allreduce: As it was calibrated. What a job of sparse buffers measures of an all-reduce says little of one of
            the whole model, which is a hundred times as large.
    """
    return predict_plain_ddp(replace(costs, dense=(allreduce.fixed, allreduce.per_byte)))


@dataclass(frozen=True)
class Trial:
    """A plan in use whose gain is not measured yet.

    Args:
        previous: The plan before it.
        promised: Predicted gain.
        finish: What the costs predicted for ``previous`` when its own exchanges were measured.
        seconds: Median window with ``previous``.
    """

    previous: Plan
    promised: float
    finish: float
    seconds: float


@dataclass(frozen=True)
class BrokenPromise:
    """A predicted gain that was not measured.

    Args:
        promised: Predicted gain.
        measured: Measured gain, 0 or less.
        finish: What the costs predicted at that time for the plan before.
    """

    promised: float
    measured: float
    finish: float


class Trials:
    """Decides on changes of the plan, by prediction first and then by the clock.

    A predicted gain puts a plan on trial; it is kept if the windows with it are shorter than those before. A broken
    promise shows how wrong the costs are here, for that plan and for similar ones: another change must promise more
    than that error, until the costs have changed by more than was promised. The threshold is added to both.
    """

    def __init__(self) -> None:
        self.pending: Trial | None = None
        self.broken: BrokenPromise | None = None

    def required(self, current: Plan, costs: GroupCosts, threshold: float) -> float:
        """The predicted gain that a change must exceed now; ``current`` fits the costs if a promise was broken."""
        if self.broken is not None:
            now, then = predict_finish(current, costs), self.broken.finish
            if max(now, then) > (1.0 + self.broken.promised + threshold) * min(now, then):
                self.broken = None
        return threshold if self.broken is None else self.broken.promised - self.broken.measured + threshold

    def begin(self, previous: Plan, costs: GroupCosts, promised: float, seconds: float) -> None:
        """A change was made; it is final without a measured time before it, or where ``previous`` no longer fits.

        Args:
            previous: The plan before.
            costs: The agreed numbers.
            promised: Predicted gain.
            seconds: Median window with ``previous``.
        """
        self.pending = None
        if math.isfinite(seconds) and math.isfinite(promised):
            self.pending = Trial(previous, promised, predict_finish(previous, costs), seconds)

    def judge(self, seconds: float) -> tuple[Trial, float]:
        """Ends the trial.

        Args:
            seconds: Median window with the plan on trial; NaN, which counts as no gain, if none was measured.

        Returns:
            The trial, and the measured gain: above 0 the plan is kept.
        """
        trial, self.pending = self.pending, None
        if trial is None:
            raise RuntimeError("no plan is on trial")
        gain = 1.0 - seconds / trial.seconds if math.isfinite(seconds) else 0.0
        self.broken = None if gain > 0 else BrokenPromise(trial.promised, gain, trial.finish)
        return trial, gain

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on all ranks."""
        trial, broken = self.pending, self.broken
        numbers = None if trial is None else [trial.promised, trial.finish, trial.seconds]
        return {
            "trial": None if trial is None else [trial.previous.to_list(), numbers],
            "broken": None if broken is None else [broken.promised, broken.measured, broken.finish],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        trial, broken = state["trial"], state["broken"]
        self.pending = None if trial is None else Trial(Plan.from_list(trial[0]), *map(float, trial[1]))
        self.broken = None if broken is None else BrokenPromise(*map(float, broken))


class Handover:
    """Decides whether plain DDP replaces the engine for the rest of the job.

    A plan whose buffers are all dense must stay so for some reviews. That plain DDP is faster than another plan is a
    prediction from the calibration, when no other work was done, and can be wrong. So every buffer is dense for some
    windows first, by which the residual becomes empty as well.

    Args:
        allowed: Plain DDP may replace the engine at all.

    Attributes:
        agreed: Plain DDP replaces the engine from here on.
        previous: The plan before a trial, which comes back if the trial fails; None without one.
    """

    def __init__(self, allowed: bool) -> None:
        self.agreed = False
        self.previous: Plan | None = None
        self._allowed = allowed
        self._before = math.nan  # median window before the trial
        self._faster = self._dense = 0  # reviews in a row
        self._wanted = _REVIEWS

    @property
    def on_trial(self) -> bool:
        """Whether every buffer is dense in order to measure how long that takes."""
        return self.previous is not None and not self.agreed

    def due(self, costs: GroupCosts, allreduce: LinearCost, seconds: float) -> bool:
        """Counts a review; returns whether to begin a trial.

        Args:
            costs: The agreed numbers.
            allreduce: As it was calibrated.
            seconds: Median window with the plan in use; NaN if none was measured.
        """
        if not self._allowed:
            return False
        dense = plain_ddp_window(costs, allreduce)
        # by the clock: costs do not include all of the engine's work (comparing with NaN is False)
        self._faster = self._faster + 1 if dense < (1 - _GAIN) * seconds else 0
        return self._faster >= self._wanted

    def count_dense(self, dense: bool) -> None:
        """Counts a review that did not change the plan; ``dense``: every buffer of it is, by choice."""
        self._dense = self._dense + 1 if dense else 0
        self.agreed = self._allowed and self._dense >= self._wanted

    def begin(self, previous: Plan, seconds: float) -> None:
        """Begins a trial: every buffer is dense from here on.

        Args:
            previous: The plan in use.
            seconds: Median window with it.
        """
        self.previous, self._before = previous, seconds

    def judge(self, seconds: float) -> float:
        """Ends the trial; it succeeds if its windows were not clearly longer.

        Args:
            seconds: Median window of the trial; NaN, which counts as longer, if none was measured.

        Returns:
            The share of the windows before that those of the trial saved.
        """
        gain = 1.0 - seconds / self._before if math.isfinite(seconds) else -math.inf
        self.agreed = gain >= -LENIENCE
        return gain

    def decline(self) -> Plan | None:
        """The engine stays, and the next trial needs more reviews.

        Returns:
            The plan to go back to; None if the one in use stays.
        """
        previous = self.previous
        self.drop()
        self._wanted *= _PATIENCE
        return previous

    def drop(self) -> None:
        """Forgets what was found of a plan, or of costs, that no longer hold."""
        self.agreed, self.previous = False, None
        self._faster = self._dense = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on all ranks.

        A trial and what was agreed are left out: a resumed job may run elsewhere, where windows take another time.
        """
        counts = [0, 0] if self.previous is not None or self.agreed else [self._faster, self._dense]
        return {"counts": counts, "wanted": self._wanted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.drop()
        self._faster, self._dense = (int(count) for count in state.get("counts", (0, 0)))
        self._wanted = int(state["wanted"])

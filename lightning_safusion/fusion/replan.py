"""When the plan changes, and when plain DDP replaces the engine. Pure: all ranks decide alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.pricing import GroupPricer, predict_finish

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
    """What a review has measured and predicted; the same on all ranks."""

    seconds: float  #: median window, from the first gradient to the last mean; NaN if none was measured
    plain_ddp: float  #: the same under plain DDP, by prediction


def predicted_gain(current: Plan, proposed: Plan, costs: GroupCosts) -> float:
    """Share of the time to the end of the last exchange that ``proposed`` saves, at most 1.

    Infinite when ``current`` no longer fits: it covers other tensors, or uses a collective that is not allowed.
    """
    if current == proposed:
        return 0.0
    allowed = GroupPricer(costs).allowed
    fits = all(group.collective in allowed for group in current.groups)
    if current.num_tensors != proposed.num_tensors or not fits:
        return math.inf
    finish = predict_finish(current, costs)
    return 1.0 - predict_finish(proposed, costs) / finish if finish > 0 else 0.0


@dataclass(frozen=True)
class Trial:
    """A plan in use that the clock has still to judge."""

    previous: Plan  #: the plan before it, which comes back if the trial fails
    seconds: float  #: median window with ``previous``
    promised: float | None = None  #: predicted gain; None: all dense, since plain DDP is predicted to be faster
    finish: float = math.nan  #: what the costs predicted for ``previous`` when its own exchanges were measured


class BrokenPromise(NamedTuple):
    """A predicted gain that was not measured."""

    promised: float
    measured: float  #: 0 or less
    finish: float  #: what the costs predicted at that time for the plan before


class Trials:
    """What is on trial, and what trials have shown: plans that promise a gain, and plain DDP in place of the engine.

    A predicted gain puts a plan on trial; it is kept if the windows with it are shorter than those before. A broken
    promise shows how wrong the costs are here, for that plan and for similar ones: another change must promise more
    than that error, until the costs have changed by more than was promised. The threshold is added to both.

    Plain DDP replaces the engine for the rest of the job where a plan stays all dense for some reviews. That it is
    faster than another plan is a prediction from the calibration, when no other work was done, and can be wrong. So
    every buffer is dense for some windows first, by which the residual becomes empty as well.

    ``yields``: plain DDP may replace the engine at all.
    """

    def __init__(self, yields: bool) -> None:
        self.trial: Trial | None = None  #: under way; it outlives its judgement where plain DDP is agreed on
        self.broken: BrokenPromise | None = None  #: the latest promise, if it was broken
        self.agreed = False  #: plain DDP replaces the engine from here on
        self._yields = yields
        self._faster = self._dense = 0  # reviews in a row
        self._wanted = _REVIEWS

    def required(self, current: Plan, costs: GroupCosts, threshold: float) -> float:
        """The predicted gain that a change must exceed now; ``current`` fits the costs if a promise was broken."""
        if self.broken is not None:
            now, then = predict_finish(current, costs), self.broken.finish
            if max(now, then) > (1.0 + self.broken.promised + threshold) * min(now, then):
                self.broken = None
        return threshold if self.broken is None else self.broken.promised - self.broken.measured + threshold

    def plain_ddp_due(self, review: Review) -> bool:
        """Counts a review; returns whether to try plain DDP."""
        if not self._yields:
            return False
        # by the clock: costs do not include all of the engine's work (comparing with NaN is False)
        self._faster = self._faster + 1 if review.plain_ddp < (1 - _GAIN) * review.seconds else 0
        return self._faster >= self._wanted

    def count_dense(self, dense: bool) -> None:
        """Counts a review that did not change the plan; ``dense``: every buffer of it is, by choice."""
        self._dense = self._dense + 1 if dense else 0
        self.agreed = self._yields and self._dense >= self._wanted

    def judge(self, trial: Trial, seconds: float) -> tuple[bool, float | None]:
        """Ends a trial by its median window, NaN if none was measured: whether the plan stays, and what it has saved.

        Plain DDP is agreed on if windows were measured, and were not clearly longer.
        """
        gain = 1.0 - seconds / trial.seconds if math.isfinite(seconds) else None
        if trial.promised is None:
            self.agreed = gain is not None and gain >= -LENIENCE
            if not self.agreed:
                self.decline()
            return self.agreed, gain
        saved, self.trial = gain or 0.0, None
        self.broken = None if saved > 0 else BrokenPromise(trial.promised, saved, trial.finish)
        return saved > 0, saved

    def decline(self) -> None:
        """The engine stays, and the next trial of plain DDP needs more reviews."""
        self.drop()
        self._wanted *= _PATIENCE

    def drop(self) -> None:
        """Forgets what was found of a plan, or of costs, that no longer hold."""
        self.trial, self.agreed = None, False
        self._faster = self._dense = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain values; nothing of plain DDP on trial or agreed on: elsewhere, windows may take another time."""
        trial: list[Any] | None = None
        if self.trial is not None and self.trial.promised is not None:
            trial = [self.trial.previous.to_list(), [self.trial.promised, self.trial.finish, self.trial.seconds]]
        elsewhere = self.agreed or (self.trial is not None and trial is None)
        return {
            "trials": {"trial": trial, "broken": None if self.broken is None else list(self.broken)},
            "handover": {"counts": [0, 0] if elsewhere else [self._faster, self._dense], "wanted": self._wanted},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        if "handover" in state:  # older checkpoints have none
            self.drop()
            self._faster, self._dense = (int(count) for count in state["handover"].get("counts", (0, 0)))
            self._wanted = int(state["handover"]["wanted"])
        trial, broken = state["trials"]["trial"], state["trials"]["broken"]
        self.trial = None
        if trial is not None:
            promised, finish, seconds = map(float, trial[1])
            self.trial = Trial(Plan.from_list(trial[0]), seconds, promised, finish)
        self.broken = None if broken is None else BrokenPromise(*map(float, broken))

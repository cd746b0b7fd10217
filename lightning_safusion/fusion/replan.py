"""When to plan again, and whether a change has kept what it promised. Pure: all ranks decide alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.pricing import predict_finish

Action = Literal["stay", "switch", "dense", "keep", "revert", "freeze", "try"]


@dataclass(frozen=True)
class Decision:
    """What a review came to; the same on all ranks.

    Args:
        window: Planned windows before it.
        action: ``"stay"``: no plan promises enough. ``"switch"``: to another plan, on trial. ``"dense"``: everything
            travels whole, on trial, since plain DDP is predicted to be faster. ``"keep"``: the trial has ended well.
            ``"revert"``: it has not, or something is still held back, and the plan before is back. ``"freeze"``: the
            plan stays from now on. ``"try"``: a search measures another plan.
        buffers: Buffers of the plan in force from here on.
        rival: Buffers of the plan it was compared with.
        predicted: Share of the backward pass and exchange that the newer of both plans saves by the costs of the
            review that proposed it; None where ``action`` is ``"freeze"``.
        measured: Share that it saved by the clock; None while that is not known.
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
class Trial:
    """A plan in use that has yet to show what it promised.

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
    """A gain that did not come.

    Args:
        promised: Predicted gain.
        measured: What came instead, 0 or less.
        finish: What the costs predicted at that time for the plan that went on.
    """

    promised: float
    measured: float
    finish: float


class Trials:
    """Decides on changes of the plan, by prediction first and then by the clock.

    A predicted gain puts a plan on trial; it is kept if the windows with it are shorter than those before. A gain that
    did not come shows by how much the costs mislead here, about that plan and about those like it: another change must
    promise more than that error, until the costs have changed by more than was promised. The threshold comes on top
    of both.
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
        """A change was made; without a measured time before it, or where there was no choice, it is final.

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
            The trial, and the measured gain; the plan before goes on if that is not above 0.
        """
        trial, self.pending = self.pending, None
        if trial is None:
            raise RuntimeError("no plan is on trial")
        gain = 1.0 - seconds / trial.seconds if math.isfinite(seconds) else 0.0
        self.broken = None if gain > 0 else BrokenPromise(trial.promised, gain, trial.finish)
        return trial, gain

    def drop(self) -> None:
        """Forgets a trial that cannot be judged: the plan was dropped."""
        self.pending = None

    def reset(self) -> None:
        """Forgets everything: the tensors have another order."""
        self.pending = self.broken = None

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

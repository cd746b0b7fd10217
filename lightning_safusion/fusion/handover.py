"""When plain DDP takes the engine's place: predicted review after review, then tried, then for good."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion.costs import predict_plain_ddp
from lightning_safusion.fusion.plan import GroupCosts, Plan

#: Reviews in a row that find every buffer dense, or plain DDP faster, before that is believed.
REVIEWS = 3
# Share of a window that plain DDP must save: nothing leads back from it.
_GAIN = 0.03
# Share by which the engine's dense windows may be longer than those before: what they cost besides, DDP does not.
_LENIENCE = 0.1
# After a trial that failed, so many times as many reviews are needed.
_PATIENCE = 4


class Handover:
    """Whether plain DDP shall do the rest of the job. Pure: all ranks decide alike.

    A prediction is made from the calibration, when no other work was done, and can be wrong. So the engine sends
    everything dense for some windows first, by which nothing is left in the memory either.

    Args:
        allowed: Plain DDP may take over at all.

    Attributes:
        agreed: Plain DDP goes on from here.
        pending: The plan before the trial and its median window, as long as there is one.
    """

    def __init__(self, allowed: bool) -> None:
        self.agreed = False
        self.pending: tuple[Plan, float] | None = None
        self._allowed = allowed
        self._reviews, self._wanted = 0, REVIEWS

    def due(self, costs: GroupCosts, allreduce: LinearCost, seconds: float) -> bool:
        """Counts a review; whether to begin a trial.

        Args:
            costs: The agreed numbers.
            allreduce: As it was calibrated. What a job of sparse buffers says of an all-reduce of the whole model, a
                hundred times as large, varies by as much.
            seconds: Median window with the plan in use; NaN if none was measured.
        """
        dense = predict_plain_ddp(replace(costs, dense=(allreduce.fixed, allreduce.per_byte)))
        # by the clock: costs do not know all of the engine's work (comparing with NaN is False)
        faster = self._allowed and dense < (1 - _GAIN) * seconds
        self._reviews = self._reviews + 1 if faster else 0
        return self._reviews >= self._wanted

    def begin(self, previous: Plan, seconds: float) -> None:
        """Everything travels dense from here on.

        Args:
            previous: The plan in use.
            seconds: Median window with it.
        """
        self.pending = previous, seconds

    def judge(self, seconds: float) -> tuple[Plan, float]:
        """Ends the trial; plain DDP goes on if its windows were not clearly longer.

        Args:
            seconds: Median window of the trial; NaN, which counts as longer, if none was measured.

        Returns:
            The plan before, and the share of its windows that those of the trial saved.
        """
        if self.pending is None:
            raise RuntimeError("no trial has begun")
        (previous, before), self.pending = self.pending, None
        gain = 1.0 - seconds / before if math.isfinite(seconds) else -math.inf
        self.agreed = gain >= -_LENIENCE
        if not self.agreed:
            self._reviews, self._wanted = 0, self._wanted * _PATIENCE
        return previous, gain

    def drop(self) -> None:
        """Forgets what was found of a plan, or of costs, that are no more."""
        self.agreed, self.pending, self._reviews = False, None, 0

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on all ranks. What was agreed is left out: a resumed job may run elsewhere."""
        pending = None if self.pending is None else [self.pending[0].to_list(), self.pending[1]]
        return {"pending": pending, "reviews": self._reviews, "wanted": self._wanted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        pending = state["pending"]
        self.agreed = False
        self.pending = None if pending is None else (Plan.from_list(pending[0]), float(pending[1]))
        self._reviews, self._wanted = int(state["reviews"]), int(state["wanted"])

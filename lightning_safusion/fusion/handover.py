"""When plain DDP takes the engine's place: found review after review, tried, then for good."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion.plans.costs import GroupCosts, predict_plain_ddp
from lightning_safusion.fusion.plans.plan import Plan

#: Reviews in a row that find every buffer dense, or plain DDP faster, before that is believed.
REVIEWS = 3
# Share of a window that plain DDP must save: nothing leads back from it.
_GAIN = 0.03
# Share by which the engine's dense windows may be longer than those before: what they cost besides, DDP does not.
LENIENCE = 0.1
# After a time that it came to nothing, so many times as many reviews are needed.
_PATIENCE = 4


class Handover:
    """Whether plain DDP shall do the rest of the job. Pure: all ranks decide alike.

    A plan that is dense anyway needs to stay so for some reviews. That another one should give way is a prediction from
    the calibration, when no other work was done, and can be wrong. So the engine sends everything dense for some
    windows first, by which nothing is left in the memory either.

    Args:
        allowed: Plain DDP may take over at all.

    Attributes:
        agreed: Plain DDP goes on from here.
        previous: The plan before a trial, to which the engine goes back if nothing comes of it; None without one.
    """

    def __init__(self, allowed: bool) -> None:
        self.agreed = False
        self.previous: Plan | None = None
        self._allowed = allowed
        self._before = math.nan  # median window before the trial
        self._faster = self._dense = 0  # reviews in a row
        self._wanted = REVIEWS

    @property
    def on_trial(self) -> bool:
        """Whether everything travels dense in order to see how long that takes."""
        return self.previous is not None and not self.agreed

    def due(self, costs: GroupCosts, allreduce: LinearCost, seconds: float) -> bool:
        """Counts a review; whether to begin a trial.

        Args:
            costs: The agreed numbers.
            allreduce: As it was calibrated. What a job of sparse buffers says of an all-reduce of the whole model, a
                hundred times as large, varies by as much.
            seconds: Median window with the plan in use; NaN if none was measured.
        """
        if not self._allowed:
            return False
        dense = predict_plain_ddp(replace(costs, dense=(allreduce.fixed, allreduce.per_byte)))
        # by the clock: costs do not know all of the engine's work (comparing with NaN is False)
        self._faster = self._faster + 1 if dense < (1 - _GAIN) * seconds else 0
        return self._faster >= self._wanted

    def count_dense(self, dense: bool) -> None:
        """Counts a review that left the plan as it is; ``dense``: every buffer of it is, by choice."""
        self._dense = self._dense + 1 if dense else 0
        self.agreed = self._allowed and self._dense >= self._wanted

    def begin(self, previous: Plan, seconds: float) -> None:
        """Everything travels dense from here on.

        Args:
            previous: The plan in use.
            seconds: Median window with it.
        """
        self.previous, self._before = previous, seconds

    def judge(self, seconds: float) -> float:
        """Ends the trial; plain DDP goes on if its windows were not clearly longer.

        Args:
            seconds: Median window of the trial; NaN, which counts as longer, if none was measured.

        Returns:
            The share of the windows before that those of the trial saved.
        """
        gain = 1.0 - seconds / self._before if math.isfinite(seconds) else -math.inf
        self.agreed = gain >= -LENIENCE
        return gain

    def decline(self) -> Plan | None:
        """Plain DDP does not take over, and is not asked for a while.

        Returns:
            The plan to go back to; None if the one in use stays.
        """
        previous = self.previous
        self.drop()
        self._wanted *= _PATIENCE
        return previous

    def drop(self) -> None:
        """Forgets what was found of a plan, or of costs, that are no more."""
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

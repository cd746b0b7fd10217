"""Adaptive buffers: plans from measured times, and the rules of when to plan again."""

from __future__ import annotations

import math
from typing import Literal, get_args

from lightning_safusion.fusion.plans.cadence import Cadence, ReplanSchedule
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.optimal import check_share, plan_greedy, plan_optimal
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.policy import FusionPolicy
from lightning_safusion.fusion.plans.pricing import NO_BOUNDS, Bounds, predict_finish

Rule = Literal["optimal", "paper"]


class Adaptive(FusionPolicy):
    """Buffers sized by measured times, the same tensors on all workers (SAFusion, inter- and intra-worker).

    A new plan is kept if the windows with it are shorter by the clock than those before; else the old one comes back.

    Args:
        rule: ``"optimal"``: the exact programme. ``"paper"``: the greedy rule of the SAFusion paper.
        max_last_share: Largest share of the model's elements in the last buffer, in (0, 1] (rule ``"optimal"``).
        warmup_windows: Windows (backward passes that exchange) in which the plan is reviewed often.
        warmup_every: Windows between two reviews in the warm-up.
        warmup_threshold: Predicted gain that a new plan must exceed in the warm-up, as a share.
        every: Windows between two reviews afterwards.
        threshold: Predicted gain that a new plan must exceed afterwards, as a share.
        trial_windows: Windows after a change that are compared with as many before it.
        freeze_after: Windows after which the plan stays; ``None``: never.
    """

    name = "adaptive"
    needs_costs = True
    sizable = True

    def __init__(
        self,
        rule: Rule = "optimal",
        max_last_share: float = 0.5,
        warmup_windows: int = Cadence.warmup_windows,
        warmup_every: int = Cadence.warmup_every,
        warmup_threshold: float = Cadence.warmup_threshold,
        every: int = Cadence.every,
        threshold: float = Cadence.threshold,
        trial_windows: int = Cadence.trial_windows,
        freeze_after: int | None = Cadence.freeze_after,
    ) -> None:
        if rule not in get_args(Rule):
            raise ValueError(f"unknown rule {rule!r}: choose one of {list(get_args(Rule))}")
        check_share(max_last_share)
        self.rule = rule
        self.max_last_share = max_last_share
        self.cadence = Cadence(
            warmup_windows, warmup_every, warmup_threshold, every, threshold, trial_windows, freeze_after
        )

    def plan(self, costs: GroupCosts) -> Plan:
        return self.resized(costs)

    def resized(self, costs: GroupCosts, bounds: Bounds = NO_BOUNDS) -> Plan:
        if self.rule == "paper":
            return plan_greedy(costs, bounds)
        return plan_optimal(costs, max_last_share=self.max_last_share, bounds=bounds)

    def schedule(self) -> ReplanSchedule:
        return ReplanSchedule(self.cadence)


class Tuned(FusionPolicy):
    """Another policy, its sizes reviewed while the job runs: what ``BufferSizeTuner`` makes of a strategy's policy.

    The job begins with the policy's own plan, and its sizes follow once times have been measured.

    Args:
        policy: Its buffers are sized.
        cadence: When plans are reviewed, and how large a gain is worth a change.
        bounds: Elements of a buffer.

    Raises:
        ValueError: If the policy has no sizes to choose, or no buffer can keep the bounds.
    """

    name = "tuned"
    needs_costs = True
    sizable = True

    def __init__(self, policy: FusionPolicy, cadence: Cadence | None = None, bounds: Bounds = NO_BOUNDS) -> None:
        if not policy.sizable or policy.streams:
            raise ValueError(f"fusion policy {policy!r} has no sizes to choose: use 'adaptive', 'aligned' or 'behind'")
        self.policy = policy
        self.cadence = cadence or Cadence()
        self.bounds = bounds.check()

    def plan(self, costs: GroupCosts) -> Plan:
        return self.policy.plan(costs)

    def resized(self, costs: GroupCosts, bounds: Bounds = NO_BOUNDS) -> Plan:
        return self.policy.resized(costs, self.bounds)

    def schedule(self) -> ReplanSchedule:
        return ReplanSchedule(self.cadence)


def predicted_gain(current: Plan, proposed: Plan, costs: GroupCosts) -> float:
    """Share of the time to the end of the last exchange that ``proposed`` saves: pure, so that all ranks decide alike.

    Args:
        current: The plan in use.
        proposed: What the policy would use now.
        costs: The agreed numbers that both are judged with.

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

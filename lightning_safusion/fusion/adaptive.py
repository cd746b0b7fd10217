"""Adaptive buffers: plans from measured times, and the rules of when to plan again."""

from __future__ import annotations

from typing import Literal, get_args

from lightning_safusion.fusion.dp import check_share, plan_greedy, plan_optimal, predict_finish
from lightning_safusion.fusion.plan import GroupCosts, Plan
from lightning_safusion.fusion.policy import FusionPolicy
from lightning_safusion.fusion.replan import ReplanSchedule

Rule = Literal["optimal", "paper"]


class Adaptive(FusionPolicy):
    """Buffers sized by measured times, the same tensors on all workers (SAFusion, inter- and intra-worker).

    Args:
        rule: ``"optimal"``: the exact programme. ``"paper"``: the greedy rule of the SAFusion paper.
        max_last_share: Largest share of the model's elements in the last buffer, in (0, 1] (rule ``"optimal"``).
        warmup_windows: Windows (backward passes that exchange) in which the plan is reviewed often.
        warmup_every: Windows between two reviews in the warm-up.
        warmup_threshold: Predicted gain that a new plan must exceed in the warm-up, as a share.
        every: Windows between two reviews afterwards.
        threshold: Predicted gain that a new plan must exceed afterwards, as a share.
        freeze_after: Windows after which the plan stays; ``None``: never.
    """

    name = "adaptive"
    needs_costs = True

    def __init__(
        self,
        rule: Rule = "optimal",
        max_last_share: float = 0.5,
        warmup_windows: int = 50,
        warmup_every: int = 5,
        warmup_threshold: float = 0.01,
        every: int = 50,
        threshold: float = 0.03,
        freeze_after: int | None = None,
    ) -> None:
        if rule not in get_args(Rule):
            raise ValueError(f"unknown rule {rule!r}: choose one of {list(get_args(Rule))}")
        check_share(max_last_share)
        self.rule = rule
        self.max_last_share = max_last_share
        self.warmup_windows = warmup_windows
        self.warmup_every = warmup_every
        self.warmup_threshold = warmup_threshold
        self.every = every
        self.threshold = threshold
        self.freeze_after = freeze_after
        self.schedule()  # refuses bad numbers here rather than at the first step

    def plan(self, costs: GroupCosts) -> Plan:
        if self.rule == "paper":
            return plan_greedy(costs)
        return plan_optimal(costs, max_last_share=self.max_last_share)

    def schedule(self) -> ReplanSchedule:
        return ReplanSchedule(
            warmup_windows=self.warmup_windows,
            warmup_every=self.warmup_every,
            warmup_threshold=self.warmup_threshold,
            every=self.every,
            threshold=self.threshold,
            freeze_after=self.freeze_after,
        )


def should_switch(current: Plan, proposed: Plan, costs: GroupCosts, threshold: float) -> bool:
    """Whether ``proposed`` is worth a change: a pure function, so that all ranks decide alike.

    Args:
        current: The plan in use.
        proposed: What the policy would use now.
        costs: The agreed numbers that both are judged with.
        threshold: Share of the current finish that the gain must exceed.

    Returns:
        True as well when ``current`` no longer fits: it covers other tensors, or uses a collective that is not allowed.
    """
    if current == proposed:
        return False
    allowed = {"allgather": costs.sparse_allowed, "allreduce": costs.dense_allowed}
    fits = all(allowed.get(group.collective, False) for group in current.groups)
    if current.num_tensors != proposed.num_tensors or not fits:
        return True
    return predict_finish(proposed, costs) < (1.0 - threshold) * predict_finish(current, costs)

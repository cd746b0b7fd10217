"""Policies of published systems: their planners over times that the workers of a job have agreed on.

They plan as their papers do: once, from what the first windows have measured, and whatever the clock says afterwards;
Cupcake by trying out; Horovod not at all: it fuses what is there when its clock ticks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_safusion.fusion.plans.behind import BehindCosts
from lightning_safusion.fusion.plans.merging import even_cuts, fuse_ready, plan_mgwfbp, plan_omgs
from lightning_safusion.fusion.plans.optimal import GroupPricer
from lightning_safusion.fusion.plans.plan import Group, GroupCosts, Plan
from lightning_safusion.fusion.plans.policy import FusionPolicy
from lightning_safusion.fusion.replan import Cadence, ReplanSchedule
from lightning_safusion.fusion.search import CutSearch

#: Enough for the medians of a profile; the first windows of a job set up communicators and warm up kernels.
PROFILED_WINDOWS = 12


class PlannedOnce(FusionPolicy):
    """Plans once, when the first windows have been measured, and anew where the order of the gradients changes.

    Until then, and in a deterministic training for good, the same rule plans with modelled times.

    Args:
        windows: Windows (backward passes that exchange) that are measured before.

    Raises:
        ValueError: If there is no such window.
    """

    needs_costs = True

    def __init__(self, windows: int = PROFILED_WINDOWS) -> None:
        if windows < 3:
            raise ValueError(f"windows must be 3 or more, since the first ones set up communicators, got {windows}")
        self.windows = windows

    def schedule(self) -> ReplanSchedule:
        return ReplanSchedule(Cadence.once(self.windows))


class MGWFBP(PlannedOnce):
    """MG-WFBP (Shi et al., INFOCOM 2019): a gradient waits for the next one if a message of its own costs more.

    The released code measures 50 iterations in a run before the job, stopping the device at every gradient, which makes
    backward look longer than it is; here the first windows of the job are measured as they run.

    Args:
        variant: ``"paper"``, or ``"asc"``, the release's second rule.
        min_elements: Groups of fewer elements are merged whatever the rule says; the release has 8192 here.
        windows: Windows that are measured before.
    """

    name = "mgwfbp"

    def __init__(
        self,
        variant: Literal["paper", "asc"] = "paper",
        min_elements: int = 0,
        windows: int = PROFILED_WINDOWS,
    ) -> None:
        super().__init__(windows)
        if variant not in ("paper", "asc"):
            raise ValueError(f"unknown variant {variant!r}: choose 'paper' or 'asc'")
        if min_elements < 0:
            raise ValueError(f"min_elements must not be negative, got {min_elements}")
        self.variant = variant
        self.min_elements = min_elements

    def plan(self, costs: GroupCosts) -> Plan:
        return plan_mgwfbp(costs, self.variant, self.min_elements)


class OMGS(PlannedOnce):
    """OMGS-SGD (Shi et al., INFOCOM 2020): merge, select, send, where the wait costs less than the message saved.

    For selection behind fusion (``scope="group"``). Selection and exchange are measured in the job; the released code
    reads them from tables. Its planner is switched off by default, always merges the first two gradients, and forgets
    the size of the first; none of that is done here (see ``plan_omgs(released=True)``).
    """

    name = "omgs"

    def plan(self, costs: GroupCosts) -> Plan:
        stops = [group.stop for group in plan_omgs(BehindCosts.of(costs)).groups]
        return GroupPricer(costs).plan(stops)


class Cupcake(FusionPolicy):
    """Cupcake (MLSys 2023): contiguous groups, found by trying cuts out on the running job.

    For selection behind fusion (``scope="group"``). What is compared is the agreed time from the first gradient to the
    last mean; the release takes rank 0's time of an iteration, of which this is the part that cuts can change. A search
    begins anew where the density or the order of the gradients changes, and goes on from a checkpoint.

    Without a clock, in a deterministic training, the groups hold equally many tensors: the release's default.

    Args:
        groups: Largest number of groups; two in all released commands.
        tolerance: Share of the time that a further cut must save.
        windows: Windows by which each cut is judged.

    Raises:
        ValueError: If a number is out of range.
    """

    name = "cupcake"
    needs_costs = True

    def __init__(self, groups: int = 2, tolerance: float = 0.0, windows: int = 20) -> None:
        if groups < 1:
            raise ValueError(f"groups must be 1 or more, got {groups}")
        if not 0.0 <= tolerance < 1.0:
            raise ValueError(f"tolerance is a share in [0, 1), got {tolerance}")
        if windows < 1:
            raise ValueError(f"windows must be 1 or more, got {windows}")
        self.groups = groups
        self.tolerance = tolerance
        self.windows = windows

    def plan(self, costs: GroupCosts) -> Plan:
        total = len(costs.numels)
        return GroupPricer(costs).plan(even_cuts(total, self.groups) if total else [])

    def search(self, tensors: int) -> CutSearch:
        return CutSearch(tensors, self.groups, self.tolerance, self.windows)


class Horovod(FusionPolicy):
    """Whatever is ready on all workers at a tick of the clock is fused (Horovod, Sergeev and Del Balso, 2018).

    Which tensors share a buffer differs from step to step, but not between workers: they agree at every tick
    (:class:`~lightning_safusion.fusion.ticks.Ticks`, which says how this differs from Horovod's own thread). Sparse
    tensors are selected from in one call per buffer, each with a quota of its own, which gives the same elements as
    Horovod's call per tensor. There is no tuner of the two numbers; 128 MiB and 1 ms are the defaults of Horovod 0.28.

    :meth:`plan` gives the buffers of a step in which all tensors are ready at one tick; it is used where nothing may
    leave before the end of the backward pass.

    Args:
        cycle_s: Seconds from one tick to the next.
        threshold_bytes: Largest buffer, counted over all workers where it is gathered; a larger tensor travels alone, 0
            fuses nothing.

    Raises:
        ValueError: If a number is negative.
    """

    name = "horovod"

    def __init__(self, cycle_s: float = 1e-3, threshold_bytes: int = 128 * 2**20) -> None:
        if not 0 <= cycle_s < float("inf"):
            raise ValueError(f"cycle_s must be seconds, 0 or more, got {cycle_s}")
        if threshold_bytes < 0:
            raise ValueError(f"threshold_bytes must not be negative, got {threshold_bytes}")
        self.cycle_s = cycle_s
        self.threshold_bytes = threshold_bytes

    def plan(self, costs: GroupCosts) -> Plan:
        return Plan(tuple(self.fuse(costs, 0, len(costs.numels))))

    def fuse(self, costs: GroupCosts, start: int, stop: int) -> list[Group]:
        """The buffers of tensors that a tick has found ready on all workers. Pure.

        Args:
            costs: Agreed numbers.
            start: Place of the first of them.
            stop: Place after the last.
        """
        nbytes: Sequence[float] = costs.dense_bytes
        if costs.sparse_allowed:
            nbytes = [costs.world_size * each for each in costs.sparse_bytes]
        pricer = GroupPricer(costs)
        ranges = fuse_ready(nbytes, start, stop, self.threshold_bytes)
        return [Group(begin, end, pricer.choose(begin, end)) for begin, end in ranges]

"""Horovod's buffers: all tensors that are ready on all workers at a tick of the clock."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.fusion.plans.policy import FusionPolicy
from lightning_safusion.fusion.plans.pricing import GroupPricer


def fuse_ready(nbytes: Sequence[float], start: int, stop: int, threshold: float) -> list[tuple[int, int]]:
    """Horovod: ``(start, stop)`` of the buffers that tensors ready at a tick share, front to back, as far as they fit.

    Horovod's look past a tensor that does not fit never applies where all tensors are of one kind, as here: its buffers
    are then ranges.

    Args:
        nbytes: Bytes that each tensor adds to a buffer, over all workers where it is gathered [L].
        start, stop: Places of the tensors that are ready.
        threshold: Bytes of a buffer; a larger tensor has a buffer of its own, 0 fuses nothing.
    """
    ranges: list[tuple[int, int]] = []
    held = 0.0
    for place in range(start, stop):
        if ranges and held + nbytes[place] <= threshold:
            ranges[-1] = (ranges[-1][0], place + 1)
            held += nbytes[place]
        else:
            ranges.append((place, place + 1))
            held = nbytes[place]
    return ranges


class Horovod(FusionPolicy):
    """Tensors that are ready on all workers at a tick of the clock are fused (Horovod, Sergeev and Del Balso, 2018).

    Which tensors share a buffer differs from step to step, but not between workers: they agree at every tick
    (:class:`~lightning_safusion.fusion.launching.ticking.Ticks`, which says how this differs from Horovod's own
    thread). Sparse tensors are selected from in one call per buffer, each with a quota of its own, which gives the same
    elements as Horovod's call per tensor. There is no tuner of the two numbers; 128 MiB and 1 ms are the defaults of
    Horovod 0.28.

    :meth:`plan` gives the buffers of a step in which all tensors are ready at one tick; it is used where buffers are
    launched at the end of the backward pass.

    Args:
        cycle_s: Seconds from one tick to the next.
        threshold_bytes: Largest buffer, counted over all workers where it is gathered; a larger tensor has a buffer of
            its own, 0 fuses nothing.

    Raises:
        ValueError: If a number is negative.
    """

    name = "horovod"
    ticking = True

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
        """The buffers of the tensors ``[start, stop)``, which a tick has found ready on all workers. Pure."""
        nbytes: Sequence[float] = costs.dense_bytes
        if costs.sparse_allowed:
            nbytes = [costs.world_size * each for each in costs.sparse_bytes]
        pricer = GroupPricer(costs)
        ranges = fuse_ready(nbytes, start, stop, self.threshold_bytes)
        return [Group(*places, pricer.choose(*places)) for places in ranges]

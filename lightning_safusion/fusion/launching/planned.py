"""When buffers are filled and sent: when the last tensor of a planned group has arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from torch import Tensor

from lightning_safusion.fusion.backward import BackwardPass
from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.fusion.fused import FusedPath
from lightning_safusion.fusion.lanes import Lane
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.space import GradientSpace

# Until the order of the gradients is known everything is sent at the end, in pieces that bound the memory of a buffer.
_UNPLANNED_ELEMENTS = 1 << 25


class Launching:
    """Says which buffers are filled and sent when; here as soon as the last tensor of a planned group has arrived.

    A window calls the methods in the order in which they stand here.

    Args:
        space: Order, quotas, residual and buffers of the tensors.
        planner: Says which tensors share a buffer.
        dense_first: What no plan covers is dense; else sparse.
    """

    late_by_one = False  #: buffers are sent when the next one closes
    asks_always = False  #: every tensor may close groups, not only one that completes a planned one

    def __init__(self, space: GradientSpace, planner: Planner, dense_first: bool = True) -> None:
        self.space, self.planner, self.dense_first = space, planner, dense_first
        self.fused = FusedPath(space.device)  #: the kernels of buffers that have some
        self.lane = Lane(space.device)  #: selection and packing run beside the backward pass

    def begin(self, plan: Plan) -> Sequence[Group]:
        """Begins a window; returns the groups that close in it when their last tensors arrive."""
        return plan.groups

    def follow(self, plan: Plan) -> None:
        """Takes another plan, before the first window with it."""

    def closing(self, backward: BackwardPass, place: int, grad: Tensor, group: Group | None) -> Iterable[Group]:
        """Groups to send now that a tensor has been submitted, which completes ``group``, if any."""
        return () if group is None else (group,)

    def fill(self, buffer: Buffer, backward: BackwardPass) -> Shipment | None:
        """Fills a buffer; returns the shipment that can be sent now, if any."""
        fused, selector = self.fused, self.space.selector
        shipment = fused.shipment(buffer, backward, selector) if fused.serves else Shipment(buffer, backward)
        shipment.fill(selector)
        return shipment

    def rest(self, backward: BackwardPass) -> Iterator[Group]:
        """Groups to send when every tensor has been submitted.

        Planned ones that gradients out of order have delayed; everything if nothing is planned.
        """
        yield from backward.groups[backward.next_group :]
        if backward.launched < backward.length:
            collective = self.planner.fallback(self.space.shape, sparse=not self.dense_first)
            edges = self.space.layout.edges
            while (start := backward.launched) < backward.length:
                stop = int(np.searchsorted(edges, edges[start] + _UNPLANNED_ELEMENTS, side="right")) - 1
                yield Group(start, max(start + 1, stop), collective)

    def last(self) -> Shipment | None:
        """The shipment that is still to be sent after these, if any."""
        return None

    def late(self, backward: BackwardPass) -> Iterable[Group]:
        """Groups to send after the backward pass, before the window ends; may wait for other ranks."""
        return ()

    def ended(self, shipments: Sequence[Shipment]) -> None:
        """All shipments of a window have been sent."""

    def forget(self) -> None:
        """Forgets an open window."""

    def release(self) -> None:
        """Frees what another window can make again."""

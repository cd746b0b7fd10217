"""When buffers are filled and sent: when the last tensor of a planned group has arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from torch import Tensor

from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.fusion.fused import FusedPath
from lightning_safusion.fusion.lanes import Lane
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.space import GradientSpace
from lightning_safusion.fusion.window import Window

# Until the order of the gradients is known everything is sent at the end, in pieces that bound the memory of a buffer.
_UNPLANNED_ELEMENTS = 1 << 25


class Launching:
    """Says which buffers are filled and sent when; here as soon as the last tensor of a planned group has arrived.

    A window calls the methods in the order in which they stand here. ``dense_first``: what no plan covers is dense.
    """

    late_by_one = False  #: buffers are sent when the next one closes
    #: Every tensor may close groups, not only one that completes a planned one, and so may the end of the window.
    asks_always = False

    def __init__(self, space: GradientSpace, planner: Planner, dense_first: bool = True) -> None:
        self.space, self.planner, self.dense_first = space, planner, dense_first
        self.fused = FusedPath(space.device)  #: the kernels of buffers that have some
        self.lane = Lane(space.device)  #: selection and packing run beside the backward pass

    def begin(self, plan: Plan) -> Sequence[Group]:
        """Begins a window; returns the groups that close in it when their last tensors arrive."""
        return plan.groups

    def follow(self, plan: Plan) -> None:
        """Takes another plan, before the first window with it."""

    def closing(self, window: Window, place: int, grad: Tensor, group: Group | None) -> Iterable[Group]:
        """Groups to send now that a tensor has been submitted, which completes ``group``, if any."""
        return () if group is None else (group,)

    def fill(self, buffer: Buffer, window: Window) -> Shipment | None:
        """Fills a buffer; returns the shipment that can be sent now, if any."""
        fused, selector = self.fused, self.space.selector
        shipment = fused.shipment(buffer, window, selector) if fused.serves else Shipment(buffer, window)
        shipment.fill(selector)
        return shipment

    def rest(self, window: Window) -> Iterator[Group]:
        """Groups to send when every tensor has been submitted.

        Planned ones that gradients out of order have delayed; everything if nothing is planned.
        """
        yield from window.groups[window.next_group :]
        if window.launched < window.length:
            collective = self.planner.fallback(self.space.shape, sparse=not self.dense_first)
            edges = self.space.layout.edges
            while (start := window.launched) < window.length:
                stop = int(np.searchsorted(edges, edges[start] + _UNPLANNED_ELEMENTS, side="right")) - 1
                yield Group(start, max(start + 1, stop), collective)

    def last(self) -> Shipment | None:
        """The shipment that is still to be sent after these, if any."""
        return None

    def late(self, window: Window) -> Iterable[Group]:
        """Groups to send after the backward pass, before the window ends; may wait for other ranks."""
        return ()

    def ended(self, shipments: Sequence[Shipment]) -> None:
        """All shipments of a window have been sent."""

    def forget(self) -> None:
        """Forgets an open window."""

    def release(self) -> None:
        """Frees what another window can make again."""

"""One backward window: the gradients of one synchronised backward pass, from the first to the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import nan
from time import perf_counter
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.fusion.clock import Mark
from lightning_safusion.fusion.plans.plan import Group

if TYPE_CHECKING:
    from lightning_safusion.fusion.shipment import Shipment


def unmarked() -> Mark:
    """In place of a clock's mark where nobody wants to know."""
    return nan


@dataclass(eq=False)
class Window:
    """Gradients submitted so far, and the shipments that they left in.

    Args:
        length: Tensors of the layout (L).
        groups: Groups of the plan; empty while the order is not known.
        step: Number of the window.
        density: Density in force.
        mark: Records the moment.
        surveyed: All ranks record when collectives end.
        timed: This rank records when collectives end.
        ticking: Buffers are fused from what is ready at ticks of a clock, not by a plan.
        hold: Launch nothing before every tensor has been submitted.
        deferred: The device decides at its end; the host learns of it later.
        plain: Gradients are averaged as DDP does, at its end: nothing is launched.
        scale: Factor of the loss that the gradients carry (one element, on their device); None for 1.

    Attributes:
        grads: By place; None until submitted.
        fresh: bool [L], computed in this window.
        bypass: bool [L], must not pass through the residual.
        regular: Every tensor so far is fresh, and none bypasses the residual.
        arrived: When each was submitted [L].
        order: Places in the order of submission.
        unused: Places that bypass the residual on some rank.
        unsent: Shipments that are filled and not launched yet.
        shipments: Launched, in order.
        launched: Places below this one have left, or are about to.
        planned: Its groups were those of a plan.
        error: Why this rank could not fill a message.
        profiled: ``torch.profiler`` is active: shipments mark their ranges.
    """

    length: int
    groups: Sequence[Group]
    step: int
    density: float
    mark: Callable[[], Mark] = perf_counter
    surveyed: bool = True
    timed: bool = True
    ticking: bool = False
    hold: bool = False
    deferred: bool = False
    plain: bool = False
    scale: Tensor | None = None
    grads: list[Tensor | None] = field(init=False)
    fresh: np.ndarray = field(init=False)
    bypass: np.ndarray = field(init=False)
    regular: bool = field(init=False)
    complete: bool = field(init=False)
    arrived: list[Mark] = field(init=False)
    drained: Mark = nan
    order: list[int] = field(default_factory=list)
    unused: list[int] = field(default_factory=list)
    unsent: list[Shipment] = field(default_factory=list)
    shipments: list[Shipment] = field(default_factory=list)
    launched: int = 0
    next_group: int = 0
    in_order: bool = True
    planned: bool = False
    profiled: bool = field(init=False)
    error: Exception | None = None
    _sequential: int = 0  # places below this one were submitted in their order

    def __post_init__(self) -> None:
        self.grads = [None] * self.length
        self.fresh = np.ones(self.length, bool)
        self.bypass = np.full(self.length, self.plain)
        self.regular = not self.plain
        self.complete = self.length == 0
        self.arrived = [nan] * self.length
        self.profiled = torch.autograd._profiler_enabled()

    def let_go(self) -> None:
        """Holds no gradient any more."""
        self.grads = [None] * self.length
        for shipment in self.shipments:
            shipment.grads = []

    @property
    def ready(self) -> int:
        """Places below this one have been submitted; a gradient out of its order counts when all have."""
        return self.length if self.complete else self._sequential

    def submit(self, place: int, grad: Tensor, fresh: bool, bypass: bool) -> Group | None:
        """Takes one gradient; returns the planned group that it completes, if any."""
        if self.in_order and place == self._sequential:
            self._sequential = place + 1
        else:
            self.in_order = False
        self.order.append(place)
        self.grads[place] = grad
        if not fresh:
            self.fresh[place] = self.regular = False
        if bypass:
            self.bypass[place] = True
            self.regular = False
        self.arrived[place] = self.mark()
        self.complete = len(self.order) == self.length
        if self.hold or not self.in_order or self.next_group == len(self.groups):
            return None
        group = self.groups[self.next_group]
        if group.stop != place + 1:
            return None
        self.next_group += 1
        return group

    def taken(self, group: Group) -> np.ndarray | None:
        """bool [T]: tensors of a group that are fresh and do not bypass the residual; None if all are."""
        if self.regular:
            return None
        taken = self.fresh[group.start : group.stop] & ~self.bypass[group.start : group.stop]
        return None if taken.all() else taken

    def grads_of(self, start: int, stop: int) -> list[Tensor]:
        """Gradients at the places ``[start, stop)``, which have all been submitted."""
        return cast(list[Tensor], self.grads[start:stop])

"""One backward window: the gradients of one synchronised backward pass, from the first to the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.fusion.clock import Clock, Mark
from lightning_safusion.fusion.plans.plan import Group


@dataclass(eq=False)
class Window:
    """Gradients submitted so far.

    Args:
        length: Tensors of the layout (L).
        groups: Groups of the plan; empty while the order is not known.
        step: Number of the window.
        density: Density in force.
        clock: Of this rank's device.
        surveyed: All ranks record when collectives end.
        timed: This rank records when collectives end.
        ticking: Buffers are fused from what is ready at ticks of a clock, not by a plan.
        hold: Launch nothing before every tensor has been submitted.
        deferred: The device decides at the end of the window; the host reads the decision one window later.
        plain: Gradients are averaged as DDP does, at the end of the window: nothing is launched.
        scale: Factor of the loss that the gradients carry (a scalar on their device); None for 1.

    Attributes:
        grads: By place; None until submitted.
        fresh: bool [L], computed in this window.
        bypass: bool [L], must not pass through the residual.
        regular: Every tensor so far is fresh, and none bypasses the residual.
        complete: Every tensor has been submitted.
        in_order: Tensors have been submitted in the order of the layout so far.
        arrived: When each was submitted [L].
        drained: When gradients and residual were final.
        mark: Returns the present moment; NaN where a moment costs something and this window is not timed.
        order: Places in the order of submission.
        launched: Buffers of the places below this one are launched, or about to be.
        next_group: The group of the plan that is completed next.
        error: Why this rank could not fill a message.
        profiled: ``torch.profiler`` is active: shipments mark their ranges.
    """

    length: int
    groups: Sequence[Group]
    step: int
    density: float
    clock: Clock
    surveyed: bool
    timed: bool
    ticking: bool
    hold: bool
    deferred: bool
    plain: bool
    scale: Tensor | None
    grads: list[Tensor | None] = field(init=False)
    fresh: np.ndarray = field(init=False)
    bypass: np.ndarray = field(init=False)
    regular: bool = field(init=False)
    complete: bool = field(init=False)
    in_order: bool = True
    arrived: list[Mark] = field(init=False)
    drained: Mark = nan
    mark: Callable[[], Mark] = field(init=False)
    order: list[int] = field(default_factory=list)
    launched: int = 0
    next_group: int = 0
    error: Exception | None = None
    profiled: bool = field(init=False)
    _sequential: int = 0  # places below this one were submitted in their order

    def __post_init__(self) -> None:
        self.grads = [None] * self.length
        self.fresh = np.ones(self.length, bool)
        self.bypass = np.full(self.length, self.plain)
        self.regular = not self.plain
        self.complete = self.length == 0
        self.arrived = [nan] * self.length
        self.mark = self.clock.mark if self.clock.instant or self.timed else _unmarked
        self.profiled = torch.autograd._profiler_enabled()

    @property
    def ready(self) -> int:
        """Places below this one have been submitted; a gradient out of its order counts when all have."""
        return self.length if self.complete else self._sequential

    def submit(self, place: int, grad: Tensor, fresh: bool, bypass: bool) -> Group | None:
        """Adds one gradient; returns the planned group that it completes, if any."""
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


def _unmarked() -> Mark:
    return nan

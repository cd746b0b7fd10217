"""One backward pass: the gradients that have been submitted, and how they are to be treated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import nan
from time import perf_counter
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import TensorFlag
from lightning_safusion.fusion.events import Clock, Mark
from lightning_safusion.fusion.plans.plan import Group

_FRESH, _BYPASS = int(TensorFlag.FRESH), int(TensorFlag.BYPASS)


@dataclass(eq=False)
class BackwardPass:
    """Gradients submitted so far; places are those of the layout (L)."""

    length: int  #: tensors of the layout
    groups: Sequence[Group]  #: of the plan; empty while the order is not known
    step: int  #: number of the window
    density: float  #: in force
    clock: Clock  #: of this rank's device
    surveyed: bool  #: all ranks record when collectives end
    timed: bool  #: this rank records when collectives end
    hold: bool  #: nothing is launched before every tensor has been submitted
    deferred: bool  #: the device decides at the end; the host reads the decision one window later
    repeats: bool  #: of some tensors a gradient was exchanged that no optimizer has used
    plain: bool  #: gradients are averaged as DDP does, at the end: nothing is launched
    wary: bool  #: a gradient may not be finite: means are written when all messages have come, after a copy
    scale: Tensor | None  #: factor of the loss that the gradients carry (a scalar on their device); None for 1
    grads: list[Tensor | None] = field(init=False)  #: by place; None until submitted
    fresh: np.ndarray = field(init=False)  #: bool [L], computed in this window
    bypass: np.ndarray = field(init=False)  #: bool [L], must not pass through the residual
    regular: bool = field(init=False)  #: every tensor so far is fresh, and none bypasses the residual
    complete: bool = field(init=False)  #: every tensor has been submitted
    in_order: bool = True  #: so far, tensors have been submitted in the order of the layout
    order: list[int] = field(default_factory=list)  #: places in the order of submission
    launched: int = 0  #: buffers of the places below this one are launched, or about to be
    next_group: int = 0  #: the group of the plan that is completed next
    error: Exception | None = None  #: why this rank could not fill a message
    profiled: bool = field(init=False)  #: torch.profiler is active: shipments mark their ranges
    mark: Callable[[], Mark] = field(init=False)  #: the present moment; NaN if that costs something and is not needed
    arrived: list[Mark] = field(init=False)  #: when each tensor was submitted [L]
    submitted: list[float] = field(init=False)  #: the same by the host's clock, where the device has one of its own
    worked: list[float] = field(init=False)  #: seconds of the engine's calls before that
    calls: float = 0.0  #: seconds of the engine's calls so far
    drained: Mark = nan  #: gradients and residual are final
    #: By place: this rank's gradients, where some tensor of a wary window was not finite; none elsewhere.
    copies: dict[int, Tensor] = field(default_factory=dict)
    _sequential: int = 0  # places below this one were submitted in their order

    def __post_init__(self) -> None:
        self.grads = [None] * self.length
        self.fresh = np.ones(self.length, bool)
        self.bypass = np.full(self.length, self.plain)
        self.regular = not self.plain
        self.complete = self.length == 0
        self.arrived, self.submitted, self.worked = [nan] * self.length, [nan] * self.length, [nan] * self.length
        self.mark = self.clock.mark if self.clock.instant or self.timed else lambda: nan
        self.profiled = torch.autograd._profiler_enabled()

    @property
    def repairs(self) -> bool:
        """Tensors that are not finite are averaged again, as DDP does; a loss scaler only has to see that there are."""
        return self.wary and self.scale is None

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

    def note_call(self, place: int, begin: float) -> None:
        """Notes when the host has submitted a tensor, in a call of the engine that began at a moment of its clock."""
        now = perf_counter()
        self.submitted[place], self.worked[place] = now, self.calls + now - begin

    def taken(self, group: Group) -> np.ndarray | None:
        """bool [T]: tensors of a group that are fresh and do not bypass the residual; None if all are.

        All are in a :attr:`regular` pass.
        """
        taken = self.fresh[group.start : group.stop] & ~self.bypass[group.start : group.stop]
        return None if taken.all() else taken

    def flags_of(self, group: Group) -> np.ndarray:
        """uint8 [T] of :class:`TensorFlag`, of the tensors of a group."""
        part = slice(group.start, group.stop)
        return (self.fresh[part] * _FRESH + self.bypass[part] * _BYPASS).astype(np.uint8)

    def grads_of(self, start: int, stop: int) -> list[Tensor]:
        """Gradients at the places ``[start, stop)``, which have all been submitted."""
        return cast(list[Tensor], self.grads[start:stop])

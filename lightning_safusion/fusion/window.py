"""One backward window: gradients are pushed, full buffers are sent, and it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import nan
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import TensorFlag
from lightning_safusion.fusion.events import Clock, Mark
from lightning_safusion.fusion.plans.plan import Group

if TYPE_CHECKING:  # these take windows
    from lightning_safusion.fusion.ending.host import HostEnding
    from lightning_safusion.fusion.launching.planned import Launching
    from lightning_safusion.fusion.shipment import Shipment

_FRESH, _BYPASS = int(TensorFlag.FRESH), int(TensorFlag.BYPASS)


@dataclass(eq=False)
class Notices:
    """Bits of :class:`Notice` on their way between ranks."""

    own: int = 0  #: what this rank says to all in its next messages
    heard: int = 0  #: what some rank has said: the same on all ranks at the end of every window

    def hear(self, notices: int) -> None:
        """What ranks have said; nobody needs to say it again."""
        self.heard |= notices
        self.own &= ~self.heard

    def take(self, notices: int = -1) -> int:
        """What has been heard of some notices; it is forgotten."""
        heard = self.heard & notices
        self.heard &= ~heard
        return heard


class Outcome(NamedTuple):
    """How a window has ended, the same on all ranks."""

    window: Window
    shipments: Sequence[Shipment]  #: in launch order
    good: bool  #: everything was finite: what was sent has left the residual
    notices: int  #: bits of :class:`Notice` that some rank has sent


@dataclass(eq=False)
class Window:
    """One synchronised backward pass, from its first gradient to the moment when all of them are averaged.

    Places are those of the layout (L).
    """

    launching: Launching  #: says when buffers are filled and sent
    ending: HostEnding  #: waits for the messages, and writes the means
    notices: Notices  #: what this rank says to all
    clock: Clock  #: of this rank's device
    step: int  #: its number
    density: float  #: in force
    groups: Sequence[Group]  #: of the plan; empty while the order is not known
    surveyed: bool  #: all ranks record when collectives end
    timed: bool  #: this rank records when collectives end
    hold: bool  #: nothing is launched before every tensor has been submitted
    deferred: bool  #: the device decides at the end; the host reads the decision one window later
    repeats: bool  #: of some tensors a gradient was exchanged that no optimizer has used
    plain: bool  #: gradients are averaged as DDP does, at the end: nothing is launched
    wary: bool  #: a gradient may not be finite: means are written when all messages have come, after a copy
    scale: Tensor | None  #: factor of the loss that the gradients carry (a scalar on their device); None for 1
    shipments: list[Shipment] = field(default_factory=list)  #: in launch order
    in_order: bool = True  #: so far, tensors have been submitted in the order of the layout
    order: list[int] = field(default_factory=list)  #: places in the order of submission
    launched: int = 0  #: buffers of the places below this one are launched, or about to be
    next_group: int = 0  #: the group of the plan that is completed next
    error: Exception | None = None  #: why this rank could not fill a message
    calls: float = 0.0  #: seconds of the engine's calls so far
    drained: Mark = nan  #: gradients and residual are final
    #: By place: this rank's gradients, where some tensor of a wary window was not finite; none elsewhere.
    copies: dict[int, Tensor] = field(default_factory=dict)
    _sequential: int = 0  # places below this one were submitted in their order
    _phased: list[Shipment] = field(default_factory=list)  # those with phases that are not launched yet

    def __post_init__(self) -> None:
        self.length = length = len(self.launching.space.layout.specs)  #: tensors of the layout
        self.grads: list[Tensor | None] = [None] * length  #: by place; None until submitted
        self.fresh = np.ones(length, bool)  #: bool [L], computed in this window
        self.bypass = np.full(length, self.plain)  #: bool [L], must not pass through the residual
        self.regular = not self.plain  #: every tensor so far is fresh, and none bypasses the residual
        self.complete = length == 0  #: every tensor has been submitted
        self.arrived: list[Mark] = [nan] * length  #: when each tensor was submitted [L]
        #: The same by the host's clock, where the device has one of its own, and seconds of the engine's calls before.
        self.submitted, self.worked = [nan] * length, [nan] * length
        #: The present moment; NaN if that costs something and is not needed.
        self.mark: Callable[[], Mark] = self.clock.mark if self.clock.instant or self.timed else lambda: nan
        self.profiled = torch.autograd._profiler_enabled()  #: by torch.profiler: shipments mark their ranges

    def push(self, place: int, grad: Tensor, fresh: bool, repeated: bool, since: float) -> None:
        """Takes a gradient, and sends the buffers that are full with it.

        Args:
            repeated: The gradient before was thrown away, so that this one must not pass through the residual.
            since: When the engine was called, by the host's clock (seconds).
        """
        launching, group = self.launching, None
        if self.in_order and place == self._sequential:
            self._sequential = place + 1
        else:
            self.in_order = False
        self.order.append(place)
        self.grads[place] = grad
        if not fresh:
            self.fresh[place] = self.regular = False
        if repeated:
            self.bypass[place], self.regular = True, False
        self.arrived[place] = self.mark()
        if self.timed and not self.clock.instant:
            now = perf_counter()
            self.submitted[place], self.worked[place] = now, self.calls + now - since
        self.complete = len(self.order) == self.length
        if self.in_order and not self.hold and self.next_group < len(self.groups):
            following = self.groups[self.next_group]
            if following.stop == place + 1:
                group, self.next_group = following, self.next_group + 1
        if launching.asks_always:
            for closed in launching.closing(self, place, grad, group):
                self._ship(closed)
        elif group is not None:
            self._ship(group)
        if self.complete and not self.plain:
            if self.launched < self.length:
                for left in launching.rest(self):
                    self._ship(left)
            if launching.late_by_one:
                self._ship(None)
        self.calls += perf_counter() - since

    def _ship(self, group: Group | None) -> None:
        """Fills the buffer of a group, None for no other, and sends the one that can be sent now, if any."""
        launching, space = self.launching, self.launching.space
        with launching.lane.fork():
            if group is None:
                shipment = launching.last()
            else:
                shipment = launching.fill(space.buffers.get(group) or space.buffer(group), self)
            if shipment is not None:
                shipment.pack()
                shipment.launch()
                if self.deferred:
                    self.ending.launched(shipment)
                self.shipments.append(shipment)
                if shipment.buffer.exchange.ability.phases:
                    self._phased.append(shipment)
                while self._phased and self._phased[0].advance(wait=False):
                    del self._phased[0]
        if group is not None:
            self.launched = group.stop

    def launch_phases(self) -> None:
        """Launches what is left of the phases, or rounds, of shipments that were sent, though the window is not ended.

        Other ranks may have launched it already, and what follows on the same communicator would meet that. Waits for
        other workers.
        """
        for shipment in self.shipments:
            shipment.advance(wait=True)

    def end(self) -> Outcome:
        """Sends what is left, waits for all messages, writes the means, and takes what was sent out of the residual."""
        launching = self.launching
        if launching.asks_always:
            for group in launching.late(self):
                self._ship(group)
            launching.ended(self.shipments)
        if not self.clock.instant:
            launching.lane.join()
        if not self.plain:
            launching.space.count_largest(self.step)
        shipments, self.shipments, self._phased = self.shipments, [], []  # these hold the window: no circle remains
        return self.ending.run(self, shipments)

    @property
    def repairs(self) -> bool:
        """Tensors that are not finite are averaged again, as DDP does; a loss scaler only has to see that there are."""
        return self.wary and self.scale is None

    @property
    def ready(self) -> int:
        """Places below this one have been submitted; a gradient out of its order counts when all have."""
        return self.length if self.complete else self._sequential

    @property
    def exchanged(self) -> np.ndarray:
        """Registration indices of the tensors that are fresh."""
        indices = self.launching.space.layout.indices
        return indices if self.regular else indices[self.fresh]

    def taken(self, group: Group) -> np.ndarray | None:
        """bool [T]: tensors of a group that are fresh and do not bypass the residual; None if all are.

        All are in a :attr:`regular` window.
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

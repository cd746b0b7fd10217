"""One backward window: gradients are pushed, full buffers are sent, and it ends."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from lightning_safusion.fusion.backward import BackwardPass
from lightning_safusion.fusion.ending.base import Ending, Outcome
from lightning_safusion.fusion.launching.planned import Launching
from lightning_safusion.fusion.plans.plan import Group
from lightning_safusion.fusion.shipment import Shipment


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


class Window:
    """One synchronised backward pass, from its first gradient to the moment when all of them are averaged.

    Args:
        backward: Its gradients, none so far.
        launching: Says when buffers are filled and sent.
        ending: Waits for the messages, and writes the means.
        notices: What this rank says to all.
    """

    def __init__(self, backward: BackwardPass, launching: Launching, ending: Ending, notices: Notices) -> None:
        self.backward = backward
        self.shipments: list[Shipment] = []  #: in launch order
        self._space, self._launching, self._ending, self._notices = launching.space, launching, ending, notices
        self._phased: list[Shipment] = []  # those with phases that are not launched yet

    def push(self, place: int, grad: Tensor, fresh: bool, repeated: bool, since: float) -> None:
        """Takes a gradient, and sends the buffers that are full with it.

        Args:
            place: Of its tensor in the layout.
            grad: Flat.
            fresh: Whether it was computed in this window.
            repeated: Whether the one before was thrown away, so that it must not pass through the residual.
            since: When the engine was called, by the host's clock (seconds).
        """
        backward, launching = self.backward, self._launching
        completed = backward.submit(place, grad, fresh, repeated)
        if backward.timed and not backward.clock.instant:
            backward.note_call(place, since)
        if completed is not None or launching.asks_always:
            for group in launching.closing(backward, place, grad, completed):
                self._ship(group)
        if backward.complete and not backward.plain:
            for group in launching.rest(backward):
                self._ship(group)
            if launching.late_by_one:
                self._ship(None)
        backward.calls += perf_counter() - since

    def _ship(self, group: Group | None) -> None:
        """Fills the buffer of a group, None for no other, and sends the one that can be sent now, if any."""
        with self._launching.lane.fork():
            if group is None:
                shipment = self._launching.last()
            else:
                buffer = self._space.buffers.get(group) or self._space.buffer(group)
                shipment = self._launching.fill(buffer, self.backward)
            if shipment is not None:
                shipment.pack(self._notices.own)
                shipment.launch()
                if self.backward.deferred:
                    self._ending.launched(shipment)
                self.shipments.append(shipment)
                if shipment.buffer.exchange.ability.phases:
                    self._phased.append(shipment)
                while self._phased and self._phased[0].advance(wait=False):
                    del self._phased[0]
        if group is not None:
            self.backward.launched = group.stop

    def launch_phases(self) -> None:
        """Launches what is left of the phases of shipments that were sent, though the window is not ended.

        Other ranks may have launched it already, and what follows on the same communicator would meet that. Waits for
        other workers.
        """
        for shipment in self.shipments:
            shipment.advance(wait=True)

    def end(self) -> Outcome:
        """Sends what is left, waits for all messages, writes the means, and takes what was sent out of the residual.

        Raises:
            WorkerLostError: If a peer is lost (with the buffer's tensors).
        """
        backward = self.backward
        for group in self._launching.late(backward):
            self._ship(group)
        self._launching.ended(self.shipments)
        if not backward.clock.instant:
            self._launching.lane.join()
        if not backward.plain:
            self._space.count_largest(backward.step)
        return self._ending.run(backward, self.shipments, self._notices.own)

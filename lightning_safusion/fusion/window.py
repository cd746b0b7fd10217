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
        self._advanced = 0  # so many shipments have launched all their phases

    def push(self, place: int, grad: Tensor, fresh: bool, repeated: bool, since: float) -> None:
        """Takes a gradient, and sends the buffers that are full with it.

        Args:
            place: Of its tensor in the layout.
            grad: Flat.
            fresh: Whether it was computed in this window.
            repeated: Whether the one before was thrown away, so that it must not pass through the residual.
            since: When the engine was called, by the host's clock (seconds).
        """
        backward = self.backward
        completed = backward.submit(place, grad, fresh, repeated)
        if backward.timed and not backward.clock.instant:
            backward.note_call(place, since)
        for group in self._launching.closing(backward, place, grad, completed):
            self._ship(group)
        if backward.complete and not backward.plain:
            self._ship_rest()
        backward.calls += perf_counter() - since

    def _ship_rest(self) -> None:
        for group in self._launching.rest(self.backward):
            self._ship(group)
        if self._launching.late_by_one:
            with self._launching.lane.fork():
                self._send(self._launching.last())

    def _ship(self, group: Group) -> None:
        """Fills the buffer of a group and sends what can be sent."""
        with self._launching.lane.fork():
            buffer = self._space.buffers.get(group) or self._space.buffer(group)
            self._send(self._launching.fill(buffer, self.backward))
        self.backward.launched = group.stop

    def _send(self, shipment: Shipment | None) -> None:
        if shipment is None:
            return
        shipment.pack(self._notices.own)
        shipment.launch()
        self._ending.launched(shipment)
        self.shipments.append(shipment)
        while self._advanced < len(self.shipments) and self.shipments[self._advanced].advance(wait=False):
            self._advanced += 1

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

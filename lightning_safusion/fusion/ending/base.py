"""What ends a window: the host, or the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from lightning_safusion.fusion.backward import BackwardPass
from lightning_safusion.fusion.shipment import Shipment


class Outcome(NamedTuple):
    """How a window has ended, the same on all ranks."""

    backward: BackwardPass
    shipments: Sequence[Shipment]  #: in launch order
    good: bool  #: everything was finite: what was sent has left the residual
    notices: int  #: bits of :class:`Notice` that some rank has sent


class Ending(ABC):
    """Ends windows. What a subclass leaves out does nothing: the host waits for all it begins."""

    def launched(self, shipment: Shipment) -> None:  # noqa: B027 - optional
        """A shipment of the open window, which is deferred, has been launched."""

    @abstractmethod
    def run(self, backward: BackwardPass, shipments: Sequence[Shipment], notices: int) -> Outcome:
        """Ends a window.

        Args:
            backward: Its gradients.
            shipments: Launched, in order.
            notices: Of this rank, for a window without messages, whose headers would have them.

        Raises:
            WorkerLostError: If a peer is lost (with the buffer's tensors).
        """

    def read(self) -> Outcome | None:
        """What :meth:`run` did not know yet of the last window; waits for the device. None if there is nothing."""
        return None

    def forget(self) -> None:  # noqa: B027 - optional
        """Forgets an open window, and what was not read: another rank may be lost."""

    def finish(self) -> None:  # noqa: B027 - optional
        """The host waits for what a device still does for a window that was forgotten, before another one begins."""

    @abstractmethod
    def release(self) -> bool:
        """Frees the memory; returns whether a device may not use any of it any more."""

"""What the checksums of a window say, shared by all ranks before it is committed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_safusion.comm.transport.interface import DamagedMessageError, Transport, Work
from lightning_safusion.fusion.shipment import Shipment


class Findings:
    """The damage that ranks have found in the messages of one window.

    Args:
        shipments: In launch order, the same on all ranks.
        transport: Communicator of all ranks.
    """

    def __init__(self, shipments: Sequence[Shipment], transport: Transport) -> None:
        self._shipments, self._transport = shipments, transport
        self._work: Work | None = None
        self._largest = torch.zeros(1, dtype=torch.int64)

    def share(self) -> None:
        """Tells all ranks of the first damage that this one has found. Collective."""
        for place, shipment in enumerate(self._shipments):
            if shipment.damaged:
                place_from_end, workers = len(self._shipments) - place, self._transport.world_size
                found = (place_from_end * workers + shipment.damaged[0]) * workers + self._transport.rank
                self._largest.fill_(found)
                break
        self._work = self._transport.all_reduce(self._largest, "max")

    def check(self, step: int) -> None:
        """Waits for what all ranks have found, if they share it.

        Args:
            step: Number of the window.

        Raises:
            DamagedMessageError: If that is anything; it names the first buffer, the sender and the receiver.
        """
        if self._work is None:
            return
        self._work.wait()
        found = int(self._largest)
        if not found:
            return
        rest, receiver = divmod(found, self._transport.world_size)
        place_from_end, sender = divmod(rest, self._transport.world_size)
        buffer = self._shipments[len(self._shipments) - place_from_end].buffer
        raise DamagedMessageError(
            f"a message of rank {sender} was damaged on its way to rank {receiver}, in the exchange of the buffer with "
            f"{buffer.title} in step {step}: its checksum (CRC-32C) is that of other bytes. No rank has applied "
            "anything of this step, and the residuals keep its gradients. Look for faulty memory, network cards or "
            "cables of these two workers"
        )

"""The dense all-reduce in two phases that are launched apart (DeAR: Zhang et al., ICDCS 2023, section III)."""

from __future__ import annotations

import torch

from lightning_safusion.comm.allreduce import DenseAllReduce
from lightning_safusion.comm.exchange import SpanSpec
from lightning_safusion.comm.transport import Transport, Work


class TwoPhaseAllReduce(DenseAllReduce):
    """A reduce-scatter during the backward pass, and an all-gather that may wait until the next forward pass.

    Each phase moves ``(n - 1) / n`` buffers per worker, together what a ring all-reduce does. The buffer, flags and
    notices included, is padded to a multiple of the number of workers only where it is not one already. What the ranks
    said is known after the second phase.

    Args:
        spec: Shape of the exchange; the dense runs give the dtype (the wider one where they differ).
        transport: Communicator.
        device: Where the span lives.
    """

    def __init__(self, spec: SpanSpec, transport: Transport, device: torch.device) -> None:
        super().__init__(spec, transport, device)
        share = -(-self._buffer.numel() // transport.world_size)
        self._padded = torch.zeros(share * transport.world_size, dtype=self.dtype, device=device)
        self._buffer = self._padded[: self._buffer.numel()]
        self._share = torch.zeros(share, dtype=self.dtype, device=device)
        self._gathering: Work | None = None

    @property
    def bytes_sent(self) -> int:
        return self._padded.nbytes

    @property
    def bytes_received(self) -> int:
        return 2 * (self.transport.world_size - 1) * self._share.nbytes

    def start(self) -> None:
        """Starts the first phase: every rank gets the sum of its share."""
        self.work = self.transport.reduce_scatter(self._share, self._padded)

    def start_second(self) -> None:
        """Waits for the first phase and starts the second: every rank gets the shares of all others.

        All ranks must call it in one agreed order with all other launches on this communicator.

        Raises:
            RuntimeError: If the first phase has not been started.
        """
        if self.work is None:
            raise RuntimeError("start_second needs an exchange under way: call start first")
        super().wait()
        self._gathering = self.transport.all_gather(self._padded, self._share)

    def wait(self) -> None:
        """Waits for both phases; starts the second, if nobody has done so."""
        if self.work is not None:
            self.start_second()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

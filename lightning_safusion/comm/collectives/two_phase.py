"""The dense all-reduce in two phases that are launched apart (DeAR: Zhang et al., ICDCS 2023, section III)."""

from __future__ import annotations

import torch

from lightning_safusion.comm.transport.interface import Transport, Work


class TwoPhaseSum:
    """The sum of a buffer over all ranks: a reduce-scatter, and an all-gather that may begin and end much later.

    Each phase moves ``(n - 1) / n`` buffers per worker, together what a ring all-reduce does. The buffer is padded to a
    multiple of the number of workers only where it is not one already.

    Args:
        numel: Elements of the buffer.
        dtype: Their dtype.
        transport: Communicator.
        device: Where the buffer lives.

    Attributes:
        buffer: [numel]; this rank's part before the first phase, the sum of all ranks after the second.
    """

    def __init__(self, numel: int, dtype: torch.dtype, transport: Transport, device: torch.device) -> None:
        share = -(-numel // transport.world_size)
        self._transport = transport
        self._padded = torch.zeros(share * transport.world_size, dtype=dtype, device=device)
        self._share = torch.zeros(share, dtype=dtype, device=device)
        self._scattering: Work | None = None
        self._gathering: Work | None = None
        self.buffer = self._padded[:numel]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank contributes to one sum."""
        return self._padded.nbytes

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank receives for one sum."""
        return 2 * (self._transport.world_size - 1) * self._share.nbytes

    def start(self) -> Work:
        """Starts the first phase: every rank gets the sum of its share."""
        self._scattering = self._transport.reduce_scatter(self._share, self._padded)
        return self._scattering

    def start_second(self) -> None:
        """Waits for the first phase and starts the second: every rank gets the shares of all others.

        All ranks must call it in one agreed order with all other launches on this communicator.

        Raises:
            RuntimeError: If the first phase has not been started.
        """
        if self._scattering is None:
            raise RuntimeError("start_second needs an exchange under way: call start first")
        scattering, self._scattering = self._scattering, None
        scattering.wait()
        self._gathering = self._transport.all_gather(self._padded, self._share)

    def wait(self) -> None:
        """Waits for both phases; starts the second, if nobody has done so."""
        if self._scattering is not None:
            self.start_second()
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            gathering.wait()

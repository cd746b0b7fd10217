"""Streams beside the one of the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class Lane:
    """A CUDA stream whose work runs beside the caller's; on the CPU, the caller's own order.

    Every tensor that one lane makes and another uses is kept until both have joined the stream of the backward pass, so
    the allocator never hands out its memory too early.

    Args:
        device: Where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # before the backward pass where both have work: what is selected early is exchanged early
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def fork(self) -> AbstractContextManager[None]:
        """Work inside runs in the lane, after all that the current stream has been given so far."""
        return nullcontext() if self._stream is None else self._beside(self._stream)

    @contextmanager
    def _beside(self, stream: torch.cuda.Stream) -> Iterator[None]:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """The current stream waits for all that the lane has been given so far; the host does not."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """The host waits for all that the lane has been given so far."""
        if self._stream is not None:
            self._stream.synchronize()

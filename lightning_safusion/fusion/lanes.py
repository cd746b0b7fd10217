"""Streams beside that of the backward pass, and copies to the host that it does not wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


class Lane:
    """A CUDA stream whose work runs beside the caller's; on the CPU, the caller's own order.

    Every tensor that one lane makes and another uses is kept until both have joined the stream of the backward pass, so
    the allocator never hands out its memory too early.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # before the backward pass where both have work: what is selected early is exchanged early
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        #: A context whose work runs in the lane, after all that the current stream has been given so far.
        self.fork: Callable[[], AbstractContextManager[None]] = nullcontext if self._stream is None else self._fork

    @contextmanager
    def _fork(self) -> Iterator[None]:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """The current stream waits for all that the lane has been given so far; the host does not."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """The host waits for all that the lane has been given so far."""
        if self._stream is not None:
            self._stream.synchronize()


class HostCopy:
    """Copies of tensors of one device in host memory, begun on the current stream; the host does not wait for them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        cuda = tensors[0].device.type == "cuda"
        self._copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=cuda) for tensor in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event() if cuda else None
        if self._event is not None:
            self._event.record()

    def read(self) -> list[Tensor]:
        """The copies; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies

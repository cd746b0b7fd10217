"""The end of a window where the device decides, and the host reads one window later what it decided.

For streams of an accelerator: a host that read the headers of every buffer would wait for the exchange, and the device
would then wait for the host. It needs jobs in which every tensor gets a gradient on all ranks in every window; then
only numbers that are not finite can spoil a window, and the device keeps those out of the memory by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import Notice, StreamOrderedExchange, Verdict
from lightning_safusion.fusion.buffer import FusionBuffer
from lightning_safusion.fusion.drain import Rounding, Scratch, deliver, lost
from lightning_safusion.fusion.generator import Generator
from lightning_safusion.fusion.lane import Lane
from lightning_safusion.fusion.ranges import profiler_range
from lightning_safusion.fusion.window import BufferTimes, Window


class _Mailbox:
    """Small device tensors on their way to the host.

    Args:
        device: Where they come from.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._tensors: list[Tensor] = []
        self._event = torch.cuda.Event() if self._pinned else None

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Starts the copies on the current stream."""
        if [(t.shape, t.dtype) for t in self._tensors] != [(t.shape, t.dtype) for t in tensors]:
            self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=self._pinned) for t in tensors]
        for kept, tensor in zip(self._tensors, tensors, strict=True):
            kept.copy_(tensor, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def read(self) -> list[Tensor]:
        """The copies, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class DeferredDrain:
    """Decodes every buffer as soon as its exchange ends, beside the backward pass, without the host.

    Args:
        generator: Made the buffers.
        lane: Where decoding runs.
    """

    def __init__(self, generator: Generator, lane: Lane) -> None:
        self.generator = generator
        self.lane = lane
        self._scratch = Scratch(generator.device)
        self._good: Tensor | None = None
        self._errors: list[Rounding] = []
        self._mailbox: _Mailbox | None = None
        self._unread: Window | None = None

    def forget(self) -> None:
        """Forgets an open window, and what was not read."""
        self._good, self._errors, self._unread = None, [], None

    def release(self) -> None:
        """Frees what only speeds up the next window."""
        self._scratch.release()

    def launched(self, window: Window, buffer: FusionBuffer, times: BufferTimes) -> None:
        """Queues everything that follows the exchange of a buffer: decoding, judging, writing the gradients."""
        exchange = _stream_ordered(buffer)
        with self.lane.fork():
            try:
                exchange.wait()
            except Exception as error:
                raise lost(self.generator, buffer, window, error) from error
            times.finished = times.arrived = window.mark()
            with profiler_range("decode", self.generator, buffer):
                self._decode(window, buffer, exchange)
            times.decoded = window.mark()

    def _decode(self, window: Window, buffer: FusionBuffer, exchange: StreamOrderedExchange) -> None:
        scratch = self._scratch.of(buffer)
        mean = exchange.decode(scratch)
        bad, regular = exchange.standing()
        good = regular & ~bad.any() & torch.isfinite(mean).all()
        self._good = good if self._good is None else self._good & good
        exchange.poison(mean, bad)
        mean = self.generator.memory.received(buffer.start, buffer.stop, mean)
        self._errors += deliver(window, buffer, mean)
        exchange.release(scratch)

    def run(self, window: Window) -> None:
        """Takes what was sent out of the memory if the device finds the window good; the verdict is read later."""
        awaited = window.mark()
        for _, times in window.inflight:
            times.awaited = awaited
        self.lane.join()
        good, errors = self._good, self._errors
        self.forget()
        if good is None:
            return  # a model without tensors
        for buffer, _ in window.inflight:
            self.generator.commit(buffer, (), good)
            self.generator.memory.settle(buffer.start, buffer.stop, good)
        for rounding in errors:
            self.generator.memory.add(rounding.start, rounding.stop, torch.where(good, rounding.error, 0.0))
        if self._mailbox is None:
            self._mailbox = _Mailbox(self.generator.device)
        self._mailbox.send([good, *(_stream_ordered(buffer).headers for buffer, _ in window.inflight)])
        self._unread = window

    def read(self) -> tuple[Window, bool, int] | None:
        """What the device decided about the last window; None if that has been read.

        Returns:
            The window, whether it ended well, and the notices (bits of ``Notice``) of all ranks.

        Raises:
            RuntimeError: If tensors had a gradient on some ranks only, which this drain cannot average.
        """
        window, self._unread = self._unread, None
        if window is None or self._mailbox is None:
            return None
        good, *headers = self._mailbox.read()
        verdicts = [
            _stream_ordered(buffer).verdict(copy) for (buffer, _), copy in zip(window.inflight, headers, strict=True)
        ]
        notices = int(np.bitwise_or.reduce([verdict.notices for verdict in verdicts]))
        if not notices & Notice.FAILED:
            self._refuse_irregular(window, verdicts)
        return window, bool(good), notices

    def _refuse_irregular(self, window: Window, verdicts: Sequence[Verdict]) -> None:
        world_size = self.generator.pool.transport.world_size
        places = [
            buffer.group.start + int(t)
            for (buffer, _), verdict in zip(window.inflight, verdicts, strict=True)
            for t in np.flatnonzero((verdict.fresh < world_size) | verdict.raw)
        ]
        if places:
            names = self.generator.layout.names(places)
            raise RuntimeError(
                f"{len(names)} parameters ({', '.join(names[:8])}) got a gradient on some ranks only in step "
                f"{window.step}: the gradients of that step were wrong. Pass find_unused_parameters=True to the "
                "strategy (by name: 'safusion_find_unused_parameters_true')."
            )


def _stream_ordered(buffer: FusionBuffer) -> StreamOrderedExchange:
    if not isinstance(buffer.exchange, StreamOrderedExchange):
        raise TypeError(f"{type(buffer.exchange).__name__} needs the host at the end of every window")
    return buffer.exchange

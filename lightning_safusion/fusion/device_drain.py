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
from lightning_safusion.fusion.delivery import Rounding, Scratch, deliver
from lightning_safusion.fusion.lane import Lane
from lightning_safusion.fusion.shipment import NO_RANGE, Shipment, Stage
from lightning_safusion.fusion.window import Window
from lightning_safusion.sparsify.memory.contract import Memory


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


class DeviceDrain:
    """Decodes every shipment as soon as its exchange ends, beside the backward pass, without the host.

    Args:
        memory: Error feedback.
        lane: Where decoding runs.
        device: Where gradients live.
    """

    def __init__(self, memory: Memory, lane: Lane, device: torch.device) -> None:
        self.memory = memory
        self.lane = lane
        self.device = device
        self._scratch = Scratch(device)
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

    def launched(self, shipment: Shipment) -> None:
        """Queues everything that follows the exchange of a shipment: decoding, judging, writing the gradients."""
        with self.lane.fork():
            shipment.wait()
            shipment.finished = shipment.arrived
            with shipment.range("decode") if shipment.window.profiled else NO_RANGE:
                self._decode(shipment)
            shipment.decoded = shipment.window.mark()
            shipment.stage = Stage.DECODED

    def _decode(self, shipment: Shipment) -> None:
        buffer, exchange = shipment.buffer, _stream_ordered(shipment)
        scratch = self._scratch.of(buffer)
        mean = exchange.decode(scratch)
        bad, regular = exchange.standing()
        good = regular & ~bad.any() & torch.isfinite(mean).all()
        self._good = good if self._good is None else self._good & good
        exchange.poison(mean, bad)
        mean = self.memory.received(buffer.start, buffer.stop, mean)
        self._errors += deliver(shipment.window, buffer, mean)
        exchange.release(scratch)

    def run(self, window: Window) -> None:
        """Takes what was sent out of the memory if the device finds the window good; the verdict is read later."""
        awaited = window.mark()
        for shipment in window.shipments:
            shipment.awaited = awaited
        self.lane.join()
        good, errors = self._good, self._errors
        self.forget()
        if good is None:
            return  # a model without tensors
        for shipment in window.shipments:
            shipment.commit(good=good)
            self.memory.settle(shipment.buffer.start, shipment.buffer.stop, good)
        for rounding in errors:
            self.memory.add(rounding.start, rounding.stop, torch.where(good, rounding.error, 0.0))
        if self._mailbox is None:
            self._mailbox = _Mailbox(self.device)
        self._mailbox.send([good, *(_stream_ordered(shipment).headers for shipment in window.shipments)])
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
        for shipment, copy in zip(window.shipments, headers, strict=True):
            shipment.verdict = _stream_ordered(shipment).verdict(copy)
        notices = int(np.bitwise_or.reduce([s.verdict.notices for s in window.shipments if s.verdict is not None]))
        if not notices & Notice.FAILED:
            _refuse_irregular(window)
        return window, bool(good), notices


def _refuse_irregular(window: Window) -> None:
    names = [
        shipment.buffer.names[int(t)]
        for shipment in window.shipments
        for t in np.flatnonzero(_irregular(shipment, shipment.verdict))
    ]
    if names:
        raise RuntimeError(
            f"{len(names)} parameters ({', '.join(names[:8])}) got a gradient on some ranks only in step "
            f"{window.step}: the gradients of that step were wrong. Pass find_unused_parameters=True to the "
            "strategy (by name: 'safusion_find_unused_parameters_true')."
        )


def _irregular(shipment: Shipment, verdict: Verdict | None) -> np.ndarray:
    if verdict is None:
        return np.zeros(0, bool)
    return (verdict.fresh < shipment.buffer.exchange.transport.world_size) | verdict.bypass


def _stream_ordered(shipment: Shipment) -> StreamOrderedExchange:
    exchange = shipment.buffer.exchange
    if not isinstance(exchange, StreamOrderedExchange):
        raise TypeError(f"{type(exchange).__name__} needs the host at the end of every window")
    return exchange

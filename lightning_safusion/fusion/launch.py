"""Buffers on their way out: selected from, packed, and handed to their collectives in one agreed order."""

from __future__ import annotations

from torch import Tensor

from lightning_safusion.comm.transport import Transport
from lightning_safusion.fusion.buffer import FusionBuffer
from lightning_safusion.fusion.deferred import DeferredDrain
from lightning_safusion.fusion.drain import lost
from lightning_safusion.fusion.generator import Generator
from lightning_safusion.fusion.lane import Lane
from lightning_safusion.fusion.offload import Offloader
from lightning_safusion.fusion.plans.plan import Group
from lightning_safusion.fusion.ranges import profiler_range
from lightning_safusion.fusion.window import BufferTimes, Window


class Launcher:
    """Fills the buffers of complete groups and starts their exchanges.

    A rank that fails to fill a buffer takes part in its exchange all the same, with an empty message that says so; the
    error is kept in the window, and no later buffer of it is filled.

    Args:
        generator: Fills the buffers.
        transport: Communicator of the buffers.
        deferred: Told of every launch of a window that the device ends.
        offload: Selects from some tensors on a thread of the host.
    """

    def __init__(
        self, generator: Generator, transport: Transport, deferred: DeferredDrain | None, offload: Offloader | None
    ) -> None:
        self.generator = generator
        self.transport = transport
        self.lane = Lane(generator.device)  # selection and packing
        self._deferred = deferred
        self._offload = offload

    def offer(self, window: Window, place: int, grad: Tensor) -> None:
        """Lets the host select from a tensor before its buffer is complete, if that is worth while."""
        if self._offload is None or not window.groups or not self._offload.wants(place):
            return
        if window.error is not None or not window.fresh[place] or window.raw[place]:
            return
        try:
            with self.lane.fork():
                self._offload.take(window, place, grad)
        except Exception as error:
            window.error = error

    def launch(self, window: Window, group: Group, notices: int) -> None:
        """Fills the buffer of a group and sends it; one that waits for the host leaves behind the next one.

        Args:
            window: The window that the group belongs to.
            group: All of its tensors have been submitted.
            notices: What this rank tells all others (bits of ``Notice``).

        Raises:
            RuntimeError: If the exchange cannot be started, with the buffer's tensors.
        """
        times = BufferTimes()
        with self.lane.fork():
            times.closed = window.mark()
            buffer = self.generator.buffer(group)
            window.unsent.append((buffer, times, self._fill(window, buffer)))
            self._send(window, notices, keep=int(self._offload is not None and self._offload.late))
        window.launched = group.stop

    def flush(self, window: Window, notices: int) -> None:
        """Sends the buffers that have been filled and not sent yet; otherwise as :meth:`launch`."""
        if window.unsent:
            with self.lane.fork():
                self._send(window, notices)

    def _fill(self, window: Window, buffer: FusionBuffer) -> Tensor | None:
        """Selects from the tensors of a buffer, and returns their flags; None if this rank cannot."""
        if window.error is not None:
            return None
        try:
            part = slice(buffer.group.start, buffer.group.stop)
            grads, fresh, raw = window.grads_of(buffer.group), window.fresh[part], window.raw[part]
            early, known = ((), None) if self._offload is None else self._offload.taken(buffer)
            with profiler_range("select", self.generator, buffer):
                flags = self.generator.select(buffer, grads, fresh, raw, window.step, window.scale, early)
                return flags if known is None else flags | known
        except Exception as error:
            window.error = error
            return None

    def _send(self, window: Window, notices: int, keep: int = 0) -> None:
        """Packs and launches the buffers that have been closed, all but the latest ``keep``."""
        while len(window.unsent) > keep:
            buffer, times, flags = window.unsent.pop(0)
            self._pack(window, buffer, times, flags, notices)
            self._exchange(window, buffer, times)

    def _exchange(self, window: Window, buffer: FusionBuffer, times: BufferTimes) -> None:
        times.launched = window.mark()  # before: it may have ended by the time that the call returns
        try:
            with profiler_range("exchange", self.generator, buffer):
                buffer.exchange.start()
        except Exception as error:
            raise lost(self.generator, buffer, window, error) from error
        times.issued = window.mark()
        if buffer.exchange.work is not None and window.timed and not self.transport.stream_ordered:
            buffer.exchange.work.on_done(times.finish)
        if self._deferred is not None and window.deferred:
            self._deferred.launched(window, buffer, times)
        window.inflight.append((buffer, times))

    def _pack(
        self, window: Window, buffer: FusionBuffer, times: BufferTimes, flags: Tensor | None, notices: int
    ) -> None:
        """Fills a message; a rank that cannot still takes part, so that no other rank waits for it for ever."""
        if flags is None:
            self.generator.leave_empty(buffer, notices)
            return
        try:
            if self._offload is not None:
                self._offload.collect(buffer)
            times.selected = window.mark()
            self.generator.pack(buffer, flags, notices)
        except Exception as error:
            window.error = error
            self.generator.leave_empty(buffer, notices)

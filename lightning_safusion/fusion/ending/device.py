"""Streams beside the backward pass, and the end of a window where the device decides.

A host that read the headers of every buffer would wait for the exchange, and the device would then wait for the host.
Where every tensor gets a gradient on all ranks in every window, only numbers that are not finite can spoil one, and the
device keeps those out of the residual by itself. The host reads one window later what the device has decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import Notice, StreamOrderedExchange, Verdict
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.ending.host import HostEnding
from lightning_safusion.fusion.fused import IRREGULAR, NOT_FINITE, FusedPath, FusedShipment
from lightning_safusion.fusion.gradients import Scratch, deliver
from lightning_safusion.fusion.lanes import HostCopy, Lane
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.space import GradientSpace
from lightning_safusion.fusion.window import Outcome, Window


class DeviceEnding(HostEnding):
    """Decodes every shipment as soon as its exchange ends, beside the backward pass, without the host.

    Windows that are not deferred, and plain ones, end as those of a :class:`HostEnding`, whose arguments it takes.
    """

    defers = True

    def __init__(self, space: GradientSpace, transport: Transport, fused: FusedPath) -> None:
        super().__init__(space, transport, fused)
        self._lane = Lane(space.device)
        # It has no work of its own: a moment that is recorded there is not behind the decoding of another buffer.
        self._arrivals = Lane(space.device)
        self._phases = Lane(space.device)  # what the later phases of an exchange need: no buffer waits for another's
        self._beside = Scratch(space.device)
        # bool, of the open window so far without fused shipments: whether all is well, and all means are finite
        self._found: tuple[Tensor, Tensor] | None = None
        self._queued: list[Shipment] = []  # in the lanes: their memory is in use
        # a window whose end the host has not read yet, and what it will read
        self._unread: tuple[Window, Sequence[Shipment], HostCopy] | None = None

    def forget(self) -> None:
        """The lanes go on with an open window, and may wait for a worker that is lost: the host does not wait for them
        here, after an error. What they use is kept until :meth:`finish`.
        """
        super().forget()
        self._found = self._unread = None
        self._fused.forget()

    def finish(self) -> None:
        if self._queued:
            self._phases.synchronize()
            self._arrivals.synchronize()
            self._lane.synchronize()
            self._queued = []
            self._fused.forget()  # they may have found something wrong since

    def release(self) -> bool:
        super().release()
        if not self._queued:
            self._beside.release()
        return not self._queued

    def launched(self, shipment: Shipment) -> None:
        """Queues everything that follows the exchange of a shipment: decoding, judging, writing the gradients."""
        self._queued.append(shipment)
        if shipment.buffer.exchange.ability.phases:
            with self._phases.fork():
                shipment.advance(wait=True)
        with self._arrivals.fork():
            if shipment.buffer.exchange.ability.phases:
                self._phases.join()  # what makes the headers, where no later collective is waited for
            shipment.wait()
            shipment.finished = shipment.arrived
            with self._lane.fork():
                with shipment.range("decode"):
                    if isinstance(shipment, FusedShipment):
                        shipment.decode_means(self._fused.windows.status)
                    else:
                        self._decode(shipment)
                shipment.decoded = shipment.window.mark()

    def _decode(self, shipment: Shipment) -> None:
        buffer, exchange = shipment.buffer, _stream_ordered(shipment)
        scratch = self._beside.of(buffer)
        mean = exchange.decode(scratch)
        bad, regular = exchange.standing()
        finite = torch.isfinite(mean).all()
        good = regular & finite
        self._found = (good, finite) if self._found is None else (self._found[0] & good, self._found[1] & finite)
        exchange.poison(mean, bad)
        mean = buffer.memory.received(buffer.start, buffer.stop, mean)
        shipment.rounding = deliver(shipment.window, buffer, mean)
        exchange.release(scratch)

    def run(self, window: Window, shipments: Sequence[Shipment]) -> Outcome:
        """Takes what was sent out of the residual if the device finds the window good: :meth:`read` says whether."""
        if window.plain or not window.deferred:
            return super().run(window, shipments)
        awaited = window.mark()
        for shipment in shipments:
            shipment.awaited = awaited
        self._lane.join()
        self._queued = []
        found, self._found = self._found, None
        if shipments:  # none: a model without tensors
            self._unread = window, shipments, self._commit(shipments, found)
        if window.error is not None:
            raise window.error
        return Outcome(window, shipments, True, 0)

    def _commit(self, shipments: Sequence[Shipment], found: tuple[Tensor, Tensor] | None) -> HostCopy:
        """Commits all shipments if everything is well; ``found``: of those that are not fused."""
        fused, others = _parted(shipments)
        decided = []
        if found is not None:
            good, finite = found
            decided = [torch.stack(found)]
            if fused:
                status = self._fused.windows.status
                status.bitwise_or_(torch.where(finite, torch.where(good, 0, IRREGULAR), NOT_FINITE))
                good = (status == 0).all()
            for shipment in others:
                shipment.commit(good)
        if fused:
            self._fused.commit(fused)
            decided = [self._fused.windows.verdicts]
        return HostCopy([*decided, *(_stream_ordered(shipment).headers for shipment in others)])

    def read(self) -> Outcome | None:
        """What is not known yet of the last window; waits for the device. None if there is nothing.

        Raises:
            RuntimeError: If tensors had a gradient on some ranks only, which this ending cannot average.
        """
        if self._unread is None:
            return super().read()
        (window, shipments, copies), self._unread = self._unread, None
        good = self._read(shipments, copies)
        notices, irregular = 0, []
        for shipment in shipments:
            verdict = cast(Verdict, shipment.verdict)
            notices |= verdict.notices
            missing = (verdict.fresh < shipment.buffer.exchange.transport.world_size) | verdict.bypass
            irregular += [shipment.buffer.names[t] for t in np.flatnonzero(missing).tolist()]
        if irregular and not notices & Notice.FAILED:
            raise RuntimeError(
                f"{len(irregular)} parameters ({', '.join(irregular[:8])}) got a gradient on some ranks only in step "
                f"{window.step}: the gradients of that step were wrong. Pass find_unused_parameters=True to the "
                "strategy (by name: 'safusion_find_unused_parameters_true'), or to the DistributedDataParallel that "
                "was attached."
            )
        return Outcome(window, shipments, good, notices)

    def _read(self, shipments: Sequence[Shipment], copies: HostCopy) -> bool:
        fused, others = _parted(shipments)
        decided, *headers = copies.read()
        found: dict[Shipment, Tensor] = dict(zip(others, headers, strict=True))
        if fused:
            status, own = self._fused.windows.read(decided, [shipment.kernels for shipment in fused])
            found |= dict(zip(fused, own, strict=True))
        else:
            good, finite = decided.tolist()
            status = 0 if good else IRREGULAR if finite else NOT_FINITE
        for shipment, headers_of in found.items():
            shipment.verdict = verdict = _stream_ordered(shipment).verdict(headers_of)
            if status:  # of a mean that is not finite, or a damaged message, it does not say in which tensor
                shipment.sound = ~verdict.bad & (status == IRREGULAR)
        return status == 0


def _parted(shipments: Sequence[Shipment]) -> tuple[list[FusedShipment], list[Shipment]]:
    fused = [shipment for shipment in shipments if isinstance(shipment, FusedShipment)]
    return fused, [shipment for shipment in shipments if not isinstance(shipment, FusedShipment)]


def _stream_ordered(shipment: Shipment) -> StreamOrderedExchange:
    return cast(StreamOrderedExchange, shipment.buffer.exchange)  # the engine is built without this ending for others

"""Streams beside the backward pass, and the end of a window where the device decides.

A host that read the headers of every buffer would wait for the exchange, and the device would then wait for the host.
Where every tensor gets a gradient on all ranks in every window, only numbers that are not finite can spoil one, and the
device keeps those out of the residual by itself. The host reads one window later what the device has decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import Notice, StreamOrderedExchange, Verdict
from lightning_safusion.fusion.backward import BackwardPass
from lightning_safusion.fusion.ending.base import Ending, Outcome
from lightning_safusion.fusion.fused import IRREGULAR, NOT_FINITE, FusedPath, FusedShipment
from lightning_safusion.fusion.gradients import Scratch, deliver
from lightning_safusion.fusion.lanes import HostCopy, Lane
from lightning_safusion.fusion.shipment import Shipment


class _Unread(NamedTuple):
    """A window whose end the host has not read yet, and what it will read."""

    backward: BackwardPass
    shipments: Sequence[Shipment]
    copies: HostCopy


class DeviceEnding(Ending):
    """Decodes every shipment as soon as its exchange ends, beside the backward pass, without the host.

    Args:
        device: Where the gradients are.
        fused: The kernels of buffers that have some.
    """

    def __init__(self, device: torch.device, fused: FusedPath) -> None:
        self._lane = Lane(device)
        # It has no work of its own: a moment that is recorded there is not behind the decoding of another buffer.
        self._arrivals = Lane(device)
        self._phases = Lane(device)  # what the later phases of an exchange need: no buffer waits for another's
        self._fused = fused
        self._scratch = Scratch(device)
        # bool, of the open window so far without fused shipments: whether all is well, and all means are finite
        self._found: tuple[Tensor, Tensor] | None = None
        self._queued: list[Shipment] = []  # in the lanes: their memory is in use
        self._unread: _Unread | None = None

    def forget(self) -> None:
        """Forgets an open window, and what was not read.

        The lanes go on with it, and may wait for a worker that is lost: the host does not wait for them here, after an
        error. What they use is kept until :meth:`finish`.
        """
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
        if not self._queued:
            self._scratch.release()
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
                shipment.decoded = shipment.backward.mark()

    def _decode(self, shipment: Shipment) -> None:
        buffer, exchange = shipment.buffer, _stream_ordered(shipment)
        scratch = self._scratch.of(buffer)
        mean = exchange.decode(scratch)
        bad, regular = exchange.standing()
        finite = torch.isfinite(mean).all()
        good = regular & finite
        self._found = (good, finite) if self._found is None else (self._found[0] & good, self._found[1] & finite)
        exchange.poison(mean, bad)
        mean = buffer.memory.received(buffer.start, buffer.stop, mean)
        shipment.rounding = deliver(shipment.backward, buffer, mean)
        exchange.release(scratch)

    def run(self, backward: BackwardPass, shipments: Sequence[Shipment], notices: int) -> Outcome:
        """Takes what was sent out of the residual if the device finds the window good: :meth:`read` says whether.

        Raises:
            Exception: The error of the window.
        """
        awaited = backward.mark()
        for shipment in shipments:
            shipment.awaited = awaited
        self._lane.join()
        self._queued = []
        found, self._found = self._found, None
        if shipments:  # none: a model without tensors
            self._unread = self._commit(backward, shipments, found)
        if backward.error is not None:
            raise backward.error
        return Outcome(backward, shipments, True, 0)

    def _commit(
        self, backward: BackwardPass, shipments: Sequence[Shipment], found: tuple[Tensor, Tensor] | None
    ) -> _Unread:
        """Commits all shipments if everything is well; ``found``: of those that are not fused."""
        fused = [shipment for shipment in shipments if isinstance(shipment, FusedShipment)]
        others = [shipment for shipment in shipments if not isinstance(shipment, FusedShipment)]
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
        return _Unread(backward, shipments, HostCopy([*decided, *(_stream_ordered(s).headers for s in others)]))

    def read(self) -> Outcome | None:
        """What the device has decided about the last window; waits for that.

        Raises:
            RuntimeError: If tensors had a gradient on some ranks only, which this ending cannot average.
        """
        if self._unread is None:
            return None
        unread, self._unread = self._unread, None
        backward, shipments, good = unread.backward, unread.shipments, self._read(unread)
        notices, irregular = 0, []
        for shipment in shipments:
            verdict = cast(Verdict, shipment.verdict)
            notices |= verdict.notices
            missing = (verdict.fresh < shipment.buffer.exchange.transport.world_size) | verdict.bypass
            irregular += [shipment.buffer.names[t] for t in np.flatnonzero(missing).tolist()]
        if irregular and not notices & Notice.FAILED:
            raise RuntimeError(
                f"{len(irregular)} parameters ({', '.join(irregular[:8])}) got a gradient on some ranks only in step "
                f"{backward.step}: the gradients of that step were wrong. Pass find_unused_parameters=True to the "
                "strategy (by name: 'safusion_find_unused_parameters_true')."
            )
        return Outcome(backward, shipments, good, notices)

    def _read(self, unread: _Unread) -> bool:
        """Whether the window was good; gives all shipments their verdicts, and says which tensors are sound."""
        fused = [shipment for shipment in unread.shipments if isinstance(shipment, FusedShipment)]
        others = [shipment for shipment in unread.shipments if not isinstance(shipment, FusedShipment)]
        decided, *headers = unread.copies.read()
        found = dict(zip(others, headers, strict=True))
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


def _stream_ordered(shipment: Shipment) -> StreamOrderedExchange:
    return cast(StreamOrderedExchange, shipment.buffer.exchange)  # the engine is built without this ending for others

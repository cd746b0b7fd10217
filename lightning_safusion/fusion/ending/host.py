"""The end of a window where the host decides: it waits for every shipment and acts on the flags of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import Notice, all_finite
from lightning_safusion.comm.transport.interface import DamagedMessageError, Transport, Work
from lightning_safusion.fusion.fused import FusedPath, FusedShipment
from lightning_safusion.fusion.gradients import Scratch, withdraw
from lightning_safusion.fusion.lanes import HostCopy
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.space import GradientSpace
from lightning_safusion.fusion.window import Outcome, Window

# Elements that share an all-reduce where gradients are averaged in place: latency counts for no more than these bytes.
_TOGETHER = 1 << 18


class HostEnding:
    """Ends windows: waits for the messages, writes the means, and takes what was sent out of the residual.

    ``transport`` averages gradients in place; ``fused``: the kernels of buffers that have some.
    """

    defers: ClassVar[bool] = False  #: knows how to end a window that is deferred

    def __init__(self, space: GradientSpace, transport: Transport, fused: FusedPath) -> None:
        self._space, self._transport, self._fused = space, transport, fused
        self._scratch = Scratch(space.device)
        self._warned = False
        # whether some rank has said each notice, in a window that did not wait
        self._told: tuple[Window, HostCopy] | None = None

    def launched(self, shipment: Shipment) -> None:
        """A shipment of the open window, which is deferred, has been launched."""

    def run(self, window: Window, shipments: Sequence[Shipment]) -> Outcome:
        """Ends a window whose shipments have been launched in this order."""
        if window.plain:
            return self._average_all(window)
        self._decode_all(window, shipments)
        fused: list[FusedShipment] = []
        again: list[int] = []
        odd: list[int] = []  # those of them of which some ranks have sent nothing
        good, notices = True, 0
        for shipment in shipments:
            if isinstance(shipment, FusedShipment):
                fused.append(shipment)
                shipment.judge()
            good &= shipment.sound is None
            if (verdict := shipment.verdict) is not None:
                notices |= verdict.notices
                if shipment.repaired:
                    places, irregular = shipment.buffer.places, verdict.irregular(self._transport.world_size)
                    again += [places[tensor] for tensor in shipment.repaired]
                    odd += [places[tensor] for tensor in shipment.repaired if irregular[tensor]]
        if not notices & Notice.FAILED:
            if again:
                self._average_again(window, again, self._space.layout.names(odd))
            if fused:
                self._fused.commit(fused, good)
            for shipment in shipments:
                if good and not isinstance(shipment, FusedShipment):
                    shipment.commit()
        return Outcome(window, shipments, good, notices)

    def _decode_all(self, window: Window, shipments: Sequence[Shipment]) -> None:
        for shipment in shipments:
            if shipment.buffer.exchange.ability.phases:
                shipment.advance(wait=True)
        if window.wary:
            self._copy_if_bad(window, shipments)
        if self._space.transport.sealed:
            self._decode_verified(window, shipments)
        else:
            for shipment in shipments:
                shipment.wait()
                shipment.decode(self._scratch)

    def _decode_verified(self, window: Window, shipments: Sequence[Shipment]) -> None:
        """Ranks agree on the checksums of all messages before anything leaves the residual."""
        workers, damage = self._transport.world_size, torch.zeros(1, dtype=torch.int64)
        work: Work | None = None
        for shipment in shipments:
            shipment.wait()
            if shipment.damaged and not damage:
                from_end = len(shipments) - shipments.index(shipment)
                damage.fill_((from_end * workers + shipment.damaged[0]) * workers + self._transport.rank)
            damaged = bool(damage)
            if shipment is shipments[-1]:
                work = self._transport.all_reduce(damage, "max")  # under way while the last buffer is decoded
            if not damaged:
                shipment.decode(self._scratch)
        if work is None:
            return
        work.wait()
        if found := int(damage):
            rest, receiver = divmod(found, workers)
            from_end, sender = divmod(rest, workers)
            raise DamagedMessageError(
                f"a message of rank {sender} was damaged on its way to rank {receiver}, in the exchange of the buffer "
                f"with {shipments[-from_end].buffer.title} in step {window.step}: its checksum (CRC-32C) is that of "
                "other bytes. No rank has applied anything of this step, and the residuals keep its gradients. Look "
                "for faulty memory, network cards or cables of these two workers"
            )

    def _copy_if_bad(self, window: Window, shipments: Sequence[Shipment]) -> None:
        """Means take the places of gradients, which may have to leave the residual again."""
        for shipment in shipments:
            shipment.wait()
        if any(shipment.buffer.exchange.verdict().bad.any() for shipment in shipments):
            window.copies = {place: grad.clone() for place, grad in enumerate(window.grads_of(0, window.length))}

    def _average_again(self, window: Window, places: Sequence[int], odd: Sequence[str]) -> None:
        """As DDP does, without their residuals; ``odd``: names of those that some ranks have not sent."""
        if odd:
            self._warn(odd)
        grads = {place: window.grads_of(place, place + 1)[0] for place in places}
        withdraw(self._space.memory, window, grads)
        for place in places:
            window.copies.pop(place, None)
        self.average(list(grads.values()))

    def read(self) -> Outcome | None:
        """What :meth:`run` did not know yet of the last window; waits for the device. None if there is nothing."""
        told, self._told = self._told, None
        return None if told is None else Outcome(told[0], (), True, _notices(told[1].read()[0].tolist()))

    def forget(self) -> None:
        """Forgets an open window, and what was not read: another rank may be lost."""
        self._told = None

    def finish(self) -> None:
        """The host waits for what a device still does for a window that was forgotten, before another one begins."""

    def release(self) -> bool:
        """Frees the memory; returns whether a device may not use any of it any more."""
        self._scratch.release()
        return True

    def _average_all(self, window: Window) -> Outcome:
        """If deferred, it knows neither notices nor whether all are finite."""
        said = torch.zeros(len(Notice), dtype=torch.float32, device=self._space.device)
        for place, notice in enumerate(Notice):
            if window.notices.own & notice:
                said[place : place + 1].fill_(1.0)
        if window.deferred:
            self._transport.all_reduce(said).wait()
            self._told = window, HostCopy([said])
            present, heard = np.ones(window.length, bool), 0
        else:
            said = torch.cat([torch.from_numpy(window.fresh).to(said), said])
            self._transport.all_reduce(said).wait()
            sums = said.cpu().numpy()
            present, heard = sums[: window.length] > 0, _notices(sums[window.length :].tolist())
        grads = []
        for place in np.flatnonzero(present).tolist():
            grads += window.grads_of(place, place + 1)
            if not window.fresh[place]:
                grads[-1].zero_()
        self.average(grads)
        return Outcome(window, (), window.deferred or all(map(all_finite, grads)), heard)

    def average(self, grads: Sequence[Tensor]) -> None:
        """Writes the means over ranks into flat gradients, as DDP does. Collective."""
        sent = []
        for few in _pieces(grads):
            flat = few[0] if len(few) == 1 else torch.cat(few)
            flat.mul_(1.0 / self._transport.world_size)
            sent.append((few, flat, self._transport.all_reduce(flat)))
        for few, flat, work in sent:
            work.wait()
            if len(few) > 1:
                torch._foreach_copy_(few, list(flat.split([len(grad) for grad in few])))

    def _warn(self, names: Sequence[str]) -> None:
        if self._warned or self._transport.rank != 0:
            return
        self._warned = True
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        warnings.warn(
            f"{len(names)} tensors ({shown}) were computed on some ranks only, or computed again before their "
            "optimizer stepped; such gradients are exchanged dense. In manual optimization, toggle_optimizer and "
            "untoggle_optimizer keep tensors out of backward passes whose gradients are thrown away, and "
            "`with trainer.strategy.model.no_sync():` around all but the last backward pass of a step accumulates "
            "without sending.",
            stacklevel=2,
        )


def _notices(ranks: Sequence[float]) -> int:
    """Bits of ``Notice``, from how many ranks have said each."""
    return sum(notice for notice, said in zip(Notice, ranks, strict=True) if said > 0)


def _pieces(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type that are small together; a large one alone, so that it need not be copied."""
    few: list[Tensor] = []
    numel = 0
    for grad in grads:
        if few and (grad.dtype != few[0].dtype or numel + grad.numel() > _TOGETHER):
            yield few
            few, numel = [], 0
        few.append(grad)
        numel += grad.numel()
    if few:
        yield few

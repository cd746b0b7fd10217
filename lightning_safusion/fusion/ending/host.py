"""The end of a window where the host decides: it waits for every shipment and acts on the flags of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import Notice, all_finite
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.backward import BackwardPass
from lightning_safusion.fusion.ending.base import Ending, Outcome
from lightning_safusion.fusion.ending.damage import Findings
from lightning_safusion.fusion.fused import FusedPath, FusedShipment
from lightning_safusion.fusion.gradients import Scratch, withdraw
from lightning_safusion.fusion.lanes import HostCopy
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.space import GradientSpace

# Elements that share an all-reduce where gradients are averaged in place: latency counts for no more than these bytes.
_TOGETHER = 1 << 18


class HostEnding(Ending):
    """Writes the means of a complete window into its gradients, and takes what was sent out of the residual.

    Args:
        space: The flat gradient space.
        transport: Communicator for gradients that are averaged in place.
        fused: The kernels of buffers that have some.
    """

    def __init__(self, space: GradientSpace, transport: Transport, fused: FusedPath) -> None:
        self._space, self._transport, self._fused = space, transport, fused
        self._scratch = Scratch(space.device)
        self._warned = False
        # whether some rank has said each notice, in a window that did not wait
        self._unread: tuple[BackwardPass, HostCopy] | None = None

    def run(self, backward: BackwardPass, shipments: Sequence[Shipment], notices: int) -> Outcome:
        if backward.plain:
            return self._average_all(backward, notices)
        again: list[int] = []
        odd: list[int] = []  # those of them of which some ranks have sent nothing
        notices = 0
        for shipment in shipments:
            if shipment.buffer.exchange.ability.phases:
                shipment.advance(wait=True)
        if backward.wary:
            self._copy_if_bad(backward, shipments)
        good, fused = True, [shipment for shipment in shipments if isinstance(shipment, FusedShipment)]
        if self._space.transport.sealed:
            self._decode_verified(backward, shipments)
        else:
            for shipment in shipments:
                shipment.wait()
                shipment.decode(self._scratch)
        for shipment in fused:
            shipment.judge()
        for shipment in shipments:
            good &= shipment.sound is None
            if (verdict := shipment.verdict) is not None:
                notices |= verdict.notices
                if shipment.repaired:
                    places, irregular = shipment.buffer.places, verdict.irregular(self._transport.world_size)
                    again += [places[tensor] for tensor in shipment.repaired]
                    odd += [places[tensor] for tensor in shipment.repaired if irregular[tensor]]
        if notices & Notice.FAILED:
            return Outcome(backward, shipments, False, notices)
        if odd:
            self._warn(self._space.layout.names(odd))
        if again:
            self._average_again(backward, again)
        if fused:
            self._fused.commit(fused, good)
        for shipment in shipments:
            if good and not isinstance(shipment, FusedShipment):
                shipment.commit()
        return Outcome(backward, shipments, good, notices)

    def _decode_verified(self, backward: BackwardPass, shipments: Sequence[Shipment]) -> None:
        """Writes the means of all messages; ranks agree on their checksums before anything leaves the residual.

        Raises:
            DamagedMessageError: On all ranks, if a message was damaged on its way to one.
        """
        findings, damaged = Findings(shipments, self._transport), False
        for shipment in shipments:
            shipment.wait()
            damaged |= bool(shipment.damaged)
            if shipment is shipments[-1]:
                findings.share()  # under way while the last buffer is decoded
            if not damaged:
                shipment.decode(self._scratch)
        findings.check(backward.step)

    def _copy_if_bad(self, backward: BackwardPass, shipments: Sequence[Shipment]) -> None:
        """Copies this rank's gradients where some tensor is not finite: means take their places, and they may have to
        leave the residual again."""
        for shipment in shipments:
            shipment.wait()
        if any(shipment.buffer.exchange.verdict().bad.any() for shipment in shipments):
            backward.copies = {place: grad.clone() for place, grad in enumerate(backward.grads_of(0, backward.length))}

    def _average_again(self, backward: BackwardPass, places: Sequence[int]) -> None:
        """Averages gradients in place, as DDP does, without their residuals."""
        grads = {place: backward.grads_of(place, place + 1)[0] for place in places}
        withdraw(self._space.memory, backward, grads)
        for place in places:
            backward.copies.pop(place, None)
        self.average(list(grads.values()))

    def read(self) -> Outcome | None:
        """Notices of a window that had no messages and did not wait."""
        unread, self._unread = self._unread, None
        return None if unread is None else Outcome(unread[0], (), True, _notices(unread[1].read()[0].tolist()))

    def forget(self) -> None:
        self._unread = None

    def release(self) -> bool:
        self._scratch.release()
        return True

    def _average_all(self, backward: BackwardPass, notices: int) -> Outcome:
        """Averages all gradients in place. If deferred, it knows neither notices nor whether all are finite."""
        told = torch.zeros(len(Notice), dtype=torch.float32, device=self._space.device)
        for place, notice in enumerate(Notice):
            if notices & notice:
                told[place : place + 1].fill_(1.0)
        if backward.deferred:
            self._transport.all_reduce(told).wait()
            self._unread = backward, HostCopy([told])
            present, heard = np.ones(backward.length, bool), 0
        else:
            fresh = torch.from_numpy(backward.fresh).to(self._space.device, torch.float32)
            said = torch.cat([fresh, told])
            self._transport.all_reduce(said).wait()
            sums = said.cpu().numpy()
            present, heard = sums[: backward.length] > 0, _notices(sums[backward.length :].tolist())
        grads = []
        for place in np.flatnonzero(present).tolist():
            grads += backward.grads_of(place, place + 1)
            if not backward.fresh[place]:
                grads[-1].zero_()
        self.average(grads)
        return Outcome(backward, (), backward.deferred or all(map(all_finite, grads)), heard)

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


def _notices(told: Sequence[float]) -> int:
    """Bits of ``Notice``, from how many ranks have said each."""
    return sum(notice for notice, ranks in zip(Notice, told, strict=True) if ranks > 0)


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

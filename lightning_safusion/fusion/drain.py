"""The end of a window where the host decides: it waits for every shipment, reads what all ranks said, acts on it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import Notice, all_finite
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.compensation import unscaled
from lightning_safusion.fusion.delivery import Rounding, Scratch
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.window import Window
from lightning_safusion.sparsify.memory.contract import Memory

# Elements that share an all-reduce where gradients are averaged in place: latency counts for no more than these bytes.
_TOGETHER = 1 << 18


class Drain:
    """Gives the means of a complete window back, and takes what was sent out of the memory.

    Args:
        memory: Error feedback.
        transport: Communicator of the buffers.
        device: Where gradients live.
    """

    def __init__(self, memory: Memory, transport: Transport, device: torch.device) -> None:
        self.memory = memory
        self.transport = transport
        self.device = device
        self._scratch = Scratch(device)
        self._warned = False

    def release(self) -> None:
        """Frees what only speeds up the next window."""
        self._scratch.release()

    def run(self, window: Window, layout: Layout) -> tuple[bool, int]:
        """Ends a window.

        Args:
            window: Its shipments have been launched.
            layout: The flat gradient space.

        Returns:
            Whether it ended well: what was sent has been taken out of the memory. And the notices (bits of ``Notice``)
            of all ranks. The same on all ranks.

        Raises:
            RuntimeError: If a peer is lost (with the buffer's tensors), or a rank could not fill its message.
        """
        repairs: list[int] = []
        errors: list[Rounding] = []
        notices, workers = 0, self.transport.world_size
        good = window.scale is None or self._forgets_skipped(window)
        for shipment in window.shipments:
            shipment.wait()
            good &= shipment.decode(self._scratch, errors)
            verdict, first = shipment.verdict, shipment.buffer.group.start
            if verdict is None or verdict.plain:
                continue
            notices |= verdict.notices
            good &= not verdict.bad.any()
            repairs += [first + int(t) for t in np.flatnonzero(verdict.irregular(workers))]
            window.unused += [first + int(t) for t in np.flatnonzero(verdict.bypass)]
        if notices & Notice.FAILED:
            return False, notices
        if repairs:
            good &= self._repair(window, layout, repairs)
        if good:
            self._commit(window, layout, repairs, errors)
        return good, notices

    def _forgets_skipped(self, window: Window) -> bool:
        """Takes the gradients of a step that the loss scaler will skip out of the memory again; else True.

        DDP throws such a step away. Kept, the gradients of several skipped steps (scalers begin with some) would reach
        the optimizer at once. The residual from before stays, sent or not.
        """
        for shipment in window.shipments:
            shipment.wait()
        if window.scale is None or not any(s.buffer.exchange.verdict().bad.any() for s in window.shipments):
            return True
        for place in np.flatnonzero(window.fresh & ~window.bypass).tolist():
            grad = window.grads_of(place, place + 1)[0]
            if all_finite(grad):  # what is not was never added
                self.memory.withdraw(place, unscaled([grad], window.scale)[0])
        window.bypass |= window.fresh  # nothing of them is left to withdraw
        return False

    def _repair(self, window: Window, layout: Layout, places: Sequence[int]) -> bool:
        """Averages gradients as DDP does, outside the compressed path, in place; their residuals stay as they were.

        Returns:
            Whether they are finite.
        """
        self._warn(layout.names(places))
        grads = [window.grads_of(place, place + 1)[0] for place in places]
        for place, grad in zip(places, grads, strict=True):
            # what is not finite was never added
            if window.fresh[place] and not window.bypass[place] and all_finite(grad):
                added = grad if window.scale is None else unscaled([grad], window.scale)[0]
                self.memory.withdraw(place, added)
        self._average(grads)
        return all(map(all_finite, grads))

    def average(self, window: Window) -> bool:
        """Ends a window of which nothing was launched, as DDP does: in place, without buffers and without the memory.

        Returns:
            Whether all gradients are finite; True where the host does not wait to know it.
        """
        present = np.ones(window.length, bool)
        if not window.deferred:
            fresh = torch.from_numpy(window.fresh).to(self.device, torch.float32)
            self.transport.all_reduce(fresh).wait()
            present = fresh.cpu().numpy() > 0
        grads = []
        for place in np.flatnonzero(present).tolist():
            grads += window.grads_of(place, place + 1)
            if not window.fresh[place]:
                grads[-1].zero_()
        self._average(grads)
        return window.deferred or all(map(all_finite, grads))

    def _average(self, grads: Sequence[Tensor]) -> None:
        """Writes the means over ranks into the gradients."""
        sent = []
        for few in _pieces(grads):
            flat = few[0] if len(few) == 1 else torch.cat(few)
            flat.mul_(1.0 / self.transport.world_size)
            sent.append((few, flat, self.transport.all_reduce(flat)))
        for few, flat, work in sent:
            work.wait()
            if len(few) > 1:
                torch._foreach_copy_(few, list(flat.split([len(grad) for grad in few])))

    def _warn(self, names: Sequence[str]) -> None:
        if self._warned or self.transport.rank != 0:
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

    def _commit(self, window: Window, layout: Layout, repairs: Sequence[int], errors: Iterable[Rounding]) -> None:
        settles = self.memory.settles
        for shipment in window.shipments:
            places = shipment.buffer.places
            repaired = [p for p in repairs if p in places] if repairs else []
            shipment.commit([p - places.start for p in repaired if not window.bypass[p]] if repaired else [])
            if settles:
                self._settle(shipment, layout, repaired)
        for rounding in errors:
            self.memory.add(rounding.start, rounding.stop, rounding.error)

    def _settle(self, shipment: Shipment, layout: Layout, repaired: Sequence[int]) -> None:
        """Keeps what was received, but for tensors that were averaged again."""
        start = shipment.buffer.start
        for place in sorted(repaired):
            self.memory.settle(start, int(layout.edges[place]))
            start = int(layout.edges[place + 1])
        self.memory.settle(start, shipment.buffer.stop)


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

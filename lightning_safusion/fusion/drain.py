"""The end of a window where the host decides: it waits for every shipment and acts on the flags of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import Notice, all_finite
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.fused import FusedPath, FusedShipment
from lightning_safusion.fusion.lanes import HostCopy
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.space import GradientSpace
from lightning_safusion.fusion.window import Scratch, Window, withdraw

# Elements that share an all-reduce where gradients are averaged in place: latency counts for no more than these bytes.
_TOGETHER = 1 << 18
# With magnitudes up to this share of the largest float32, divided by the number of workers, no sum over workers
# overflows, and no scale of a few bits (twice a mean magnitude, rounded up to bfloat16).
_OVERFLOW_SHARE = 0.25
_NAMES = 8


class Drain:
    """Writes the means of a complete window into its gradients, and takes what was sent out of the residual.

    Args:
        space: The flat gradient space.
        transport: Communicator for gradients that are averaged in place.
        fused: The kernels of buffers that have some.
    """

    def __init__(self, space: GradientSpace, transport: Transport, fused: FusedPath) -> None:
        self._space, self._transport, self._fused = space, transport, fused
        self.scratch = Scratch(space.device)
        self._warned = False
        self._unread: HostCopy | None = None  # whether some rank has said each notice, in a window that did not wait

    def run(self, window: Window, shipments: Sequence[Shipment], notices: int = 0) -> tuple[bool, int]:
        """Ends a window.

        Args:
            window: It.
            shipments: Launched, in order.
            notices: Of this rank, for a window without messages, whose headers would have them.

        Returns:
            Whether everything was finite, so that what was sent has been taken out of the residual; and the notices
            (bits of ``Notice``) of all ranks. The same on all ranks.

        Raises:
            WorkerLostError: If a peer is lost (with the buffer's tensors).
        """
        if window.plain:
            return self._average_all(window, notices)
        again: list[int] = []
        odd: list[int] = []  # those of them of which some ranks have sent nothing
        notices = 0
        for shipment in shipments:
            shipment.advance(wait=True)
        if window.wary:
            self._copy_if_bad(window, shipments)
        good = True
        for shipment in shipments:
            shipment.wait()
            shipment.decode(self.scratch)
        for shipment in shipments:
            good &= shipment.judge()
            if (verdict := shipment.verdict) is not None:
                notices |= verdict.notices
                places = shipment.buffer.places
                again += [places[tensor] for tensor in shipment.repaired]
                irregular = verdict.irregular(self._transport.world_size) if shipment.repaired else ()
                odd += [places[tensor] for tensor in shipment.repaired if irregular[tensor]]
        if notices & Notice.FAILED:
            return False, notices
        if odd:
            self._warn(self._space.layout.names(odd))
        if again:
            self._average_again(window, again)
        fused = [shipment for shipment in shipments if isinstance(shipment, FusedShipment)]
        if fused:
            self._fused.commit(fused, good)
        for shipment in shipments:
            if good and not isinstance(shipment, FusedShipment):
                shipment.commit()
        return good, notices

    def _copy_if_bad(self, window: Window, shipments: Sequence[Shipment]) -> None:
        """Copies this rank's gradients where some tensor is not finite: means take their places, and they may have to
        leave the residual again."""
        for shipment in shipments:
            shipment.wait()
        if any(shipment.buffer.exchange.verdict().bad.any() for shipment in shipments):
            window.copies = {place: grad.clone() for place, grad in enumerate(window.grads_of(0, window.length))}

    def _average_again(self, window: Window, places: Sequence[int]) -> None:
        """Averages gradients in place, as DDP does, without their residuals."""
        grads = {place: window.grads_of(place, place + 1)[0] for place in places}
        withdraw(self._space.memory, window, grads)
        for place in places:
            window.copies.pop(place, None)
        self.average(list(grads.values()))

    def read(self) -> int:
        """Notices (bits of ``Notice``) of all ranks in the last window, if it had no messages and did not wait."""
        unread, self._unread = self._unread, None
        return 0 if unread is None else _notices(unread.read()[0].tolist())

    def forget(self) -> None:
        """Forgets what was not read: another rank may be lost."""
        self._unread = None

    def _average_all(self, window: Window, notices: int) -> tuple[bool, int]:
        """Averages all gradients in place; returns whether they are finite, and notices: True and 0 if deferred."""
        told = torch.zeros(len(Notice), dtype=torch.float32, device=self._space.device)
        for place, notice in enumerate(Notice):
            if notices & notice:
                told[place : place + 1].fill_(1.0)
        if window.deferred:
            self._transport.all_reduce(told).wait()
            self._unread, present, heard = HostCopy([told]), np.ones(window.length, bool), 0
        else:
            fresh = torch.from_numpy(window.fresh).to(self._space.device, torch.float32)
            said = torch.cat([fresh, told])
            self._transport.all_reduce(said).wait()
            sums = said.cpu().numpy()
            present, heard = sums[: window.length] > 0, _notices(sums[window.length :].tolist())
        grads = []
        for place in np.flatnonzero(present).tolist():
            grads += window.grads_of(place, place + 1)
            if not window.fresh[place]:
                grads[-1].zero_()
        self.average(grads)
        return window.deferred or all(map(all_finite, grads)), heard

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


@dataclass(eq=False)
class OverflowGuard:
    """Resets elements of the residual that no exchange can carry, after a window that was not committed.

    A gradient that is finite but huge is added to the residual. If the sum overflows, or the message that carries it,
    no window in which it is sent is ever committed: it would be sent again in every later one. Ordinary windows do not
    look at the residual.
    """

    space: GradientSpace
    transport: Transport  #: of all ranks
    pending: bool = False  #: a window since the last reset was not committed
    _named: set[str] = field(default_factory=set)

    def reset(self, together: bool) -> None:
        """Resets what overflowed, if a window was not committed, and warns with the names of the tensors.

        Args:
            together: All ranks call this now. Memories with a state that all ranks share are reset only then.
        """
        memory, layout = self.space.memory, self.space.layout
        if not self.pending or not (together or memory.hands_on):
            return
        self.pending = False
        limit = _OVERFLOW_SHARE * torch.finfo(torch.float32).max / self.transport.world_size
        spans = {place: span for place, span in enumerate(pairwise(layout.edges.tolist())) if span[0] < span[1]}
        beyond = {place: memory.beyond(limit, *span) for place, span in spans.items()}
        if not memory.hands_on:
            beyond = self._anywhere(spans, beyond)
        names = []
        for place, mask in beyond.items():
            if mask is not None:
                memory.clear(spans[place][0], mask)
                names.append(layout.specs[place].name)
        self._warn([name for name in names if name not in self._named], limit)

    def _anywhere(
        self, spans: dict[int, tuple[int, int]], beyond: dict[int, Tensor | None]
    ) -> dict[int, Tensor | None]:
        """What is beyond the limit on some rank: all ranks reset it, since the means that they received are in it."""
        marks = torch.zeros(self.space.layout.numel, dtype=torch.float32, device=self.space.device)
        for place, mask in beyond.items():
            if mask is not None:
                marks[slice(*spans[place])] = mask
        self.transport.all_reduce(marks, "max").wait()
        found = {place: marks[slice(*span)] > 0 for place, span in spans.items()}
        return {place: mask if bool(mask.any()) else None for place, mask in found.items()}

    def _warn(self, names: Sequence[str], limit: float) -> None:
        if not names:
            return
        self._named.update(names)
        shown = ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
        warnings.warn(
            f"rank {self.transport.rank}: gradients of {shown} were so large that their sum, or the message with it, "
            f"overflowed. The elements of the residual beyond {limit:.1e} have been reset, and later windows are "
            "sent without them. If training does not recover, lower the learning rate or clip the loss.",
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

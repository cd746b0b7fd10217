"""A window in which something was not finite: what leaves the residual depends on what optimizers do next.

And elements of the residual that no exchange can carry.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.gradients import withdraw
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.space import GradientSpace
from lightning_safusion.fusion.window import Outcome, Window
from lightning_safusion.literal import first_of

# Windows after one with a gradient that is not finite in which the next such window is expected.
_WARY_WINDOWS = 100
# With magnitudes up to this share of the largest float32, divided by the number of workers, no sum over workers
# overflows, and no scale of a few bits (twice a mean magnitude, rounded up to bfloat16).
_OVERFLOW_SHARE = 0.25


class OptimizerSteps:
    """Which tensors' optimizers have stepped since their gradients were exchanged; bool by registration index.

    A tensor that is submitted again before its optimizer has stepped is sent dense and without its residual: the
    gradient that was exchanged before has been thrown away, and this one may be.
    """

    def __init__(self, tensors: int) -> None:
        self.tracked = np.zeros(tensors, bool)  #: an optimizer that uses the gradient is watched
        self.unstepped = np.zeros(tensors, bool)  #: exchanged, and its optimizer has not stepped yet

    def exchanged(self, indices: np.ndarray) -> None:
        """The gradients of some tensors have been exchanged."""
        self.unstepped[indices] = self.tracked[indices]

    def stepped(self, indices: Sequence[int] | np.ndarray) -> None:
        """An optimizer has stepped with them."""
        self.unstepped[indices] = False

    def watch(self, indices: Sequence[int]) -> None:
        """From now on :meth:`stepped` is called of these tensors; others are taken to step."""
        self.tracked[:] = False
        self.tracked[indices] = True
        self.unstepped &= self.tracked


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

        ``together``: all ranks call this now. Memories with a state that all ranks share are reset only then.
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
        warnings.warn(
            f"rank {self.transport.rank}: gradients of {first_of(names)} were so large that their sum, or the message "
            f"with it, overflowed. The elements of the residual beyond {limit:.1e} have been reset, and later windows "
            "are sent without them. If training does not recover, lower the learning rate or clip the loss.",
            stacklevel=2,
        )


class Undecided:
    """The last window that was not committed, until the next one begins.

    Tensor by tensor: what was sent leaves the residual if the tensor's optimizer has stepped with it. If not, DDP
    throws the gradient away: it leaves the residual, as far as there is a copy of it, and what was sent stays there.
    Where nobody knows whether an optimizer steps, it is taken to.
    """

    def __init__(self, space: GradientSpace, steps: OptimizerSteps, overflow: OverflowGuard) -> None:
        self._space, self._steps = space, steps
        self.overflow = overflow  #: resets what no exchange can carry
        self.outcome: Outcome | None = None  #: None: there is none
        self.wary_until = 0  #: number of the first window in which no gradient is expected that is not finite
        self._named: set[str] = set()

    def decide(self, outcome: Outcome) -> None:
        """Ends the window; what it sent stays in the residual if this is not called."""
        self.outcome, window = None, outcome.window
        self._commit(window, outcome.shipments)
        self._steps.stepped(window.exchanged)
        self.wary_until, self.overflow.pending = window.step + _WARY_WINDOWS, True
        self.overflow.reset(together=False)

    def _commit(self, window: Window, shipments: Sequence[Shipment]) -> None:
        unstepped = self._steps.unstepped
        for shipment in shipments:
            used = ~unstepped[shipment.buffer.indices]
            if shipment.sound is not None:
                used &= shipment.sound
            if used.any():
                shipment.commit(unused=np.flatnonzero(~used).tolist())
        kept = unstepped[self._space.layout.indices]
        withdraw(self._space.memory, window, {place: grad for place, grad in window.copies.items() if kept[place]})
        window.copies = {}
        self._warn(window.step, shipments)

    def _warn(self, step: int, shipments: Sequence[Shipment]) -> None:
        bad = [
            shipment.buffer.names[tensor]
            for shipment in shipments
            if shipment.sound is not None
            for tensor in np.flatnonzero(~shipment.sound).tolist()
        ]
        names = [name for name in bad if name not in self._named]
        self._named.update(names)
        if names and self._space.transport.rank == 0:
            warnings.warn(f"gradients of {first_of(names)} were not finite in step {step}", stacklevel=2)

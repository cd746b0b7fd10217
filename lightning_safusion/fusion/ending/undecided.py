"""A window in which something was not finite: what leaves the residual depends on what optimizers do next."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from lightning_safusion.fusion.ending.overflow import OverflowGuard
from lightning_safusion.fusion.gradients import withdraw
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.space import GradientSpace
from lightning_safusion.fusion.window import Outcome, Window
from lightning_safusion.literal import first_of

# Windows after one with a gradient that is not finite in which the next such window is expected.
_WARY_WINDOWS = 100


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
        """From now on :meth:`stepped` is called of some tensors."""
        self.tracked[indices] = True

    def watched(self) -> None:
        """All have been named to :meth:`watch`: others are taken to step."""
        self.unstepped &= self.tracked

    def unwatch(self) -> None:
        """No optimizer is watched any more."""
        self.tracked[:] = False


class Undecided:
    """The last window that was not committed, until the next one begins.

    Tensor by tensor: what was sent leaves the residual if the tensor's optimizer has stepped with it. If not, DDP
    throws the gradient away: it leaves the residual, as far as there is a copy of it, and what was sent stays there.
    Where nobody knows whether an optimizer steps, it is taken to.
    """

    def __init__(self, space: GradientSpace, steps: OptimizerSteps, overflow: OverflowGuard) -> None:
        self._space, self._steps, self._overflow = space, steps, overflow
        self.outcome: Outcome | None = None  #: None: there is none
        self.wary_until = 0  #: number of the first window in which no gradient is expected that is not finite
        self._named: set[str] = set()

    def decide(self, outcome: Outcome) -> None:
        """Ends the window; what it sent stays in the residual if this is not called."""
        self.outcome, window = None, outcome.window
        self._commit(window, outcome.shipments)
        self._steps.stepped(window.exchanged)
        self.wary_until, self._overflow.pending = window.step + _WARY_WINDOWS, True
        self._overflow.reset(together=False)

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

"""A window in which something was not finite: what leaves the residual depends on what optimizers do next."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np

from lightning_safusion.fusion.ending.base import Outcome
from lightning_safusion.fusion.gradients import withdraw
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.space import GradientSpace

_NAMES = 8


@dataclass(eq=False)
class OptimizerSteps:
    """Which tensors' optimizers have stepped since their gradients were exchanged; bool by registration index.

    A tensor that is submitted again before its optimizer has stepped is sent dense and without its residual: the
    gradient that was exchanged before has been thrown away, and this one may be.
    """

    tensors: InitVar[int]
    tracked: np.ndarray = field(init=False)  #: an optimizer that uses the gradient is watched
    unstepped: np.ndarray = field(init=False)  #: exchanged, and its optimizer has not stepped yet

    def __post_init__(self, tensors: int) -> None:
        self.tracked, self.unstepped = np.zeros(tensors, bool), np.zeros(tensors, bool)

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


@dataclass(eq=False)
class Undecided:
    """The last window that was not committed, until the next one begins.

    Tensor by tensor: what was sent leaves the residual if the tensor's optimizer has stepped with it. If not, DDP
    throws the gradient away: it leaves the residual, as far as there is a copy of it, and what was sent stays there.
    Where nobody knows whether an optimizer steps, it is taken to.
    """

    space: GradientSpace
    outcome: Outcome | None = None  #: None: there is none
    _named: set[str] = field(default_factory=set)

    def decide(self, unstepped: np.ndarray) -> None:
        """Ends the window; what it sent stays in the residual if this is not called.

        Args:
            unstepped: bool, by registration index: exchanged, and its optimizer has not stepped since.
        """
        if self.outcome is None:
            return
        (backward, shipments, *_), self.outcome = self.outcome, None
        for shipment in shipments:
            used = ~unstepped[shipment.buffer.indices]
            if shipment.sound is not None:
                used &= shipment.sound
            if used.any():
                shipment.commit(unused=np.flatnonzero(~used).tolist())
        kept = unstepped[self.space.layout.indices]
        withdraw(self.space.memory, backward, {place: grad for place, grad in backward.copies.items() if kept[place]})
        backward.copies = {}
        self._warn(backward.step, shipments)

    def _warn(self, step: int, shipments: Sequence[Shipment]) -> None:
        bad = [
            shipment.buffer.names[tensor]
            for shipment in shipments
            if shipment.sound is not None
            for tensor in np.flatnonzero(~shipment.sound).tolist()
        ]
        names = [name for name in bad if name not in self._named]
        self._named.update(names)
        if names and self.space.transport.rank == 0:
            shown = ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
            warnings.warn(f"gradients of {shown} were not finite in step {step}", stacklevel=2)

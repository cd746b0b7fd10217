"""A window in which something was not finite: what leaves the residual depends on what optimizers do next."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.space import GradientSpace
from lightning_safusion.fusion.window import Window, withdraw

_NAMES = 8


@dataclass(eq=False)
class Undecided:
    """The last window that was not committed, until the next one begins.

    Tensor by tensor: what was sent leaves the residual if the tensor's optimizer has stepped with it. If not, DDP
    throws the gradient away: it leaves the residual, as far as there is a copy of it, and what was sent stays there.
    Where nobody knows whether an optimizer steps, it is taken to.
    """

    space: GradientSpace
    window: Window | None = None  #: None: there is none
    shipments: Sequence[Shipment] = ()
    _named: set[str] = field(default_factory=set)

    def keep(self, window: Window, shipments: Sequence[Shipment]) -> None:
        """Leaves a window open."""
        self.window, self.shipments = window, shipments

    def forget(self) -> None:
        """What the window sent stays in the residual."""
        self.window, self.shipments = None, ()

    def decide(self, unstepped: np.ndarray) -> None:
        """Ends the window.

        Args:
            unstepped: bool, by registration index: exchanged, and its optimizer has not stepped since.
        """
        if (window := self.window) is None:
            return
        for shipment in self.shipments:
            used = ~unstepped[shipment.buffer.indices]
            if shipment.sound is not None:
                used &= shipment.sound
            if used.any():
                shipment.commit(unused=np.flatnonzero(~used).tolist())
        kept = unstepped[self.space.layout.indices]
        withdraw(self.space.memory, window, {place: grad for place, grad in window.copies.items() if kept[place]})
        window.copies = {}
        self._warn(window.step)
        self.forget()

    def _warn(self, step: int) -> None:
        bad = [
            shipment.buffer.names[tensor]
            for shipment in self.shipments
            if shipment.sound is not None
            for tensor in np.flatnonzero(~shipment.sound).tolist()
        ]
        names = [name for name in bad if name not in self._named]
        self._named.update(names)
        if names and self.space.transport.rank == 0:
            shown = ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
            warnings.warn(f"gradients of {shown} were not finite in step {step}", stacklevel=2)

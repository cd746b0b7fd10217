"""Elements of the residual that no exchange can carry."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.space import GradientSpace
from lightning_safusion.literal import first_of

# With magnitudes up to this share of the largest float32, divided by the number of workers, no sum over workers
# overflows, and no scale of a few bits (twice a mean magnitude, rounded up to bfloat16).
_OVERFLOW_SHARE = 0.25


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

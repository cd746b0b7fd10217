"""What keeps numbers that overflowed in one window out of all later ones."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.space import GradientSpace

# With magnitudes up to this share of the largest float32, divided by the number of workers, no sum over workers
# overflows, and no scale of a few bits (twice a mean magnitude, rounded up to bfloat16).
_SHARE = 0.25
_NAMES = 8


class OverflowGuard:
    """Resets elements of the memory that no exchange can carry, after a window that was not committed.

    A gradient that is finite but huge enters the memory. If the sum there overflows, or the message that carries it,
    no window in which it is sent is ever committed: it would be sent again in every later one. Ordinary windows do not
    look at the memory.

    Args:
        space: Has the memory and its layout.
        transport: Communicator of the buffers.
    """

    def __init__(self, space: GradientSpace, transport: Transport) -> None:
        self._space = space
        self._transport = transport
        self._limit = _SHARE * torch.finfo(torch.float32).max / transport.world_size
        self.pending = False
        self._told: set[str] = set()

    def uncommitted(self) -> None:
        """Notes that a window was not committed, whatever the reason."""
        self.pending = True

    def mend(self, together: bool) -> None:
        """Resets what overflowed, if a window since the last call was not committed, and warns of it by name.

        Args:
            together: All ranks call this now. Memories that share a state need that; others are mended in any case.
        """
        memory = self._space.memory
        if not self.pending or not (together or memory.hands_on):
            return
        self.pending = False
        edges = self._space.layout.edges.tolist()
        spans = {place: span for place, span in enumerate(pairwise(edges)) if span[0] < span[1]}
        if memory.hands_on:
            beyond = {place: memory.beyond(self._limit, *span) for place, span in spans.items()}
        else:
            beyond = self._anywhere(spans, edges[-1])
        reset = []
        for place, mask in beyond.items():
            if mask is not None:
                memory.clear(spans[place][0], mask)
                reset.append(place)
        self._warn(self._space.layout.names(reset))

    def _anywhere(self, spans: dict[int, tuple[int, int]], numel: int) -> dict[int, Tensor | None]:
        """What is beyond the limit on some rank: all of them reset it, since what they have received is in there."""
        memory, marks = self._space.memory, torch.zeros(numel, device=self._space.device)
        for start, stop in spans.values():
            mask = memory.beyond(self._limit, start, stop)
            if mask is not None:
                marks[start:stop] = mask
        self._transport.all_reduce(marks, "max").wait()
        found = {place: marks[start:stop] > 0 for place, (start, stop) in spans.items()}
        return {place: mask if bool(mask.any()) else None for place, mask in found.items()}

    def _warn(self, names: Sequence[str]) -> None:
        names = [name for name in names if name not in self._told]
        if not names:
            return
        self._told.update(names)
        shown = ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
        warnings.warn(
            f"rank {self._transport.rank}: gradients of {shown} were so large that their sum, or the message with it, "
            f"overflowed. What was held back of the elements beyond {self._limit:.1e} has been reset, and later "
            "windows go on without it. If training does not recover, lower the learning rate or clip the loss.",
            stacklevel=2,
        )

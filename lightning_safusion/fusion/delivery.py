"""Means on their way into the gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import saturated
from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.fusion.compensation import unscaled
from lightning_safusion.fusion.window import Window


@dataclass(frozen=True)
class Rounding:
    """What a narrow gradient could not hold of the mean; it goes back into the residual.

    Args:
        start: First element in the flat space.
        stop: Behind the last.
        error: float32 [stop - start].
    """

    start: int
    stop: int
    error: Tensor


class Scratch:
    """Zeros to decode into: the same memory for all buffers of one stream.

    Args:
        device: Where it lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros(0, device=device)

    def of(self, buffer: Buffer) -> Tensor:
        """float32 [N], or empty if the buffer needs none; whoever takes them leaves zeros behind."""
        numel = buffer.stop - buffer.start if buffer.exchange.uses_scratch else 0
        if len(self._memory) < numel:
            self._memory = torch.zeros(numel, device=self._memory.device)
        return self._memory[:numel]

    def release(self) -> None:
        """Frees the memory."""
        self._memory = self._memory[:0].clone()


def deliver(window: Window, buffer: Buffer, mean: Tensor, chosen: np.ndarray | None = None) -> list[Rounding]:
    """Copies the mean into the gradients of a buffer.

    Args:
        window: Holds the gradients.
        buffer: The buffer.
        mean: Floating [N].
        chosen: bool [T], tensors to write; None writes all.

    Returns:
        What narrow gradients cannot hold.
    """
    means, targets = list(mean.split(buffer.sizes)), window.grads_of(buffer.group.start, buffer.group.stop)
    places = list(range(len(targets)))
    if chosen is not None:
        places = np.flatnonzero(chosen).tolist()
        means, targets = [means[t] for t in places], [targets[t] for t in places]
    if not places:
        return []
    if window.scale is not None:
        means = list(torch._foreach_mul(means, window.scale))
    if not buffer.narrow:
        torch._foreach_copy_(targets, means)
        return []
    torch._foreach_copy_(targets, [saturated(m, g.dtype) for m, g in zip(means, targets, strict=True)])
    errors = []
    for t, exact, held in zip(places, means, targets, strict=True):
        if held.itemsize < mean.itemsize:
            error = exact - held if window.scale is None else unscaled([exact - held], window.scale)[0]
            errors.append(Rounding(buffer.start + buffer.edges[t], buffer.start + buffer.edges[t + 1], error))
    return errors

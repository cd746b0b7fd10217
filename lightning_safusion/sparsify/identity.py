"""No compression: every element is sent."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_safusion.sparsify.base import Segments, Selection, Sparsifier, constant_of_segments
from lightning_safusion.sparsify.selection.select import empty_selection, pooled, segmented_view


class NoCompression(Sparsifier):
    """Sends everything; the room of a tensor is its size, whatever the density."""

    name: ClassVar[str] = "none"
    shares_indices: ClassVar[bool] = True
    estimates: ClassVar[bool] = False

    def quota(self, numel: int, shape: tuple[int, ...], density: float) -> int:
        return numel

    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:
        """Selects every element; a quota below the size of its segment is filled with the largest ones."""
        if segments.pool:
            return pooled(x, segments, lambda span, whole: self.select(span, whole, step))
        if segments.capacity == 0 or segments.numel == 0:
            return empty_selection(x.device)
        if not (segments.quotas == segments.sizes).all():
            return segmented_view(x, segments).top()
        return Selection(_all_indices(segments, x.device), x.clone(), segments.numel)


@constant_of_segments
def _all_indices(segments: Segments, device: torch.device) -> Tensor:
    return torch.arange(segments.numel, device=device)

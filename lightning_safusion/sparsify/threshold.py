"""Fixed threshold (Strom 2015; Sahu et al. 2021)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from lightning_safusion.sparsify.selection.select import SegmentedView, ThresholdSparsifier


class Threshold(ThresholdSparsifier):
    """Sends the elements whose magnitude exceeds a constant, at least one of every segment and at most its quota.

    The threshold is in units of the gradient (plus residual), so it depends on the scale of the loss. Within the quota
    no element of the residual is larger than ``value``.

    Args:
        value: Threshold on the magnitude, 0 or more; 0 sends every non-zero element.

    Raises:
        ValueError: If ``value`` is negative or not finite.
    """

    name: ClassVar[str] = "threshold"

    def __init__(self, value: float = 0.01) -> None:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"the threshold must be finite and at least 0, got {value}")
        self.value = value

    def thresholds(self, view: SegmentedView, step: int) -> Tensor:
        return torch.full((len(view.segments),), self.value, device=view.x.device)

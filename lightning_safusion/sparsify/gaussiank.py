"""Gaussian-k: a threshold from mean and deviation (Shi et al., "Understanding Top-k Sparsification", 2019)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_safusion.lookup import check_name
from lightning_safusion.sparsify.base import Segments, constant_of_segments
from lightning_safusion.sparsify.selection.select import SegmentedView, ThresholdSparsifier
from lightning_safusion.sparsify.selection.view import mean_and_variance, sizes_and_quotas

_FEW, _MANY = 2 / 3, 4 / 3  # the paper's bounds on found / quota
_SPARE = 32  # elements above the quota that are cut and not counted again: the bounds of small quotas are narrow


class GaussianK(ThresholdSparsifier):
    """Threshold of a normal distribution, refined by counting.

    The first threshold is ``|mean| + z * std`` with ``z`` the two-sided normal quantile of the density. (The paper has
    the signed mean.) A threshold that finds less than 2/3 or more than 4/3 of the quota is refined.

    ``refine="paper"`` multiplies it by 0.5 or 1.5, which can leave a worse threshold: on a Laplace distribution at
    density 0.01 it turns 2.6 quotas into 6.5. The default ``refine="bisect"`` takes the same steps until the threshold
    is bracketed, and halves the bracket on a logarithmic scale from there on. A segment that has not settled by the
    last trial takes the best threshold known to be too low, which the exact cut at the quota turns into Top-k. A few
    dozen elements above the quota are cut and not refined.

    Args:
        refine: ``"bisect"`` or ``"paper"``.
        max_refine: Thresholds tried. ``None`` is 8 for ``"bisect"`` and the paper's 3 for ``"paper"``; 1 uses the
            quantile as it is in ``"paper"``.
    """

    name: ClassVar[str] = "gaussiank"

    def __init__(self, refine: Literal["bisect", "paper"] = "bisect", max_refine: int | None = None) -> None:
        check_name("refine", refine, ("bisect", "paper"))
        if max_refine is not None and max_refine < 1:
            raise ValueError(f"max_refine must be at least 1, got {max_refine}")
        self.refine = refine
        self.max_refine = max_refine or (8 if refine == "bisect" else 3)

    def thresholds(self, view: SegmentedView, step: int) -> Tensor:
        if self.refine == "paper":
            return self._paper(view, normal_thresholds(view))
        return self._bisect(view, normal_thresholds(view, middle=True))

    def _paper(self, view: SegmentedView, tau: Tensor) -> Tensor:
        fewest, most = _FEW * view.quotas, torch.where(view.quotas > 0, _MANY * view.quotas, math.inf)
        for _ in range(self.max_refine - 1):  # the count of the last trial would change nothing
            found = view.count_above(tau.float(), enough=most)
            few, many = found < fewest, found > most
            if view.readable and not (few | many).any():
                break
            tau = torch.where(few, 0.5 * tau, torch.where(many, 1.5 * tau, tau))
        return tau.float()

    def _bisect(self, view: SegmentedView, tau: Tensor) -> Tensor:
        fewest, most = _bounds(view.segments, tau.device)
        fewest = torch.where(tau == 0, 0.0, fewest)  # a segment of zeros has no lower threshold
        low, high = torch.zeros_like(tau), torch.full_like(tau, math.inf)
        for _ in range(self.max_refine):
            found = view.count_above(tau.float(), enough=most)
            low, high = torch.where(found < fewest, low, tau), torch.where(found > most, high, tau)
            if view.readable and torch.equal(low, high):
                break
            # Once settled, low and high are tau, and so is their mean. As long as one of them is 0 or infinite the mean
            # is the paper's step.
            tau = (low * high).sqrt_().clamp_(0.5 * tau, 1.5 * tau)
        return low.float()


def normal_thresholds(view: SegmentedView, middle: bool = False) -> Tensor:
    """Two-sided normal quantiles ``|mean| + z * std`` of every segment, float64 [M].

    Of the quotas; with ``middle``, of the middle of the numbers that need no refinement.
    """
    mean, variance = mean_and_variance(view.sizes, *view.moments())
    return mean.abs() + _normal_quantiles(view.segments, mean.device, middle) * variance.sqrt()


@constant_of_segments
def _bounds(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor]:
    """Fewest and most elements above a threshold that need no refinement, float64 [M]."""
    _, quotas = sizes_and_quotas(segments, device)
    return _FEW * quotas, torch.maximum(_MANY * quotas, quotas + _SPARE)


@constant_of_segments
def _normal_quantiles(segments: Segments, device: torch.device, middle: bool) -> Tensor:
    sizes, wanted = sizes_and_quotas(segments, device)
    if middle:
        fewest, most = _bounds(segments, device)
        wanted = torch.where(wanted > 0, 0.5 * (fewest + most), 0.0)
    return -torch.special.ndtri(0.5 * (wanted / sizes).clamp(max=1))

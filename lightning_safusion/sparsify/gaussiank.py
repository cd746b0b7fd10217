"""Gaussian-k: a threshold from mean and deviation (Shi et al., "Understanding Top-k Sparsification", 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.sparsify.base import Segments, constant_of_segments
from lightning_safusion.sparsify.selection.select import SegmentedView, ThresholdSparsifier
from lightning_safusion.sparsify.selection.view import sizes_and_quotas

_FEW, _MANY = 2 / 3, 4 / 3  # the paper's bounds on found / quota
# Elements too many that are not worth another count: the exact cut at the quota takes them off. They matter to small
# quotas only, where the paper's bounds would ask for the very number.
_SPARE = 32


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
        if refine not in ("bisect", "paper"):
            raise ValueError(f'refine must be "bisect" or "paper", got {refine!r}')
        if max_refine is not None and max_refine < 1:
            raise ValueError(f"max_refine must be at least 1, got {max_refine}")
        self.refine = refine
        self.max_refine = max_refine or (8 if refine == "bisect" else 3)

    def thresholds(self, view: SegmentedView, step: int) -> Tensor:
        """Refined thresholds, float32 [M]."""
        if self.refine == "paper":
            return self._paper(view, normal_thresholds(view))
        return self._bisect(view, normal_thresholds(view, _in_the_middle))

    def _paper(self, view: SegmentedView, tau: Tensor) -> Tensor:
        fewest, most = _FEW * view.quotas, torch.where(view.quotas > 0, _MANY * view.quotas, math.inf)
        for _ in range(self.max_refine - 1):  # the count of the last trial would change nothing
            found = view.count_above(tau.float(), enough=most)
            few, many = found < fewest, found > most
            if view.x.device.type == "cpu" and not (few | many).any():
                break
            tau = torch.where(few, 0.5 * tau, torch.where(many, 1.5 * tau, tau))
        return tau.float()

    def _bisect(self, view: SegmentedView, tau: Tensor) -> Tensor:
        if view.x.device.type != "cpu":
            return self._bisected(torch, tau, view.quotas, view.count_above)
        with np.errstate(over="ignore", invalid="ignore"):
            low = self._bisected(np, tau.numpy(), view.quotas.numpy(), lambda tau, enough: _counted(view, tau, enough))
        return torch.from_numpy(low)

    def _bisected(self, xp: Any, tau: Any, quotas: Any, count_above: Callable[[Any, Any], Any]) -> Any:
        """The search in torch's functions, or, for a few numbers on the host, in NumPy's, whose calls take a third."""
        fewest = xp.where(tau == 0, 0.0, _FEW * quotas)  # a segment of zeros has no lower threshold
        most = _most(xp, quotas)
        low, high = xp.zeros_like(tau), xp.full_like(tau, math.inf)
        for _ in range(self.max_refine):
            found = count_above(xp.asarray(tau, dtype=xp.float32), most)
            low, high = xp.where(found < fewest, low, tau), xp.where(found > most, high, tau)
            if xp is np and np.array_equal(low, high):
                break
            # Once settled, low and high are tau, and so is their mean. As long as one of them is 0 or infinite the mean
            # is the paper's step.
            tau = xp.minimum(xp.maximum(xp.sqrt(low * high), 0.5 * tau), 1.5 * tau)
        return xp.asarray(low, dtype=xp.float32)


def _counted(view: SegmentedView, thresholds: np.ndarray, enough: np.ndarray) -> np.ndarray:
    counts: np.ndarray = view.count_above(torch.from_numpy(thresholds), torch.from_numpy(enough)).numpy()
    return counts


def _most(xp: Any, quotas: Any) -> Any:
    """Up to how many elements above a threshold are cut to the quota as they are."""
    return xp.maximum(_MANY * quotas, quotas + _SPARE)


def _in_the_middle(quotas: Tensor) -> Tensor:
    """How many elements above the first threshold leave most room for chance on both sides."""
    return torch.where(quotas > 0, 0.5 * (_FEW * quotas + _most(torch, quotas)), 0.0)


def normal_thresholds(view: SegmentedView, aim: Callable[[Tensor], Tensor] = torch.clone) -> Tensor:
    """Two-sided normal quantiles ``|mean| + z * std`` of every segment, float64 [M].

    Args:
        view: The span.
        aim: Which number of elements shall be above them, from the quotas; these themselves if not given.
    """
    total, squares = view.moments()
    mean = total / view.sizes
    variance = (squares - total * mean) / (view.sizes - 1).clamp(min=1)
    quantiles = _normal_quantiles(view.segments, aim, view.quotas.device)
    return mean.abs() + quantiles * variance.clamp(min=0).sqrt()


@constant_of_segments
def _normal_quantiles(segments: Segments, aim: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    sizes, quotas = sizes_and_quotas(segments, device)
    return -torch.special.ndtri(0.5 * (aim(quotas) / sizes).clamp(max=1))

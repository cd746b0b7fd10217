"""SIDCo: thresholds from sparsity-inducing distributions (Abdelmoniem et al., MLSys 2021, arXiv 2101.10761).

The magnitudes of a segment are fitted by a distribution whose tail is inverted in closed form; further stages fit the
excesses over the threshold found so far (peaks over threshold). All quantities are float64 [M].
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.lookup import check_name
from lightning_safusion.sparsify.selection.select import SegmentedView, ThresholdSparsifier
from lightning_safusion.sparsify.selection.view import device_constant, mean_and_variance


class SIDCo(ThresholdSparsifier):
    """Multi-stage threshold estimation.

    The first stage aims at ``first_ratio`` of the elements, each later one at an equal share of what is then left to
    discard. In the paper later stages trust the earlier ones, so that errors multiply. ``correct=True`` counts what the
    earlier stages left and aims from there: the number found is within a few per cent of the quota for Gaussian,
    Laplace, gamma, Pareto and Student-t magnitudes.

    Args:
        fit: ``"exponential"`` (SIDCo-E), ``"gpareto"`` (SIDCo-P: generalised Pareto throughout) or ``"gamma_gpareto"``
            (SIDCo-GP: gamma first, generalised Pareto in later stages).
        stages: Number of stages, and with ``adapt`` the number to begin with; the paper begins with 1.
        first_ratio: Density of the first stage, in (0, 1). Segments with at least this density use one stage.
        correct: Aim each stage from the measured count. ``False`` is the paper's rule.
        adapt: The paper's control of the number of stages, per segment: every ``adapt_every`` steps one stage less
            if the mean number found was more than ``1 + adapt_tolerance`` quotas, one more below
            ``1 - adapt_tolerance``, between 1 and ``ceil(log2(1 / density))``.
        adapt_every: Steps between two decisions.
        adapt_tolerance: Relative deviation that is accepted.
    """

    name: ClassVar[str] = "sidco"

    def __init__(
        self,
        fit: Literal["exponential", "gamma_gpareto", "gpareto"] = "gpareto",
        stages: int = 3,
        first_ratio: float = 0.25,
        correct: bool = True,
        adapt: bool = False,
        adapt_every: int = 5,
        adapt_tolerance: float = 0.2,
    ) -> None:
        check_name("fit", fit, ("exponential", "gamma_gpareto", "gpareto"))
        if stages < 1:
            raise ValueError(f"stages must be at least 1, got {stages}")
        if not 0 < first_ratio < 1:
            raise ValueError(f"first_ratio must be between 0 and 1, got {first_ratio}")
        if adapt_every < 1:
            raise ValueError(f"adapt_every must be at least 1 step, got {adapt_every}")
        if not 0 < adapt_tolerance < 1:
            raise ValueError(f"adapt_tolerance must be between 0 and 1, got {adapt_tolerance}")
        self.fit = fit
        self.stages = stages
        self.first_ratio = first_ratio
        self.correct = correct
        self.adapt = adapt
        self.adapt_every = adapt_every
        self.adapt_tolerance = adapt_tolerance
        # per segment key, float64 [3]: stages, elements found and steps since the last decision
        self._state: dict[Hashable, Tensor] = {}

    def thresholds(self, view: SegmentedView, step: int) -> Tensor:
        if not self.adapt:
            return self._estimate(view, torch.full_like(view.sizes, self.stages), self.stages)
        fresh = device_constant(np.array([self.stages, 0, 0], np.float64), view.x.device)
        state = torch.stack([self._state.get(key, fresh).to(view.x.device) for key in view.segments.keys])
        most_stages = max(self.stages, _most_stages(view))
        tau = self._estimate(view, state[:, 0].clamp(max=most_stages), most_stages)
        state = self._adapted(state, view.count_above(tau), view)
        self._state.update(zip(view.segments.keys, state.unbind(), strict=True))
        return tau

    def state_dict(self) -> dict[str, Any]:
        """Stage counts per segment: ``{"keys": list of K, "stages": float64 [K, 3]}``; empty without ``adapt``."""
        if not self._state:
            return {}
        return {"keys": list(self._state), "stages": torch.stack([row.cpu() for row in self._state.values()])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = dict(zip(state["keys"], state["stages"].clone().unbind(), strict=True)) if state else {}

    def _estimate(self, view: SegmentedView, stages: Tensor, most_stages: int) -> Tensor:
        sizes, quotas = view.sizes, view.quotas
        single = (stages <= 1) | (quotas >= self.first_ratio * sizes)
        later = torch.where(single, 0.0, stages - 1)
        tau = self._first_stage(view, torch.where(single, quotas, self.first_ratio * sizes)).float()
        share = torch.log(self.first_ratio * sizes / quotas) / later.clamp(min=1)  # of the log-density, per stage
        open_ = (later > 0) & (quotas > 0)
        for done in range(most_stages - 1):
            if view.readable and not open_.any():
                break
            found, total, squares = view.tail_moments(tau)
            open_ &= (later > done) & (found >= 2)
            if self.correct:
                # A fit that overshot everything says nothing: every non-zero becomes a candidate for the exact cut.
                tau = torch.where((found == 0) & (later > done), 0.0, tau)
                open_ &= found > quotas
                share = torch.log(found / quotas) / (later - done).clamp(min=1)
            mean, variance = mean_and_variance(found.double(), total, squares)
            # the excesses of exponential magnitudes are exponential with the same mean
            excess = mean * share if self.fit == "exponential" else gpareto(mean, variance, share)
            tau = torch.where(open_, tau + excess, tau).float()
        return tau

    def _first_stage(self, view: SegmentedView, wanted: Tensor) -> Tensor:
        """Threshold that leaves ``wanted`` elements if the magnitudes follow the first distribution."""
        if self.fit == "exponential":
            return view.abs_sums() / view.sizes * torch.log(view.sizes / wanted)
        if self.fit == "gpareto":
            mean, variance = mean_and_variance(view.sizes, *view.moments(magnitudes=True))
            return gpareto(mean, variance, torch.log(view.sizes / wanted))
        # Exact zeros have no logarithm, and are never wanted: the gamma distribution is fitted to the others.
        logs, non_zeros = view.log_abs_sums()
        count = non_zeros.clamp(min=1).double()
        shape, scale = gamma_fit(view.abs_sums() / count, logs / count)
        return scale * gamma_tail_quantile(shape, (wanted / count).clamp(max=1))

    def _adapted(self, state: Tensor, found: Tensor, view: SegmentedView) -> Tensor:
        stages, total, steps = state.unbind(1)
        total, steps = total + found, steps + 1
        due = steps >= self.adapt_every
        deviation = total / (steps * view.quotas) - 1
        change = (deviation < -self.adapt_tolerance).double() - (deviation > self.adapt_tolerance).double()
        most = torch.ceil(torch.log2(view.sizes / view.quotas)).clamp(min=1)
        stages = torch.where(due, torch.minimum((stages + change).clamp(min=1), most), stages)
        after = torch.stack([stages, torch.where(due, 0.0, total), torch.where(due, 0.0, steps)], dim=1)
        return torch.where((view.quotas > 0).unsqueeze(1), after, state)


def gpareto(mean: Tensor, variance: Tensor, log_ratio: Tensor) -> Tensor:
    """Quantile of the generalised Pareto distribution with these moments, from ``log_ratio = ln(1 / density)``.

    A negative shape has bounded support.
    """
    shape, scale = gpareto_fit(mean, variance)
    near_zero = shape.abs() < 1e-6  # the limit is the exponential distribution
    safe = torch.where(near_zero, 1.0, shape)
    return scale * torch.where(near_zero, log_ratio, torch.expm1(safe * log_ratio) / safe)


def gpareto_fit(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Shape and scale of the generalised Pareto distribution with these moments."""
    # a constant has no spread; the floor keeps its quantile at the constant instead of Inf / Inf
    inverse = mean**2 / torch.maximum(variance, 1e-12 * mean**2)
    return 0.5 * (1 - inverse), 0.5 * mean * (1 + inverse)


def gamma_fit(mean: Tensor, mean_log: Tensor) -> tuple[Tensor, Tensor]:
    """Shape and scale of the gamma distribution with this mean and this mean of the logarithms.

    The closed approximation of the maximum likelihood estimate.
    """
    s = (torch.log(mean) - mean_log).clamp(min=1e-4)  # 0 for a constant, whose shape is infinite
    shape = (3 - s + torch.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return shape, mean / shape


def gamma_tail_quantile(shape: Tensor, density: Tensor) -> Tensor:
    """The ``y`` with ``Q(shape, y) = density`` (in (0, 1]), Q the upper regularised incomplete gamma function.

    Newton's method on ``ln Q``, which is convex in ``y`` for shapes below 1 and concave above: from the lower bound of
    the root in the first case, from the upper one in the second, no step leaves the bracket but by rounding. (The paper
    approximates the quantile for shapes near 1.)
    """
    level = -torch.log(density)
    low = torch.exp((torch.lgamma(shape + 1) + torch.log1p(-density)) / shape)  # 1 - Q(y) <= y^shape / Gamma(shape + 1)
    high = shape + torch.sqrt(2 * shape * level) + level  # a gamma variable is sub-gamma: Q(high) <= density
    y = torch.where(shape < 1, low, high)
    for _ in range(12):  # a relative error of 1e-10 of the density for shapes from 0.05 to 5000, densities from 1e-9
        tail = torch.special.gammaincc(shape, y)
        log_pdf = (shape - 1) * torch.log(y) - y - torch.lgamma(shape)
        newton = y + (torch.log(tail) + level) * tail / torch.exp(log_pdf)
        y = torch.where(newton.isfinite(), newton.clamp(min=low, max=high), y)
    return y


def _most_stages(view: SegmentedView) -> int:
    live = view.segments.quotas > 0
    ratios = view.segments.sizes[live] / view.segments.quotas[live]
    return max(1, math.ceil(math.log2(ratios.max(initial=1))))

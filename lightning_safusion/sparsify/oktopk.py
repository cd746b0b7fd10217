"""Threshold reuse (Li & Hoefler, "Near-Optimal Sparse Allreduce", PPoPP 2022, arXiv 2201.07598)."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.lookup import check_name
from lightning_safusion.sparsify.selection.select import SegmentedView, ThresholdSparsifier
from lightning_safusion.sparsify.selection.view import device_constant


class _Reused(NamedTuple):
    level: Tensor  # float64 scalar: the threshold, in units of the mean magnitude if it is scaled
    quota: int
    evaluated: int  # step of the exact evaluation


class OkTopk(ThresholdSparsifier):
    """The exact threshold is found every ``refresh`` steps and reused, under control, in between.

    A segment is evaluated exactly in the first step of each period of ``refresh`` steps, when it is new and when its
    quota has changed. In between the threshold follows the number of elements found, with effect from the next step.

    ``control="scaled"`` keeps the threshold in units of the segment's mean magnitude, and corrects it through the power
    law measured by a second count. ``control="step"`` is what the authors' VGG trainer does: the threshold itself is
    reused, raised by 3 % up to five times while more than 4/3 quotas pass, and moved by 1.2 % when the number found
    leaves 2/3 to 5/4 quotas. ``control="none"`` does not change it, as ADTopk's threshold mode.

    Args:
        refresh: Steps between exact evaluations; the authors use 32 (VGG, LSTM) and 128 (BERT).
        control: ``"scaled"``, ``"step"`` or ``"none"``.
    """

    name: ClassVar[str] = "oktopk"

    def __init__(self, refresh: int = 32, control: Literal["scaled", "step", "none"] = "scaled") -> None:
        if refresh < 1:
            raise ValueError(f"refresh must be at least 1 step, got {refresh}")
        check_name("control", control, ("scaled", "step", "none"))
        self.refresh = refresh
        self.control = control
        self._reused: dict[Hashable, _Reused] = {}

    def thresholds(self, view: SegmentedView, step: int) -> Tensor:
        unit = view.abs_sums() / view.sizes if self.control == "scaled" else torch.ones_like(view.sizes)
        due, before = self._due(view, step), self._recall(view)
        tau = before * unit
        if due.any():
            exact = view.below_kth(np.where(due, view.segments.quotas, 0))
            tau = torch.where(device_constant(due, exact.device), exact, tau)
        tau = tau.float()
        if self.control == "step":
            tau = _raised(view, tau)
        if self.control == "none":
            level = tau.double()
        else:
            level = (_power_law if self.control == "scaled" else _stepped)(view, tau) / unit
        # a step of zeros, NaN or Inf has no threshold to learn from
        self._remember(view, torch.where(torch.isfinite(level), level, before), due, step)
        return tau

    def state_dict(self) -> dict[str, Any]:
        """Reused thresholds per segment: ``keys``, ``quotas`` and ``evaluated`` (lists of K), ``levels`` [K]."""
        if not self._reused:
            return {}
        rows = list(self._reused.values())
        return {
            "control": self.control,
            "keys": list(self._reused),
            "levels": torch.stack([row.level.cpu() for row in rows]),
            "quotas": [row.quota for row in rows],
            "evaluated": [row.evaluated for row in rows],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores thresholds; those of the other control are evaluated anew instead."""
        self._reused = {}
        if state and state["control"] == self.control:
            rows = zip(state["levels"].clone().unbind(), state["quotas"], state["evaluated"], strict=True)
            self._reused = dict(zip(state["keys"], map(_Reused._make, rows), strict=True))

    def _due(self, view: SegmentedView, step: int) -> np.ndarray:
        """bool [M], the segments that are evaluated exactly."""
        due = view.segments.quotas > 0
        for s, (key, quota) in enumerate(zip(view.segments.keys, view.segments.quotas, strict=True)):
            known = self._reused.get(key)
            if known is not None and known.quota == quota and known.evaluated // self.refresh == step // self.refresh:
                due[s] = False
        return due

    def _recall(self, view: SegmentedView) -> Tensor:
        device = view.x.device
        unknown = torch.zeros((), dtype=torch.float64, device=device)
        known = [self._reused.get(key) for key in view.segments.keys]
        return torch.stack([unknown if row is None else row.level.to(device) for row in known])

    def _remember(self, view: SegmentedView, levels: Tensor, due: np.ndarray, step: int) -> None:
        segments = view.segments
        for key, quota, level, fresh in zip(segments.keys, segments.quotas, levels.unbind(), due, strict=True):
            if quota > 0:
                self._reused[key] = _Reused(level, int(quota), step if fresh else self._reused[key].evaluated)


def _power_law(view: SegmentedView, tau: Tensor) -> Tensor:
    """Threshold that should find the quota next, from the counts at ``tau`` and ``1.1 * tau``; float64 [M]."""
    found = view.count_above(tau).clamp(min=1).double()
    beyond = view.count_above(1.1 * tau).clamp(min=1).double()
    # The slope is 2 to 12 in the tails of gradients. One that is too small overshoots, hence only the lower bound.
    slope = (torch.log(found / beyond) / math.log(1.1)).clamp(min=1)
    return tau * ((found / view.quotas) ** (1 / slope)).clamp(0.5, 2.0)


def _raised(view: SegmentedView, tau: Tensor) -> Tensor:
    for _ in range(5):
        many = (view.count_above(tau) > 4 / 3 * view.quotas) & (view.quotas > 0)
        if view.readable and not many.any():
            break
        tau = torch.where(many, 1.03 * tau, tau)
    return tau


def _stepped(view: SegmentedView, tau: Tensor) -> Tensor:
    found = view.count_above(tau)
    few, many = found < 2 / 3 * view.quotas, found > 5 / 4 * view.quotas
    return torch.where(few, tau / 1.012, torch.where(many, 1.012 * tau, tau)).double()

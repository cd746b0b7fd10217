"""RedSync: thresholds between mean and maximum (Fang et al., JPDC 2019, arXiv 1808.04357)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_safusion.lookup import check_name
from lightning_safusion.sparsify.selection.select import SegmentedView, ThresholdSparsifier

# Nearly half of a segment exceeds its mean: counting there is dear, and needless once a higher threshold has sufficed.
_TRIALS_BEFORE_MEAN = 2


class RedSync(ThresholdSparsifier):
    """Trims a segment to few candidates, then selects exactly among them.

    Both methods end with at least a quota of candidates wherever the segment has that many non-zero elements, so that
    the exact cut returns Top-k. ``"trim"`` lowers the threshold from the maximum towards the mean in equal steps until
    a quota of elements exceeds it (trimmed top-k). ``"search"`` bisects between them on a logarithmic scale until one
    to two quotas are found (threshold binary search). A segment whose threshold is below the mean takes all its
    non-zeros as candidates.

    Args:
        method: ``"search"`` or ``"trim"``.
        tolerance: Where ``"search"`` gives up, as a share of the logarithmic distance from mean to maximum, in (0, 1).
        trim_step: Step of ``"trim"`` as a share of the distance from mean to maximum, in (0, 1]; the paper's is 0.2.
    """

    name: ClassVar[str] = "redsync"

    def __init__(
        self, method: Literal["search", "trim"] = "search", tolerance: float = 1e-3, trim_step: float = 0.2
    ) -> None:
        check_name("method", method, ("search", "trim"))
        if not 0 < tolerance < 1:
            raise ValueError(f"tolerance must be between 0 and 1, got {tolerance}")
        if not 0 < trim_step <= 1:
            raise ValueError(f"trim_step must be in (0, 1], got {trim_step}")
        self.method = method
        self.tolerance = tolerance
        self.trim_step = trim_step

    def thresholds(self, view: SegmentedView, step: int) -> Tensor:
        """Thresholds below the quota-th magnitude, float32 [M]; 0 where no threshold above the mean will do."""
        mean, peak = view.abs_sums() / view.sizes, view.abs_max().double()
        return self._search(view, mean, peak) if self.method == "search" else self._trim(view, mean, peak)

    def _trim(self, view: SegmentedView, mean: Tensor, peak: Tensor) -> Tensor:
        tau, enough = torch.zeros_like(mean), torch.zeros_like(mean, dtype=torch.bool)
        steps = math.ceil(1 / self.trim_step - 1e-9)
        for i in range(1, steps + 1):
            trial = mean + max(0.0, 1 - i * self.trim_step) * (peak - mean)
            reached = view.count_above(trial.float()) >= view.quotas
            tau = torch.where(reached & ~enough, trial, tau)
            enough |= reached
            if view.readable and enough.all():
                break
        return tau.float()

    def _search(self, view: SegmentedView, mean: Tensor, peak: Tensor) -> Tensor:
        tau = torch.zeros_like(mean)  # always a threshold that a quota of elements exceeds, or 0
        low, high = mean.log(), peak.log()
        settled = view.quotas == 0
        for trials in range(math.ceil(-math.log2(self.tolerance))):
            if view.readable and settled.all():
                break
            missing = tau == 0
            if trials == _TRIALS_BEFORE_MEAN and (not view.readable or missing.any()):
                enough = view.count_above(torch.where(missing, mean, tau).float()) >= view.quotas
                tau = torch.where(missing & enough, mean, tau)
                settled |= tau == 0
            middle = 0.5 * (low + high)
            trial = middle.exp()
            found = view.count_above(trial.float())
            enough = found >= view.quotas
            tau = torch.where(enough & ~settled, trial, tau)
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
            settled |= enough & (found <= 2 * view.quotas)
        return tau.float()

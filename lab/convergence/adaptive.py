"""Remedies of the laboratory's own: a frozen second moment, and clipped residuals."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_safusion.sparsify import ResidualMemory


class FrozenSecondMoment:
    """Keeps Adam's second moment as it is from some step on (1-bit Adam: Tang et al., ICML 2021, section 3).

    Args:
        optimizer: AdamW; its bias correction continues, which matters little by then.
        begin: First step in which the moment stays; 0: never.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, begin: int) -> None:
        self._optimizer, self._begin = optimizer, begin
        self._kept: list[Tensor] = []

    def after_step(self, step: int) -> None:
        """Puts the moments back."""
        if not self._begin or step + 1 < self._begin:
            return
        moments = [state["exp_avg_sq"] for state in self._optimizer.state.values()]
        if not self._kept:
            self._kept = [moment.clone() for moment in moments]
        torch._foreach_copy_(moments, self._kept)


class ClippedResidual(ResidualMemory):
    """Error feedback whose residual is cut down before a fresh gradient is added, so that bursts stay small.

    Args:
        factor: Largest norm of a tensor's residual, in norms of its fresh gradient.
    """

    name = "clipped"

    def __init__(self, factor: float = 3.0) -> None:
        super().__init__()
        self.factor, self.conserves = factor, False

    def compensate(self, ids: Sequence[int], grads: Sequence[Tensor], dense: Sequence[bool], norms: Tensor) -> None:
        residuals = self._pending.of(ids)
        largest = self.factor * norms / torch.stack(torch._foreach_norm(residuals)).clamp_(min=1e-30)
        torch._foreach_mul_(residuals, list(largest.clamp_(max=1).unbind()))
        super().compensate(ids, grads, dense, norms)

"""Remedies of the laboratory's own: selection in units of Adam's steps, a frozen second moment, clipped residuals."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from lightning_safusion.sparsify import ResidualMemory, Segments, Selection, Sparsifier, TopK

# Of the mean root of the second moment: bounds the weight of elements that hardly ever had a gradient.
_SMALLEST = 1e-2


class PreconditionedTopK(Sparsifier):
    """Top-k by ``|x| / sqrt(v)``: by the size of the step that Adam would take, not of the gradient.

    All workers hold the same optimizer state, so that all weigh alike.

    Attributes:
        weights: float32 by registration index of a tensor; where there is none, every element weighs the same.
    """

    name = "preconditioned"

    def __init__(self) -> None:
        self.weights: dict[Hashable, Tensor] = {}

    @property
    def estimates(self) -> bool:
        return False

    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:
        sizes = segments.sizes.tolist()
        weights = [self.weights.get(key, torch.ones(size)) for key, size in zip(segments.keys, sizes, strict=True)]
        chosen = TopK().select(x * torch.cat(weights), segments, step)
        return Selection(chosen.indices, x[chosen.indices], chosen.count)

    def weigh(self, optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Takes the weights from Adam's second moments."""
        for index, param in enumerate(params):
            root = optimizer.state[param]["exp_avg_sq"].sqrt().view(-1)
            self.weights[index] = 1 / (root + _SMALLEST * root.mean() + torch.finfo(torch.float32).tiny)


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

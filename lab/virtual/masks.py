"""One mask for all workers, from a momentum, a step late: as SCAPE has it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lab.virtual.workers import Averager
from lightning_safusion.fusion.layout import TensorSpec

# Of a value, and of a position beside its share of the entropy: Elias-Fano.
_VALUE_BITS, _POSITION_BITS = 16, 2
_EPSILON = 1e-8


class Scape(Averager):
    """AdamS whose momentum is averaged where a mask says, which workers have made a step before (Zheng et al., SCAPE,
    2026, from its abstract: its code is not published).

    Every worker owns a part of each tensor, and chooses there the largest elements of its own momentum; all receive
    the mask while they compute the next gradients. There the momenta of all workers are averaged, by an all-reduce.
    A gradient for the second moment is what takes the last average to the new one. AdamS divides by the root of ``beta2
    * m_before ** 2 + (1 - beta2) * gradient ** 2`` (Zhang et al., 2025). The first step is dense.

    Args:
        specs: The tensors, by registration index.
        density: Share of the elements that is averaged.
        workers: How many there are.
        betas: Of AdamS.
    """

    def __init__(self, specs: Sequence[TensorSpec], density: float, workers: int, betas: tuple[float, float]) -> None:
        self._density, self._workers, self._betas = density, workers, betas
        self._momenta: list[Tensor] = []  # float32 [workers, numel] of every tensor
        self._averaged = [torch.zeros(spec.numel) for spec in specs]  # when an element was in the mask last
        self._masks = [torch.ones(spec.numel, dtype=torch.bool) for spec in specs]
        self._dense_bytes = 4 * sum(spec.numel for spec in specs)

    def average(self, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        stacked = [torch.stack(of_all) for of_all in zip(*gradients, strict=True)]
        self._momenta = self._momenta or [torch.zeros_like(every) for every in stacked]
        entries = sum(int(mask.sum()) for mask in self._masks)
        position = _POSITION_BITS + math.log2(1 / self._density)
        few = entries < self._dense_bytes // 4
        self.bytes_sent = (
            math.ceil(entries * (_VALUE_BITS + position / self._workers) / 8) if few else self._dense_bytes
        )
        return [self._step(index, every) for index, every in enumerate(stacked)]

    def _step(self, index: int, gradients: Tensor) -> Tensor:
        """The step of a tensor, and the mask of its next one."""
        (beta1, beta2), mask, before = self._betas, self._masks[index], self._averaged[index]
        momenta = self._momenta[index].lerp_(gradients, 1 - beta1)
        mean = momenta.mean(0)
        momenta.copy_(torch.where(mask, mean, momenta))
        gradient = (mean - beta1 * before) / (1 - beta1)
        root = (beta2 * before.square() + (1 - beta2) * gradient.square()).sqrt_().add_(_EPSILON)
        self._averaged[index] = torch.where(mask, mean, before)
        own = torch.cat([part[rank] for rank, part in enumerate(momenta.tensor_split(self._workers, dim=1))]).abs()
        count = max(1, round(self._density * len(own)))
        self._masks[index] = torch.zeros_like(mask).index_fill_(0, own.topk(count).indices, True)
        return torch.where(mask, mean / root, 0.0)

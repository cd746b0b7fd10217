"""PowerSGD among virtual workers: the reference that sparsification is compared with at equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lab.virtual.workers import Averager
from lightning_safusion.fusion.layout import TensorSpec

_CPU = torch.device("cpu")
# torch's hook approximates where that saves more than this factor.
_MIN_COMPRESSION = 2
# Up to this rank columns are made orthogonal one by one: many matrices of a device in few launches.
_GRAM_SCHMIDT_RANK = 4


@dataclass
class _Matrices:
    """Tensors of one shape that are sent as two thin matrices each.

    Args:
        indices: Their places among the gradients.
        shape: Rows and columns.
        q: float32 [tensors, columns, rank]: where the next power iterations begin (warm start).
        errors: float32 [workers, tensors, rows, columns]: what was not transmitted (error feedback).
    """

    indices: Sequence[int]
    shape: tuple[int, int]
    q: Tensor
    errors: Tensor

    def average(self, gradients: Sequence[Sequence[Tensor]]) -> Tensor:
        """One power iteration on the means of the gradients and errors; float32 [tensors, rows, columns]."""
        flat = torch.stack([of_one[index] for of_one in gradients for index in self.indices])
        self.errors.add_(flat.view_as(self.errors))
        p = orthogonalized((self.errors @ orthogonalized(self.q)).sum(0))
        self.q = (self.errors.mT @ p).mean(0)
        means = p @ self.q.mT
        self.errors.sub_(means)
        return means


class PowerSGD(Averager):
    """Low-rank averaging with error feedback and warm start (Vogels et al., NeurIPS 2019, algorithms 1 and 2).

    Does what ``torch.distributed``'s ``powerSGD_hook`` with its default options and one bucket does on as many
    processes, from the same random start.

    Args:
        specs: The tensors.
        order: Indices of the tensors in their order in torch's bucket, which decides who gets which random numbers.
        workers: Virtual workers.
        rank: Of the approximations.
        start: Dense steps before the first compressed one.
        seed: Of the first power iteration.
        device: Where gradients live.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        order: Sequence[int],
        workers: int,
        rank: int,
        start: int,
        seed: int = 0,
        device: torch.device = _CPU,
    ) -> None:
        self._start = start
        self._steps = 0
        self.bytes_sent = 0
        self._dense_bytes = 4 * sum(spec.numel for spec in specs)
        shapes = {i: (specs[i].shape[0], specs[i].numel // specs[i].shape[0]) for i in order if specs[i].numel}
        ranks = {i: min(*shape, rank) for i, shape in shapes.items()}
        saves = [i for i, shape in shapes.items() if sum(shape) * ranks[i] * _MIN_COMPRESSION < specs[i].numel]
        # the hook takes equal shapes together, in the order in which each shape first comes
        groups: dict[tuple[int, int], list[int]] = {}
        for i in saves:
            groups.setdefault(shapes[i], []).append(i)
        generator = torch.Generator().manual_seed(int(np.random.RandomState(seed).randint(1_000_000_000)))
        self._groups = []
        for shape, indices in groups.items():
            q = torch.stack([torch.randn(shape[1], min(*shape, rank), generator=generator) for _ in indices])
            errors = torch.zeros(workers, len(indices), *shape, device=device)
            self._groups.append(_Matrices(indices, shape, q.to(device), errors))
        saved = sum(specs[i].numel - sum(shapes[i]) * ranks[i] for i in saves)
        self._compressed_bytes = self._dense_bytes - 4 * saved

    def average(self, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """One step.

        Args:
            gradients: By worker and registration index, flat, float32.

        Returns:
            The mean that every worker would have, by registration index, flat.
        """
        means = [_sum(of_all) / len(gradients) for of_all in zip(*gradients, strict=True)]
        self.bytes_sent = self._dense_bytes
        if self._steps >= self._start:
            self.bytes_sent = self._compressed_bytes
            for group in self._groups:
                for index, mean in zip(group.indices, group.average(gradients), strict=True):
                    means[index] = mean.flatten()
        self._steps += 1
        return means


def orthogonalized(matrices: Tensor) -> Tensor:
    """Orthonormal columns that span the same spaces, float32 [..., rows, rank].

    Of a mean only these spaces are seen: QR decompositions, as torch's hook makes them, give the same. Each column is
    made orthogonal twice, without which rounding leaves columns of nearly equal direction far from it.
    """
    if matrices.shape[-1] > _GRAM_SCHMIDT_RANK:
        return torch.linalg.qr(matrices).Q
    basis = torch.empty_like(matrices)
    for place in range(matrices.shape[-1]):
        column, before = matrices[..., place : place + 1], basis[..., :place]
        for _ in range(2 if place else 0):
            column = column - before @ (before.mT @ column)
        basis[..., place : place + 1] = column / torch.linalg.vector_norm(column, dim=-2, keepdim=True)
    return basis


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """In rank order, as everywhere."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total

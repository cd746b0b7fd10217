"""PowerSGD among virtual workers: the reference that sparsification is compared with at equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lab.virtual.workers import Averager
from lightning_safusion.fusion.layout import TensorSpec

# torch's hook approximates where that saves more than this factor.
_MIN_COMPRESSION = 2
# Up to this rank torch's hook orthogonalizes by Gram-Schmidt, beyond it by QR.
_GRAM_SCHMIDT_RANK = 2


@dataclass
class _Matrix:
    """A tensor that is sent as two thin matrices.

    Args:
        index: Its place among the gradients.
        shape: Rows and columns.
        q: float32 [columns, rank]: where the next power iteration begins (warm start).
        errors: float32 [rows, columns] of every worker: what was not transmitted (error feedback).
    """

    index: int
    shape: tuple[int, int]
    q: Tensor
    errors: list[Tensor]

    def average(self, gradients: Sequence[Tensor]) -> Tensor:
        """One power iteration on the mean of the gradients and errors; float32 [rows, columns]."""
        inputs = [g.view(self.shape) + error for g, error in zip(gradients, self.errors, strict=True)]
        q = orthogonalized(self.q)
        p = orthogonalized(_sum([x @ q for x in inputs]))
        self.q = _sum([x.T @ p for x in inputs]) / len(inputs)
        mean = p @ self.q.T
        self.errors = [x - mean for x in inputs]
        return mean


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

    """

    def __init__(
        self, specs: Sequence[TensorSpec], order: Sequence[int], workers: int, rank: int, start: int, seed: int = 0
    ) -> None:
        self._start = start
        self._steps = 0
        self.bytes_sent = 0
        self._dense_bytes = 4 * sum(spec.numel for spec in specs)
        shapes = {i: (specs[i].shape[0], specs[i].numel // specs[i].shape[0]) for i in order if specs[i].numel}
        ranks = {i: min(*shape, rank) for i, shape in shapes.items()}
        saves = [i for i, shape in shapes.items() if sum(shape) * ranks[i] * _MIN_COMPRESSION < specs[i].numel]
        # the hook takes equal shapes together, in the order in which each shape first comes
        groups = list(dict.fromkeys(shapes[i] for i in saves))
        generator = torch.Generator().manual_seed(int(np.random.RandomState(seed).randint(1_000_000_000)))
        self._matrices = []
        for i in sorted(saves, key=lambda i: groups.index(shapes[i])):
            q = torch.randn(shapes[i][1], ranks[i], generator=generator)
            self._matrices.append(_Matrix(i, shapes[i], q, [torch.zeros(shapes[i]) for _ in range(workers)]))
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
            for matrix in self._matrices:
                means[matrix.index] = matrix.average([of_one[matrix.index] for of_one in gradients]).flatten()
        self._steps += 1
        return means


def orthogonalized(matrix: Tensor) -> Tensor:
    """Orthonormal columns that span the same space, float32 [rows, rank]."""
    if matrix.shape[1] > _GRAM_SCHMIDT_RANK:
        return torch.linalg.qr(matrix).Q
    columns: list[Tensor] = []
    for column in matrix.T:
        for other in columns:
            column = column - (other * column).sum() * other
        columns.append(column / torch.linalg.vector_norm(column))
    return torch.stack(columns, 1)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """In rank order, as everywhere."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total

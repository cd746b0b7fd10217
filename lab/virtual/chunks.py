"""DeMo and SparseLoCo among virtual workers: the largest elements of chunks, around a whole optimizer."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lab.virtual.workers import Averager
from lightning_safusion.fusion.layout import TensorSpec

# Longest side of a chunk (both papers), and what is kept of AdamW's squares where no division is meant.
_LONGEST_SIDE = 64
_EPSILON = 1e-8
# Bits of a value that is sent: DeMo's in half precision, SparseLoCo's one of four.
_DEMO_BITS, _SPARSELOCO_BITS = 16, 2
#: Of DeMo's momentum, in its paper.
DEMO_DECAY = 0.999


@dataclass(frozen=True)
class Chunks:
    """A tensor cut into chunks whose sides divide its own: squares of a matrix, pieces of a vector.

    Args:
        rows: Of the tensor as a matrix.
        columns: The rest of its dimensions.
    """

    rows: int
    columns: int

    @staticmethod
    def of(spec: TensorSpec) -> Chunks:
        """Those of a tensor."""
        rows = spec.shape[0] if len(spec.shape) > 1 else 1
        return Chunks(rows, spec.numel // rows)

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of a chunk: the largest divisors up to 64."""
        height, width = (
            max(side for side in range(1, _LONGEST_SIDE + 1) if length % side == 0)
            for length in (self.rows, self.columns)
        )
        return height, width

    def cut(self, flat: Tensor) -> Tensor:
        """The chunks of a flat tensor, [chunks, height, width]."""
        height, width = self.sides
        tiles = flat.view(self.rows // height, height, self.columns // width, width)
        return tiles.transpose(1, 2).reshape(-1, height, width)

    def joined(self, chunks: Tensor) -> Tensor:
        """The flat tensor of chunks."""
        height, width = self.sides
        tiles = chunks.view(self.rows // height, self.columns // width, height, width)
        return tiles.transpose(1, 2).reshape(-1)


@cache
def cosines(size: int) -> Tensor:
    """The orthonormal DCT-II as a matrix, float32 [size, size]: a row for every frequency."""
    frequency, place = torch.arange(size).unsqueeze(1), torch.arange(size)
    matrix = torch.cos(math.pi / size * (place + 0.5) * frequency) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


def largest(chunks: Tensor, density: float) -> Tensor:
    """The chunks, zero but for the largest elements of each: a share of them, at least one."""
    flat = chunks.flatten(1)
    places = flat.abs().topk(_count(flat.shape[1], density), dim=1).indices
    return torch.zeros_like(flat).scatter_(1, places, flat.gather(1, places)).view_as(chunks)


def of_two_bits(chunks: Tensor) -> Tensor:
    """Every element that is not zero becomes a sign and one of two magnitudes, each the mean of those it stands for."""
    sizes = chunks.abs()
    mean = sizes.sum() / sizes.count_nonzero().clamp(min=1)
    levels = torch.zeros_like(sizes)
    for part in ((sizes > 0) & (sizes <= mean), sizes > mean):
        levels[part] = sizes[part].mean() if bool(part.any()) else 0.0
    return chunks.sign() * levels


def _count(size: int, density: float) -> int:
    return max(1, round(density * size))


class _Chunked(Averager):
    """What both have in common.

    Args:
        specs: The tensors, by registration index.
        workers: Virtual workers.
        density: Share of each chunk that is sent.
        bits: Of a value.
    """

    def __init__(self, specs: Sequence[TensorSpec], workers: int, density: float, bits: int) -> None:
        self._chunks = [Chunks.of(spec) for spec in specs]
        self._density = density
        self._kept = [[torch.zeros(spec.numel) for spec in specs] for _ in range(workers)]
        sent = 0
        for spec, chunks in zip(specs, self._chunks, strict=True):
            size = math.prod(chunks.sides)
            sent += spec.numel // size * _count(size, density) * (math.ceil(math.log2(max(2, size))) + bits)
        self.bytes_sent = math.ceil(sent / 8)

    def average(self, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        steps = []
        for index in range(len(self._chunks)):
            sent = [self._sent(worker, index, of_one[index]) for worker, of_one in enumerate(gradients)]
            steps.append(self._step(index, torch.stack(sent).mean(0)))
        self._ended()
        return steps

    @abstractmethod
    def _sent(self, worker: int, index: int, gradient: Tensor) -> Tensor:
        """The chunks of a tensor that a worker sends; the rest stays with it."""

    @abstractmethod
    def _step(self, index: int, mean: Tensor) -> Tensor:
        """The flat step that every worker takes, from the mean of the chunks."""

    def _ended(self) -> None:
        """After all tensors of a step."""


class DeMo(_Chunked):
    """Decoupled momentum: the largest cosine coefficients of each worker's momentum; steps are signs (Peng, Quesnelle
    and Kingma, 2024, algorithm 1).

    Args:
        specs: The tensors, by registration index.
        workers: Virtual workers.
        density: Share of the coefficients of a chunk that is sent.
        decay: Of the momentum.
    """

    def __init__(self, specs: Sequence[TensorSpec], workers: int, density: float, decay: float = DEMO_DECAY) -> None:
        super().__init__(specs, workers, density, _DEMO_BITS)
        self._decay = decay

    def _sent(self, worker: int, index: int, gradient: Tensor) -> Tensor:
        momentum = self._kept[worker][index].mul_(self._decay).add_(gradient)
        down, across = (cosines(side) for side in self._chunks[index].sides)
        sent = largest(down @ self._chunks[index].cut(momentum) @ across.T, self._density)
        momentum.sub_(self._chunks[index].joined(down.T @ sent @ across))
        return sent

    def _step(self, index: int, mean: Tensor) -> Tensor:
        down, across = (cosines(side) for side in self._chunks[index].sides)
        return self._chunks[index].joined(down.T @ mean @ across).sign()


class SparseLoCo(_Chunked):
    """Error feedback on each worker's own AdamW steps, one of them in a round (Sarfi et al., 2025, algorithm 1, H = 1).

    The residual is in units of the learning rate, which changes little in the time that it lasts.

    Args:
        specs: The tensors, by registration index.
        workers: Virtual workers.
        density: Share of the elements of a chunk that is sent.
        decay: Of the residual.
        betas: Of every worker's AdamW.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        workers: int,
        density: float,
        decay: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.99),
    ) -> None:
        super().__init__(specs, workers, density, _SPARSELOCO_BITS)
        self._decay, self._betas, self._steps = decay, betas, 1
        self._first, self._second = (
            [[torch.zeros(spec.numel) for spec in specs] for _ in range(workers)] for _ in range(2)
        )

    def _sent(self, worker: int, index: int, gradient: Tensor) -> Tensor:
        (beta1, beta2), chunks = self._betas, self._chunks[index]
        first = self._first[worker][index].lerp_(gradient, 1 - beta1)
        second = self._second[worker][index].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2**self._steps)).sqrt_().add_(_EPSILON)
        residual = self._kept[worker][index].mul_(self._decay).add_(first / (1 - beta1**self._steps) / root)
        sent = of_two_bits(largest(chunks.cut(residual), self._density))
        residual.sub_(chunks.joined(sent))
        return sent

    def _step(self, index: int, mean: Tensor) -> Tensor:
        return self._chunks[index].joined(mean)

    def _ended(self) -> None:
        self._steps += 1

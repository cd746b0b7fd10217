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
_CPU = torch.device("cpu")
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
        """The chunks of flat tensors, [..., chunks, height, width]."""
        height, width = self.sides
        tiles = flat.unflatten(-1, (self.rows // height, height, self.columns // width, width))
        return tiles.transpose(-3, -2).flatten(-4, -3)

    def joined(self, chunks: Tensor) -> Tensor:
        """The flat tensors of chunks."""
        height, width = self.sides
        tiles = chunks.unflatten(-3, (self.rows // height, self.columns // width))
        return tiles.transpose(-3, -2).flatten(-4)


@cache
def cosines(size: int, device: torch.device = _CPU) -> Tensor:
    """The orthonormal DCT-II as a matrix, float32 [size, size]: a row for every frequency."""
    frequency, place = torch.arange(size).unsqueeze(1), torch.arange(size)
    matrix = torch.cos(math.pi / size * (place + 0.5) * frequency) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.to(device)


def largest(chunks: Tensor, density: float) -> Tensor:
    """The chunks, zero but for the largest elements of each: a share of them, at least one."""
    flat = chunks.flatten(-2)
    places = flat.abs().topk(_count(flat.shape[-1], density), dim=-1).indices
    return torch.zeros_like(flat).scatter_(-1, places, flat.gather(-1, places)).view_as(chunks)


def of_two_bits(chunks: Tensor) -> Tensor:
    """Every element that is not zero becomes a sign and one of two magnitudes, each the mean of those it stands for.

    Args:
        chunks: Of one tensor, float32 [..., chunks, height, width].
    """
    sizes = chunks.abs()
    some = sizes > 0
    large = sizes > _mean_of(sizes, some)
    small = some & ~large
    return chunks.sign() * torch.where(large, _mean_of(sizes, large), torch.where(small, _mean_of(sizes, small), 0.0))


def _mean_of(sizes: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen elements of a tensor, 0 of none; a number for each tensor."""
    every = (-3, -2, -1)
    return (sizes * chosen).sum(every, keepdim=True) / chosen.sum(every, keepdim=True).clamp(min=1)


def over_senders(sent: Tensor) -> Tensor:
    """The mean of every entry over the workers that have sent it; 0 where nobody has.

    So do the released programs of DeMo (bloc97/DeMo), of SparseLoCo (templar) and of Psyche:
    ``scatter_reduce(..., "mean", include_self=False)``. The formula of SparseLoCo's paper divides by all workers. An
    entry that was sent as 0 does not count here.

    Args:
        sent: Of every worker, 0 where it sends nothing, float32 [workers, ...].
    """
    return sent.sum(0) / sent.count_nonzero(0).clamp(min=1)


def _count(size: int, density: float) -> int:
    return max(1, round(density * size))


class _Chunked(Averager):
    """What both have in common.

    Args:
        specs: The tensors, by registration index.
        density: Share of each chunk that is sent.
        bits: Of a value.
    """

    def __init__(self, specs: Sequence[TensorSpec], density: float, bits: int) -> None:
        self._chunks = [Chunks.of(spec) for spec in specs]
        self._density = density
        self._kept: list[Tensor] = []  # float32 [workers, numel] of every tensor, where its gradients live
        sent = 0
        for spec, chunks in zip(specs, self._chunks, strict=True):
            size = math.prod(chunks.sides)
            sent += spec.numel // size * _count(size, density) * (math.ceil(math.log2(max(2, size))) + bits)
        self.bytes_sent = math.ceil(sent / 8)

    def average(self, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        stacked = [torch.stack(of_all) for of_all in zip(*gradients, strict=True)]
        if not self._kept:
            self._begin(stacked)
        steps = [self._step(index, over_senders(self._sent(index, every))) for index, every in enumerate(stacked)]
        self._ended()
        return steps

    def _begin(self, gradients: Sequence[Tensor]) -> None:
        """Before the first step: memory for what is kept."""
        self._kept = [torch.zeros_like(every) for every in gradients]

    @abstractmethod
    def _sent(self, index: int, gradients: Tensor) -> Tensor:
        """The chunks of a tensor that each worker sends, [workers, chunks, height, width]; the rest stays with it.

        Args:
            index: Of the tensor.
            gradients: Of every worker, float32 [workers, numel].
        """

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
        density: Share of the coefficients of a chunk that is sent.
        decay: Of the momentum.
    """

    def __init__(self, specs: Sequence[TensorSpec], density: float, decay: float = DEMO_DECAY) -> None:
        super().__init__(specs, density, _DEMO_BITS)
        self._decay = decay

    def _sent(self, index: int, gradients: Tensor) -> Tensor:
        momentum = self._kept[index].mul_(self._decay).add_(gradients)
        down, across = (cosines(side, momentum.device) for side in self._chunks[index].sides)
        sent = largest(down @ self._chunks[index].cut(momentum) @ across.T, self._density)
        momentum.sub_(self._chunks[index].joined(down.T @ sent @ across))
        return sent

    def _step(self, index: int, mean: Tensor) -> Tensor:
        down, across = (cosines(side, mean.device) for side in self._chunks[index].sides)
        return self._chunks[index].joined(down.T @ mean @ across).sign()


class SparseLoCo(_Chunked):
    """Error feedback on each worker's own AdamW steps, one of them in a round (Sarfi et al., 2025, algorithm 1, H = 1).

    The residual is in units of the learning rate, which changes little in the time that it lasts.

    Args:
        specs: The tensors, by registration index.
        density: Share of the elements of a chunk that is sent.
        decay: Of the residual.
        betas: Of every worker's AdamW.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        density: float,
        decay: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.99),
    ) -> None:
        super().__init__(specs, density, _SPARSELOCO_BITS)
        self._decay, self._betas, self._steps = decay, betas, 1
        self._first: list[Tensor] = []
        self._second: list[Tensor] = []

    def _begin(self, gradients: Sequence[Tensor]) -> None:
        super()._begin(gradients)
        self._first, self._second = ([torch.zeros_like(every) for every in gradients] for _ in range(2))

    def _sent(self, index: int, gradients: Tensor) -> Tensor:
        (beta1, beta2), chunks = self._betas, self._chunks[index]
        first = self._first[index].lerp_(gradients, 1 - beta1)
        second = self._second[index].mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        root = (second / (1 - beta2**self._steps)).sqrt_().add_(_EPSILON)
        residual = self._kept[index].mul_(self._decay).add_(first / (1 - beta1**self._steps) / root)
        sent = of_two_bits(largest(chunks.cut(residual), self._density))
        residual.sub_(chunks.joined(sent))
        return sent

    def _step(self, index: int, mean: Tensor) -> Tensor:
        return self._chunks[index].joined(mean)

    def _ended(self) -> None:
        self._steps += 1

"""A deep transformer over bytes whose passes several workers can share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from lab.tasks.models import BYTES

_STD = 0.02  # of the initial weights, as GPT-2's


@dataclass(frozen=True)
class Shape:
    """Of a transformer.

    Args:
        width: Of the residual stream.
        depth: Blocks.
        heads: Attention heads.
        length: Longest sequence.
    """

    width: int
    depth: int
    heads: int
    length: int


class _Block(nn.Module):
    """The weights of a block, in the order in which :meth:`BytePredictor.scores` takes them.

    Args:
        shape: Of the transformer.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, last = shape.width, _STD / math.sqrt(2 * shape.depth)
        self.before_attention = nn.Parameter(torch.ones(width))
        self.queries_keys_values = _drawn(width, 3 * width)
        self.attended = _drawn(width, width, last)
        self.before_perceptron = nn.Parameter(torch.ones(width))
        self.up = _drawn(width, 4 * width)
        self.down = _drawn(4 * width, width, last)


def _drawn(rows: int, columns: int, std: float = _STD) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * std)


class BytePredictor(nn.Module):
    """A causal transformer over bytes with tied embeddings and without biases, normalised before each block.

    Args:
        shape: Its shape.
        multiplied: Type of the products, as under autocast; normalisation, residual stream and loss are float32.
    """

    def __init__(self, shape: Shape, multiplied: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape, self.multiplied = shape, multiplied
        self.bytes, self.places = _drawn(BYTES, shape.width), _drawn(shape.length, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.depth))
        self.norm = nn.Parameter(torch.ones(shape.width))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next bytes, [batch, length, 256], of int64 [batch, length]."""
        return self.scores(x[None], [param[None] for param in self.parameters()])[0]

    def leaves(self, workers: int) -> list[Tensor]:
        """The weights as so many workers hold them, [workers, ...], in the order of registration; not copies.

        Matrices of blocks are rounded to ``multiplied`` first, as autocast does. Gradients are the workers' own.
        """
        rounded = {id(param) for param in self.blocks.parameters() if param.ndim == 2}
        return [
            (param.detach().to(self.multiplied) if id(param) in rounded else param.detach())
            .expand(workers, *param.shape)
            .requires_grad_()
            for param in self.parameters()
        ]

    def scores(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Scores of the next bytes, [workers, batch, length, 256].

        Args:
            x: int64 [workers, batch, length].
            weights: As of :meth:`leaves`.
        """
        workers, batch, length = x.shape
        table, places, norm, *blocks = weights
        own = BYTES * torch.arange(workers, device=x.device).view(-1, 1, 1)  # where each worker's table begins
        hidden = functional.embedding(x + own, table.reshape(-1, self.shape.width))
        hidden = (hidden + places[:, None, :length]).flatten(1, 2)
        for first, qkv, attended, second, up, down in zip(*[iter(blocks)] * 6, strict=True):
            mixed = self._attention(self._product(self._normal(hidden, first), qkv), workers * batch)
            hidden = hidden + self._product(mixed.view(workers, batch * length, -1), attended)
            inner = functional.gelu(self._product(self._normal(hidden, second), up))
            hidden = hidden + self._product(inner, down)
        return self._product(self._normal(hidden, norm), table.mT).view(workers, batch, length, BYTES)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x.to(self.multiplied), weight.to(self.multiplied))

    def _normal(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.layer_norm(hidden, hidden.shape[-1:]) * weight[:, None]

    def _attention(self, mixed: Tensor, sequences: int) -> Tensor:
        """What each place takes from those before it; [sequences, length, width]."""
        parts = mixed.view(sequences, -1, 3, self.shape.heads, self.shape.width // self.shape.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        taken = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return taken.transpose(1, 2).flatten(2)

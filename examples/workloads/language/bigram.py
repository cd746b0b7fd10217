"""A bigram model: what a language model that looks back one token only can reach."""

from __future__ import annotations

import torch
from torch import Tensor

SMOOTHINGS = (0.01, 0.03, 0.1, 0.3, 1.0)


def bigram_perplexity(train: Tensor, held_out: Tensor, vocabulary_size: int) -> float:
    """The perplexity per token of a bigram model with add-k smoothing.

    Args:
        train: Text that pairs are counted in, int64 [tokens].
        held_out: Text that is predicted, int64 [tokens].
        vocabulary_size: Number of different tokens.

    Returns:
        The lowest one over ``k`` in :data:`SMOOTHINGS`. It is fitted to the held-out text itself, so that no choice of
        ours makes the model look worse than it is.
    """
    counts = torch.zeros(vocabulary_size, vocabulary_size)
    counts.index_put_((train[:-1], train[1:]), torch.ones(len(train) - 1), accumulate=True)
    perplexities = []
    for k in SMOOTHINGS:
        probability = (counts + k) / (counts.sum(dim=1, keepdim=True) + k * vocabulary_size)
        perplexities.append(float(probability[held_out[:-1], held_out[1:]].log().mean().neg().exp()))
    return min(perplexities)

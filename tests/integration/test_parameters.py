"""Weights that all workers share before their optimizers are made."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_safusion.integration.parameters import share_parameters
from tests.models import equal, weights
from tests.process_group import run_ranks


def test_parameters_become_those_of_the_first_rank() -> None:
    def run(rank: int) -> list[Tensor]:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, dtype=torch.bfloat16))
        model._ddp_params_and_buffers_to_ignore = ["1.bias"]  # type: ignore[assignment]  # as DDP reads it
        share_parameters(model)
        return weights(model)

    first, second = run_ranks(2, run)
    assert [torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True)] == [True, True, True, False]


def test_what_differs_is_left_to_the_comparison_of_settings() -> None:
    def run(rank: int) -> list[bool]:
        share_parameters(nn.LazyLinear(2) if rank else nn.Linear(3, 2))  # does not know its shapes yet
        kept = []
        for model, wanted in ((nn.Linear(3, 2 + rank), True), (nn.Linear(3, 2), rank == 0)):
            before = weights(model)
            share_parameters(model, wanted=wanted)
            kept.append(equal(before, weights(model)))
        return kept

    assert run_ranks(2, run) == [[True, True]] * 2

"""Weights that all workers share before their optimizers are made."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_safusion.integration.parameters import share_parameters
from tests.models import weights
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


def test_other_shapes_are_left_to_the_comparison_of_settings() -> None:
    def run(rank: int) -> bool:
        model = nn.Linear(3, 2 + rank)
        before = model.weight.detach().clone()
        share_parameters(model)
        return torch.equal(model.weight, before)

    assert run_ranks(2, run) == [True, True]

"""Remedies that need Adam's state: selection in units of its steps, a second moment that stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lab.convergence.adaptive import ClippedResidual, FrozenSecondMoment
from lab.convergence.scheme import Scheme
from lab.convergence.training import train
from lab.tasks import TASKS

TASK = replace(TASKS["bytes-transformer"], steps=4, batch=4)


def stepped(gradients: list[torch.Tensor]) -> tuple[list[nn.Parameter], torch.optim.AdamW]:
    params = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.AdamW(params, lr=0.1)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    optimizer.step()
    return params, optimizer


def test_the_second_moment_stays_from_a_step_on() -> None:
    params, optimizer = stepped([torch.ones(4), torch.ones(2)])
    frozen = FrozenSecondMoment(optimizer, begin=3)
    seen = []
    for step in range(1, 5):
        for param in params:
            param.grad = torch.full_like(param, step + 1.0)
        optimizer.step()
        frozen.after_step(step)
        seen.append(float(optimizer.state[params[0]]["exp_avg_sq"][0]))
    assert seen[0] < seen[1] == seen[2] == seen[3]


@pytest.mark.slow
def test_they_are_part_of_a_run() -> None:
    plain = Scheme("pooled", density=0.05, dense_below=512)
    metrics = {scheme.name: train(TASK, scheme, 0).metric for scheme in (plain, replace(plain, frozen=0.5))}
    assert len(set(metrics.values())) == len(metrics)


def test_a_residual_is_cut_down_to_some_norms_of_the_gradient() -> None:
    memory = ClippedResidual(factor=2.0)
    memory.bind([0, 2, 4], torch.device("cpu"))
    first = [torch.tensor([30.0, 40.0]), torch.tensor([0.3, 0.4])]
    memory.compensate([0, 1], first, [False, False], torch.tensor([50.0, 0.5]))
    assert memory.accumulated(0, 4).tolist() == torch.cat(first).tolist()
    second = [torch.tensor([3.0, 4.0]), torch.tensor([0.3, 0.4])]
    memory.compensate([0, 1], second, [False, False], torch.tensor([5.0, 0.5]))
    # the first residual has ten norms of the new gradient, of which two stay; the second has one
    torch.testing.assert_close(memory.accumulated(0, 4), torch.tensor([9.0, 12.0, 0.6, 0.8]))

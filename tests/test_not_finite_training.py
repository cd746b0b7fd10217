"""Trainings with gradients that are not finite end where DDP's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_safusion import SAFusionStrategy
from tests.models import equal, fit_both


class Spoilt(LightningModule):
    """One element of a gradient is NaN on one rank in every second step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.losses = how, list[float]()
        self.automatic_optimization = how != "one of two skips"
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        self.net[0].weight.register_hook(self._spoil)

    def _spoil(self, grad: Tensor) -> Tensor:
        if len(self.losses) % 2 == 0 and self.global_rank == 0:
            grad = grad.clone()
            grad[0, 7] = float("nan")
        return grad

    def _finite(self, module: nn.Module) -> bool:
        return all(bool(torch.isfinite(p.grad).all()) for p in module.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        if self.automatic_optimization:
            return loss
        optimizers: Any = self.optimizers()
        self.manual_backward(loss)
        for optimizer, module in zip(optimizers, (self.net[0], self.net[2]), strict=True):
            if self._finite(module):
                optimizer.step()
            optimizer.zero_grad()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.how == "repaired":
            for param in self.net.parameters():
                param.grad.nan_to_num_(0.0)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.how == "skipped":
            optimizer_closure()
            if self._finite(self.net):
                optimizer.step()
        else:
            optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self) -> Any:
        if self.how == "one of two skips":
            return [torch.optim.SGD(module.parameters(), 0.05, momentum=0.9) for module in (self.net[0], self.net[2])]
        return torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["skipped", "repaired", "one of two skips"])
def test_the_loss_is_that_of_ddp(how: str) -> None:
    def train(strategy: Any) -> float:
        ours, theirs = fit_both(strategy, Spoilt(how), max_epochs=3)
        assert equal(ours.weights, theirs.weights)
        return sum(ours.losses[-20:] + theirs.losses[-20:]) / 40

    plain = train("ddp")
    assert train(SAFusionStrategy(density=1.0, collective="allgather")) == pytest.approx(plain, rel=0.02)
    assert train(SAFusionStrategy(density=0.1, collective="allgather")) < 1.1 * plain  # as without such steps

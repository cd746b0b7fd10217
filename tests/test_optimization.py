"""Optimization that is not one backward, one step: several backwards, closures, SAM, two optimizers.

At density 1 the trajectory is that of ``ddp``; at a low density replicas stay equal and the residual loses nothing
that a thrown-away gradient could take with it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_safusion import SAFusionStrategy
from tests.models import classification, trainer
from tests.process_group import run_launched

MODES = ["several backwards", "sam", "lbfgs", "gan", "gan toggled", "alternating", "skipped steps"]


class Loops(LightningModule):
    """Manual optimization of two linear layers in the ways that people do it."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.mode = mode
        self.automatic_optimization = mode == "lbfgs"
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 10)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.second(self.first(batch[0]).tanh()), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizers = self.optimizers()
        if self.mode.startswith("gan") or self.mode == "alternating":
            self._two(optimizers, batch, batch_idx)
            return None
        optimizers.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.mode == "several backwards":
            self.manual_backward(0.5 * self.loss((batch[0].flip(0), batch[1].flip(0))) ** 2)
        if self.mode == "sam":
            self._sam(batch)
        if self.mode != "skipped steps" or batch_idx % 3 != 1:
            optimizers.step()
        return None

    def _two(self, optimizers: Any, batch: Any, batch_idx: int) -> None:
        for place, optimizer in enumerate(optimizers):
            if self.mode == "alternating" and place != batch_idx % 2:
                continue
            if self.mode == "gan toggled":
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch) * (1.0 if place else -0.1))
            optimizer.step()
            if self.mode == "gan toggled":
                self.untoggle_optimizer(optimizer)

    def _sam(self, batch: Any) -> None:
        """Sharpness-aware minimisation: the first gradient only says where to take the second."""
        with torch.no_grad():
            grads = [p.grad.clone() for p in self.parameters()]
            norm = torch.stack([g.norm() for g in grads]).norm()
            for p, g in zip(self.parameters(), grads, strict=True):
                p.add_(g, alpha=0.05 / float(norm))
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p, g in zip(self.parameters(), grads, strict=True):
                p.sub_(g, alpha=0.05 / float(norm))

    def configure_optimizers(self) -> Any:
        if self.mode == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        if self.mode.startswith("gan") or self.mode == "alternating":
            return [torch.optim.SGD(m.parameters(), 0.05) for m in (self.first, self.second)]
        return torch.optim.SGD(self.parameters(), 0.1)


def train(mode: str, strategy: Any) -> tuple[list[Tensor], Any]:
    model = Loops(mode)
    run = trainer(strategy, limit_train_batches=12)
    run.fit(model, classification())
    return [p.detach().clone() for p in model.parameters()], run


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", MODES)
def test_at_density_1_the_trajectory_is_that_of_ddp(mode: str) -> None:
    options = {"find_unused_parameters": mode.startswith("gan") or mode == "alternating"}

    def both(rank: int) -> float:
        plain, _ = train(mode, DDPStrategy(**options))
        ours, _ = train(mode, SAFusionStrategy(density=1.0, collective="allgather", **options))
        return max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))

    assert max(run_launched(2, both)) <= 2e-6


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", MODES)
def test_at_a_low_density_replicas_stay_equal_and_train(mode: str) -> None:
    options = {"find_unused_parameters": mode.startswith("gan") or mode == "alternating"}

    def sparse(rank: int) -> list[Tensor]:
        parameters, _ = train(mode, SAFusionStrategy(density=0.05, collective="allgather", dense_below=0, **options))
        return parameters

    first, second = run_launched(2, sparse)
    start = [p.detach() for p in Loops(mode).parameters()]
    for a, b, begin in zip(first, second, start, strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(a).all()
        assert not torch.equal(a, begin)

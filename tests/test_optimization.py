"""Optimization that is not one backward, one step: several backwards, closures, SAM, two optimizers.

At density 1 the trajectory is that of ``ddp``. At a low density replicas stay equal, and the books balance: what the
exchange was given is in ``.grad`` or held back; what no optimizer throws away reaches one or is held back; where
gradients are thrown away, optimizers step with the gradients of ``ddp``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_safusion import SAFusionStrategy
from tests.ledger import Ledger, assert_balanced
from tests.models import distance, equal, fit, weights
from tests.process_group import run_launched
from tests.quick import quick_of

MODES = ["several backwards", "sam", "lbfgs", "gan", "gan toggled", "alternating", "skipped steps", "accumulation"]
QUICK = ("sam", "lbfgs", "gan", "skipped steps", "accumulation")
TWO_OPTIMIZERS = ("gan", "gan toggled", "alternating")
# Where gradients are thrown away: steps whose gradients are those of ddp. A tensor's first gradient is not yet known to
# be one that may be thrown away, nor is the first after a step.
AS_IN_DDP = {
    "sam": slice(None),
    "gan": slice(1, None),
    "alternating": slice(1, None),
    "skipped steps": slice(1, None, 2),
}


class Loops(LightningModule):
    """Manual optimization of two linear layers in the ways that people do it."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.mode = mode
        self.automatic_optimization = mode in ("lbfgs", "accumulation")
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 10)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.second(self.first(batch[0]).tanh()), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizers = self.optimizers()
        if self.mode in TWO_OPTIMIZERS:
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
        if self.mode in TWO_OPTIMIZERS:
            return [torch.optim.SGD(m.parameters(), 0.05) for m in (self.first, self.second)]
        return torch.optim.SGD(self.parameters(), 0.1)


def train(mode: str, kind: type[DDPStrategy], callbacks: Sequence[Callback] = (), **options: Any) -> list[Tensor]:
    strategy = kind(find_unused_parameters=mode in TWO_OPTIMIZERS, **options)
    accumulate = 5 if mode == "accumulation" else 1  # the last two alone
    settings = {"limit_train_batches": 7, "accumulate_grad_batches": accumulate}
    return fit(strategy, Loops(mode), callbacks=list(callbacks), **settings).weights


def train_all(rank: int, modes: Sequence[str]) -> dict[str, tuple[float, list[Tensor], Ledger]]:
    """By mode: how far density 1 ends from DDP, and what a low density ends with."""
    found = {}
    for mode in modes:
        ledger = Ledger()
        plain = train(mode, DDPStrategy)
        whole = train(mode, SAFusionStrategy, density=1.0, collective="allgather")
        options = {"density": 0.05, "collective": "allgather", "dense_below": 0}
        sparse = train(mode, SAFusionStrategy, [] if mode == "lbfgs" else [ledger], **options)
        apart = plain if mode != "lbfgs" else sparse  # it is left to plain DDP
        found[mode] = distance(whole, plain) + distance(apart, plain), sparse, ledger
    return found


@pytest.fixture(scope="module")
def trained() -> Callable[[str], list[Any]]:
    """What both workers have found of a mode; the quick ones are trained together, and the others."""
    by_group: dict[bool, list[Any]] = {}

    def of(mode: str) -> list[Any]:
        quick = mode in QUICK
        if quick not in by_group:
            by_group[quick] = run_launched(2, train_all, [each for each in MODES if (each in QUICK) == quick])
        return [found[mode] for found in by_group[quick]]

    return of


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.costly(reason="the first of them trains all modes of the quick tests")
@pytest.mark.parametrize("mode", quick_of(MODES, QUICK))
def test_at_density_1_the_trajectory_is_that_of_ddp(trained: Callable[[str], list[Any]], mode: str) -> None:
    """With L-BFGS at any density: it is left to plain DDP."""
    assert max(apart for apart, _, _ in trained(mode)) <= 2e-6


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", quick_of([mode for mode in MODES if mode != "lbfgs"], QUICK))
def test_at_a_low_density_replicas_stay_equal_and_nothing_is_lost(
    trained: Callable[[str], list[Any]], mode: str
) -> None:
    (_, first, mine), (_, second, theirs) = trained(mode)
    assert equal(first, second)
    for a, begin in zip(first, weights(Loops(mode)), strict=True):
        assert torch.isfinite(a).all()
        assert not torch.equal(a, begin)
    assert_balanced(mine, theirs, to="delivered")
    if mode not in AS_IN_DDP:
        assert_balanced(mine, theirs, to="used")
        return
    for name, steps in mine.steps.items():
        for (used, own), (_, other) in list(zip(steps, theirs.steps[name], strict=True))[AS_IN_DDP[mode]]:
            torch.testing.assert_close(used, (own + other) / 2, rtol=0, atol=1e-6 * float(used.abs().max()))

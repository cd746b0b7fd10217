"""Keeps the books of a training: what every gradient has become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_safusion.fusion.state import local_state

Sums = dict[str, Tensor]  # by parameter name, float64, of this rank


class HeldBack(Callback):
    """Notes what the strategy holds back at the end, where there is an engine."""

    def __init__(self) -> None:
        self.held: Sums = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = getattr(trainer.strategy, "engine", None)
        residual = local_state(engine)["memory"]["residual"] if engine is not None else {}
        self.held = {name: held.double().clone() for name, held in residual.items()}


class Ledger(HeldBack):
    """Sums over a training on one rank, by parameter name.

    Attributes:
        local: This rank's own gradients, by a backward pass of its own that no hook sees.
        delivered: What the real backward passes have added to ``.grad``.
        used: What optimizers have stepped with.
        steps: By parameter name, for every optimizer step: its gradient, and the sum of this rank's own gradients since
            ``.grad`` was last empty.
    """

    def __init__(self) -> None:
        super().__init__()
        self.local: Sums = {}
        self.delivered: Sums = {}
        self.used: Sums = {}
        self.steps: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._before: dict[str, Tensor] = {}
        self._since_empty: dict[str, Tensor] = {}

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        parameters = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        self._before = _gradients(pl_module)
        for name, gradient in zip(parameters, gradients, strict=True):
            if name not in self._before:
                self._since_empty.pop(name, None)
            if gradient is not None:
                _add(self.local, name, gradient)
                _add(self._since_empty, name, gradient)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, gradient in _gradients(pl_module).items():
            _add(self.delivered, name, gradient)
            if name in self._before:
                _add(self.delivered, name, -self._before[name])

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        names = {id(p): name for name, p in pl_module.named_parameters()}
        for parameter in [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]:
            name = names[id(parameter)]
            _add(self.used, name, parameter.grad)
            step = parameter.grad.double().clone(), self._since_empty[name].clone()
            self.steps.setdefault(name, []).append(step)


def assert_balanced(mine: Ledger, theirs: Ledger, to: Literal["delivered", "used"], names: Sequence[str] = ()) -> None:
    """All that two ranks have computed of these parameters has been delivered (or: was used), or is held back."""
    assert any(bool(held.any()) for held in mine.held.values())
    for name in names or mine.held:
        given = mine.local[name] + theirs.local[name]
        found = sum(getattr(book, to)[name] + book.held[name] for book in (mine, theirs))
        difference = float((found - given).abs().max())
        assert difference <= 1e-5 * float(given.abs().max()), f"{name}: {difference} of {float(given.abs().max())}"


def _add(sums: Sums, name: str, value: Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value.double().clone()


def _gradients(module: LightningModule) -> Sums:
    return {name: p.grad.double().clone() for name, p in module.named_parameters() if p.grad is not None}

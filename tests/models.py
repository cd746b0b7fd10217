"""Small LightningModules and data that the tests train, and what such a training ends with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.process_group import run_launched


class TinyClassifier(LightningModule):
    """Two layers with a norm, and tensors of 1 to 8192 elements; ``make`` may make another optimizer."""

    def __init__(self, lr: float = 0.1, seed: int = 0, make: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lr, self.make = lr, make
        self.net = nn.Sequential(nn.Linear(32, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 10))
        self.temperature = nn.Parameter(torch.ones(1))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.temperature

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters()) if self.make else torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


class TakeTurns(TinyClassifier):
    """Two optimizers, each with a backward pass of its own in every batch."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]  # returns no loss
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        last = [*self.net[3].parameters(), self.temperature]
        return [torch.optim.SGD(self.net[:3].parameters(), 0.1), torch.optim.SGD(last, 0.1)]


class Orthogonalized(TinyClassifier):
    """Muon for matrices, AdamW for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        matrices = [param for param in self.parameters() if param.ndim == 2]
        others = [param for param in self.parameters() if param.ndim != 2]
        return torch.optim.Muon(matrices, 0.01), torch.optim.AdamW(others, 0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss


def classification(samples: int = 640, batch_size: int = 16) -> DataLoader[Any]:
    """A task that a linear model can learn, the same in every process."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 32, generator=generator)
    y = (x @ torch.randn(32, 10, generator=generator)).argmax(1)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def trainer(strategy: Any, **options: Any) -> Trainer:
    """A quiet CPU trainer on two devices that writes nothing."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(strategy=strategy, **(defaults | options))


class CompilesWrapped(Callback):
    """Compiles DDP itself, which splits the graph along its buckets."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.model = torch.compile(trainer.strategy.model, backend="aot_eager")


class Lines(logging.Handler):
    """Keeps what the strategy says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def switched(job: Trainer) -> int:
    """How many optimizers step with their momentum switched off, which a hook before their steps does."""
    return sum(bool(optimizer._optimizer_step_pre_hooks) for optimizer in job.optimizers)


class Fitted(NamedTuple):
    """What a training has ended with on one rank."""

    weights: list[Tensor]
    losses: list[float]
    figures: dict[str, Any]  # of this package's strategy


def fit(strategy: Any, model: LightningModule | None = None, **options: Any) -> Fitted:
    """Trains on this rank, a :class:`TinyClassifier` by default; ``options`` are the trainer's."""
    model = TinyClassifier() if model is None else model
    trainer(strategy, **options).fit(model, classification())
    return Fitted(weights(model), getattr(model, "losses", []), getattr(strategy, "figures", dict)())


def fit_both(strategy: Any, model: LightningModule | None = None, **options: Any) -> list[Fitted]:
    """The same on each of two ranks that a launcher has started."""
    return run_launched(2, lambda rank: fit(strategy, model, **options))


def weights(module: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in module.parameters()]


def equal(ours: Any, theirs: Any) -> bool:
    """Whether tensors, or lists of them, are equal to the last bit."""
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs)
    return len(ours) == len(theirs) and all(map(equal, ours, theirs))


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))

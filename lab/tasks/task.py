"""What is trained: network, data, optimizer and its schedule, as data."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from lab.tasks.data import Data
from lab.tasks.optimizers import OPTIMIZERS
from lightning_safusion.lookup import look_up

# Held-out samples that are evaluated together.
_EVALUATED = 64
# What its name stands for in a recipe, and what is in a recipe only if it is not as usual: results of before lack it.
PARTS = ("name", "model", "data", "metric")
_LATER = ("clip_value", "accumulate", "precision", "sam", "schedule", "ema", "fused", "swa")
_VERSIONS = {"python": platform.python_version(), "torch": torch.__version__.split("+")[0]}


@dataclass(frozen=True)
class Task:
    """One training.

    Args:
        name: In tables, and on the command line.
        model: Builds the network; torch's generator decides the weights.
        data: Batches, from a seed and the samples per step.
        metric: What is measured on held-out data: ``"accuracy"``, or ``"loss"`` (see :func:`loss`).
        optimizer: One of :data:`OPTIMIZERS`.
        lr: Largest learning rate.
        steps: Optimizer steps.
        batch: Samples of all workers in a step.
        momentum: Of SGD; the first beta of AdamW.
        beta2: Of AdamW.
        weight_decay: Of the optimizer.
        clip: Largest norm of the averaged gradient; None leaves it as it is.
        clip_value: Largest magnitude of its elements.
        accumulate: Batches whose gradients are summed before they are averaged.
        precision: ``"bf16"``: forward passes under autocast.
        sam: Distance of the ascent of sharpness-aware minimisation (Foret et al., ICLR 2021), by each worker's own
            gradient; 0: plain gradients.
        warmup: Share of the steps in which the learning rate rises; then it falls to zero along a cosine.
        schedule: ``"cosine"``: as ``warmup`` says; ``"onecycle"``: as ``OneCycleLR`` has it by default, with a first
            beta that falls from 0.95 to 0.85 and rises again; ``"constant"``.
        ema: Decay of an average of the weights over time, which is evaluated in their place; 0: none.
        fused: Adam's kind steps in one kernel.
        swa: Share of the steps, the last ones, after which the weights are averaged; the average is evaluated
            (Izmailov et al., Averaging Weights Leads to Wider Optima, UAI 2018); 0: none.
        revision: Raised whenever network or data change, so that results of before are not taken for new ones.
    """

    name: str
    model: Callable[[], nn.Module]
    data: type[Data]
    metric: Literal["accuracy", "loss"]
    optimizer: str
    lr: float
    steps: int
    batch: int
    momentum: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 1e-4
    clip: float | None = None
    warmup: float = 0.0
    revision: int = 1
    clip_value: float | None = None
    accumulate: int = 1
    precision: Literal["32", "bf16"] = "32"
    sam: float = 0.0
    schedule: Literal["cosine", "onecycle", "constant"] = "cosine"
    ema: float = 0.0
    fused: bool = False
    swa: float = 0.0

    def __post_init__(self) -> None:
        if self.sam and self.accumulate > 1:
            raise ValueError(f"sam goes with accumulate=1, got {self.accumulate}: every batch has an ascent of its own")

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger metric is a better one."""
        return self.metric == "accuracy"

    def recipe(self) -> dict[str, Any]:
        """What a result depends on besides the scheme and the seed; plain values."""
        plain = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in PARTS and (f.name not in _LATER or getattr(self, f.name) != f.default)
        }
        return plain | {package: _VERSIONS[package] for package in self.data.made_of}

    def rate(self, step: int) -> float:
        """Learning rate of a step, as a share of ``lr``."""
        if self.optimizer == "schedule-free":
            return 1.0  # warms up by itself
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "onecycle":
            return self._cycled(step, 1 / 25, 1.0, 1 / 25e4)
        rising = round(self.warmup * self.steps)
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, self.steps - rising)))

    def beta1(self, step: int) -> float:
        """Momentum of a step, the first beta of Adam's kind."""
        return self._cycled(step, 0.95, 0.85, 0.95) if self.schedule == "onecycle" else self.momentum

    def _cycled(self, step: float, first: float, middle: float, last: float) -> float:
        """Between three values along half a cosine each, as ``torch.optim.lr_scheduler.OneCycleLR`` does."""
        turn, end = 0.3 * self.steps - 1, self.steps - 1
        if step > turn:
            first, middle, step, turn = middle, last, step - turn, end - turn
        return middle + (first - middle) / 2 * (1 + math.cos(math.pi * step / turn))

    def make_optimizers(
        self, params: Iterable[Tensor], lr: float, momentum: float | None = None, beta2: float | None = None
    ) -> list[Optimizer]:
        """The optimizer, or several for parameters of their own.

        Args:
            params: What is trained.
            lr: Learning rate.
            momentum: In place of the task's; the first beta of Adam's kind.
            beta2: In place of the task's.
        """
        make = look_up("optimizer", self.optimizer, OPTIMIZERS)
        momentum, beta2 = self.momentum if momentum is None else momentum, self.beta2 if beta2 is None else beta2
        return make(self, list(params), lr, momentum, beta2)


def loss(model: nn.Module, inputs: Tensor, classes: Tensor) -> Tensor:
    """Mean cross entropy in nats; of numbers that are to be predicted the mean squared error."""
    if classes.is_floating_point():
        return functional.mse_loss(model(inputs), classes)
    return functional.cross_entropy(model(inputs).flatten(0, -2), classes.flatten())


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, data: Data) -> float:
    """The task's metric on the held-out samples; not finite if the weights are not."""
    model.eval()
    inputs, classes = data.validation()
    total = 0.0
    for x, y in zip(inputs.split(_EVALUATED), classes.split(_EVALUATED), strict=True):
        if y.is_floating_point():
            total += float(functional.mse_loss(model(x), y, reduction="sum"))
            continue
        scores = model(x).flatten(0, -2)
        if not bool(torch.isfinite(scores).all()):
            return math.nan
        if task.metric == "accuracy":
            total += float((scores.argmax(-1) == y.flatten()).sum())
        else:
            total += float(functional.cross_entropy(scores, y.flatten(), reduction="sum"))
    model.train()
    return total / classes.numel()

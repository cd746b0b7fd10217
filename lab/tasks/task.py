"""What is trained: network, data, optimizer and its schedule, as data."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from lab.tasks.data import Data, Digits, DigitsTwice, Prose, Text
from lab.tasks.models import ByteLSTM, ByteTransformer, DigitsViT, PlainConvNet, TwoHeads
from lightning_safusion.demo.digits import WIDTHS, DigitsNet

# Held-out samples that are evaluated together.
_EVALUATED = 64


@dataclass(frozen=True)
class Task:
    """One training.

    Args:
        name: In tables, and on the command line.
        model: Builds the network; torch's generator decides the weights.
        data: Builds the batches from a seed and the samples per step.
        metric: What is measured on held-out data: ``"accuracy"``, or ``"loss"`` (cross entropy, nats).
        optimizer: ``"sgd"`` or ``"adamw"``.
        lr: Largest learning rate.
        steps: Optimizer steps.
        batch: Samples of all workers in a step.
        momentum: Of SGD; the first beta of AdamW.
        beta2: Of AdamW.
        weight_decay: Of the optimizer.
        clip: Largest norm of the averaged gradient; None leaves it as it is.
        warmup: Share of the steps in which the learning rate rises; then it falls to zero along a cosine.
        revision: Raised whenever network or data change, so that results of before are not taken for new ones.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int, int], Data]
    metric: Literal["accuracy", "loss"]
    optimizer: Literal["sgd", "adamw"]
    lr: float
    steps: int
    batch: int
    momentum: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 1e-4
    clip: float | None = None
    warmup: float = 0.0
    revision: int = 1

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger metric is a better one."""
        return self.metric == "accuracy"

    def recipe(self) -> dict[str, Any]:
        """What a result depends on besides the scheme and the seed; plain values."""
        plain = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("name", "model", "data", "metric")
        }
        return plain | ({"python": platform.python_version()} if self.data in (Text, Prose) else {})

    def rate(self, step: int) -> float:
        """Learning rate of a step, as a share of ``lr``."""
        rising = round(self.warmup * self.steps)
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, self.steps - rising)))

    def make_optimizer(
        self, params: Iterable[Tensor], lr: float, momentum: float | None = None, beta2: float | None = None
    ) -> torch.optim.Optimizer:
        """The optimizer.

        Args:
            params: What it trains.
            lr: Its learning rate.
            momentum: In place of the task's; the first beta of AdamW.
            beta2: In place of the task's, of AdamW.
        """
        momentum = self.momentum if momentum is None else momentum
        options: dict[str, Any] = {"lr": lr, "weight_decay": self.weight_decay, "foreach": True}
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, momentum=momentum, **options)
        return torch.optim.AdamW(params, betas=(momentum, self.beta2 if beta2 is None else beta2), **options)


def loss(model: nn.Module, inputs: Tensor, classes: Tensor) -> Tensor:
    """Mean cross entropy in nats."""
    return functional.cross_entropy(model(inputs).flatten(0, -2), classes.flatten())


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, data: Data) -> float:
    """The task's metric on the held-out samples; not finite if the weights are not."""
    model.eval()
    inputs, classes = data.validation()
    total = 0.0
    for x, y in zip(inputs.split(_EVALUATED), classes.split(_EVALUATED), strict=True):
        scores = model(x).flatten(0, -2)
        if not bool(torch.isfinite(scores).all()):
            return math.nan
        if task.metric == "accuracy":
            total += float((scores.argmax(-1) == y.flatten()).sum())
        else:
            total += float(functional.cross_entropy(scores, y.flatten(), reduction="sum"))
    model.train()
    return total / classes.numel()


def _digits_net() -> nn.Module:
    return DigitsNet(WIDTHS, lr=0.0, steps=1)  # its own optimizer is not used


_TASKS = (
    Task("digits-resnet", _digits_net, Digits, "accuracy", "sgd", lr=0.01, steps=210, batch=64),
    Task("digits-vgg", PlainConvNet, Digits, "accuracy", "sgd", lr=0.02, steps=420, batch=64, warmup=0.1, clip=1.0),
    Task("digits-heads", TwoHeads, DigitsTwice, "accuracy", "adamw", lr=2e-3, steps=420, batch=64, warmup=0.1),
    Task(
        "bytes-transformer",
        ByteTransformer,
        Text,
        "loss",
        "adamw",
        lr=3e-3,
        steps=400,
        batch=16,
        weight_decay=0.01,
        warmup=0.1,
    ),
    Task(
        "bytes-transformer-sgd",
        ByteTransformer,
        Text,
        "loss",
        "sgd",
        lr=0.1,
        steps=400,
        batch=16,
        weight_decay=0.0,
        warmup=0.1,
    ),
    Task("bytes-lstm", ByteLSTM, Text, "loss", "sgd", lr=2.0, steps=400, batch=16, weight_decay=0.0, clip=0.5),
    Task(
        "prose-transformer",
        partial(ByteTransformer, width=256),
        Prose,
        "loss",
        "adamw",
        lr=1.5e-3,
        steps=400,
        batch=16,
        beta2=0.999,
        weight_decay=0.01,
        warmup=0.1,
        clip=1.0,
    ),
)

# Tasks on which no default was chosen. They judge: a change of the defaults that they suggest needs other judges.
_JUDGES = (
    Task("digits-vit", DigitsViT, Digits, "accuracy", "adamw", lr=1e-3, steps=420, batch=64, beta2=0.999, warmup=0.1),
)
#: All tasks by name.
TASKS = MappingProxyType({task.name: task for task in (*_TASKS, *_JUDGES)})

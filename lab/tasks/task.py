"""What is trained: network, data, optimizer and its schedule, as data."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from lab.tasks.convolutions import ResidualNet, UNet, grouped
from lab.tasks.data import (
    Data,
    Digits,
    DigitsInNoise,
    DigitsTwice,
    Headers,
    Names,
    NoiseOfDigits,
    Prose,
    Restored,
    Text,
)
from lab.tasks.deep import BytePredictor, Shape
from lab.tasks.models import (
    ByteLSTM,
    ByteTransformer,
    DigitsViT,
    PlainConvNet,
    Recommender,
    Restorer,
    SeparableConvNet,
    TwoHeads,
)
from lab.tasks.optimizers import OPTIMIZERS
from lab.tasks.sources import ShortSources, Sources
from lightning_safusion.lookup import look_up
from lightning_safusion.notation import hints_of, read, typed
from lightning_safusion.tools.demo.digits import WIDTHS, DigitsNet

# Held-out samples that are evaluated together.
_EVALUATED = 64
# What its name stands for in a recipe, and what is in a recipe only if it is not as usual: results of before lack it.
_PARTS = ("name", "model", "data", "metric")
_LATER = ("clip_value", "accumulate", "precision", "sam", "schedule", "ema", "fused")
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
            if f.name not in _PARTS and (f.name not in _LATER or getattr(self, f.name) != f.default)
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
    # short trainings as people write them: half of these choose what happens in them, the others judge
    Task(
        "noisy-batchnorm",
        ResidualNet,
        DigitsInNoise,
        "loss",
        "adamw",
        lr=3e-3,
        steps=400,
        batch=64,
        beta2=0.999,
        weight_decay=0.01,
        schedule="onecycle",
    ),
    Task(
        "noise-unet",
        UNet,
        NoiseOfDigits,
        "loss",
        "adamw",
        lr=2e-3,
        steps=400,
        batch=32,
        beta2=0.999,
        weight_decay=0.01,
        schedule="constant",
    ),
    Task(
        "bytes-onecycle",
        ByteTransformer,
        Text,
        "loss",
        "adamw",
        lr=2e-3,
        steps=400,
        batch=16,
        beta2=0.999,
        weight_decay=0.01,
        schedule="onecycle",
    ),
    Task(
        "prose-clipped",
        ByteTransformer,
        Prose,
        "loss",
        "adamw",
        lr=2e-3,
        steps=400,
        batch=32,
        beta2=0.95,
        weight_decay=0.1,
        warmup=0.1,
        clip=1.0,
    ),
    Task(
        "sources-transformer",
        partial(BytePredictor, Shape(64, 4, 4, 64)),
        ShortSources,
        "loss",
        "adamw",
        lr=2e-3,
        steps=400,
        batch=16,
        weight_decay=0.1,
        warmup=0.1,
    ),
    # 8,192 bytes a step: its gradients have so little noise that curvature limits the learning rate
    Task(
        "sources-large-batch",
        partial(BytePredictor, Shape(128, 8, 2, 256)),
        Sources,
        "loss",
        "adamw",
        lr=1e-3,
        steps=400,
        batch=32,
        weight_decay=0.1,
        warmup=0.1,
    ),
)

# Tasks on which no default was chosen. They judge: a change of the defaults that they suggest needs other judges.
_JUDGES = (
    Task("digits-vit", DigitsViT, Digits, "accuracy", "adamw", lr=1e-3, steps=420, batch=64, beta2=0.999, warmup=0.1),
    Task(
        "headers-transformer",
        ByteTransformer,
        Headers,
        "loss",
        "adamw",
        lr=3e-3,
        steps=400,
        batch=16,
        weight_decay=0.1,
        warmup=0.1,
    ),
    Task("headers-lstm", ByteLSTM, Headers, "loss", "sgd", lr=2.0, steps=400, batch=16, weight_decay=0.0, clip=0.5),
    Task(
        "restoring-transformer",
        Restorer,
        Restored,
        "loss",
        "adamw",
        lr=2e-3,
        steps=400,
        batch=16,
        beta2=0.98,
        weight_decay=0.01,
        warmup=0.1,
        clip=1.0,
    ),
    Task("names-recommender", Recommender, Names, "loss", "adamw", lr=1e-2, steps=400, batch=512, warmup=0.1),
    Task(
        "noisy-groupnorm",
        partial(ResidualNet, grouped),
        DigitsInNoise,
        "loss",
        "adamw",
        lr=2e-3,
        steps=400,
        batch=32,
        beta2=0.999,
        weight_decay=0.01,
        warmup=0.1,
        clip=1.0,
    ),
    Task(
        "noisy-separable",
        SeparableConvNet,
        DigitsInNoise,
        "loss",
        "adamw",
        lr=3e-3,
        steps=400,
        batch=64,
        beta2=0.999,
        weight_decay=0.01,
        schedule="onecycle",
    ),
    Task(
        "noisy-vit",
        DigitsViT,
        DigitsInNoise,
        "loss",
        "adamw",
        lr=1e-3,
        steps=400,
        batch=64,
        beta2=0.999,
        weight_decay=0.01,
        schedule="constant",
    ),
    Task("digits-separable", SeparableConvNet, Digits, "accuracy", "sgd", lr=0.05, steps=420, batch=64, warmup=0.1),
)
_FRESH = {task.name: task for task in (*_TASKS, *_JUDGES)}


def _trained(name: str) -> nn.Module:
    """The network of a task after plain training by one worker; torch's seed decides its weights."""
    task, seed = _FRESH[name], torch.initial_seed()
    model, data = task.model(), task.data(seed, task.batch)
    (optimizer,) = task.make_optimizers(model.parameters(), task.lr)
    for step in range(task.steps):
        loss(model, *data.samples(step)).backward()
        for group in optimizer.param_groups:
            group["lr"] = task.lr * task.rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return model


_FINE_TUNED = Task(
    "prose-fine-tuning",
    partial(_trained, "bytes-transformer"),
    Prose,
    "loss",
    "adamw",
    lr=1e-3,
    steps=400,
    batch=16,
    beta2=0.999,
    weight_decay=0.01,
    warmup=0.1,
)
#: All tasks by name.
TASKS = MappingProxyType({**_FRESH, _FINE_TUNED.name: _FINE_TUNED})
#: Those that judge the defaults.
JUDGES = (*_JUDGES, _FINE_TUNED)


def parse_task(text: str) -> Task:
    """Reads a task, with changes in brackets: ``bytes-transformer[steps=1200,optimizer=lion,lr=0.0003]``.

    Raises:
        ValueError: If there is no such task, or no such change.
    """
    name, options = read(text)
    task = look_up("task", name, TASKS)
    changes = typed(text, options, hints_of(Task.__init__, without=_PARTS))
    look_up("optimizer", changes.get("optimizer", task.optimizer), OPTIMIZERS)
    return replace(task, name=text, **changes)

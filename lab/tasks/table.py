"""The tasks of the studies: those that choose the defaults, and those that judge them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from lab.tasks.convolutions import ResidualNet, UNet, grouped
from lab.tasks.data import (
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
from lab.tasks.task import PARTS, Task, loss
from lightning_safusion.lookup import look_up
from lightning_safusion.notation import hints_of, read, typed
from lightning_safusion.tools.demo.digits import WIDTHS, DigitsNet


def _digits_net() -> nn.Module:
    return DigitsNet(WIDTHS, torch.optim.SGD, steps=1)  # its own optimizer is not used


# Most tasks: a loss after 400 steps of AdamW, which warm up in a tenth of them or as their schedule says.
_adamw = partial(Task, metric="loss", optimizer="adamw", steps=400)
_warmed = partial(_adamw, warmup=0.1)

_TASKS = (
    Task("digits-resnet", _digits_net, Digits, "accuracy", "sgd", lr=0.01, steps=210, batch=64),
    Task("digits-vgg", PlainConvNet, Digits, "accuracy", "sgd", lr=0.02, steps=420, batch=64, warmup=0.1, clip=1.0),
    Task("digits-heads", TwoHeads, DigitsTwice, "accuracy", "adamw", lr=2e-3, steps=420, batch=64, warmup=0.1),
    _warmed("bytes-transformer", ByteTransformer, Text, lr=3e-3, batch=16, weight_decay=0.01),
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
    _warmed(
        "prose-transformer",
        partial(ByteTransformer, width=256),
        Prose,
        lr=1.5e-3,
        batch=16,
        beta2=0.999,
        weight_decay=0.01,
        clip=1.0,
    ),
    # short trainings as people write them: half of these choose what happens in them, the others judge
    _adamw(
        "noisy-batchnorm",
        ResidualNet,
        DigitsInNoise,
        lr=3e-3,
        batch=64,
        beta2=0.999,
        weight_decay=0.01,
        schedule="onecycle",
    ),
    _adamw("noise-unet", UNet, NoiseOfDigits, lr=2e-3, batch=32, beta2=0.999, weight_decay=0.01, schedule="constant"),
    _adamw(
        "bytes-onecycle", ByteTransformer, Text, lr=2e-3, batch=16, beta2=0.999, weight_decay=0.01, schedule="onecycle"
    ),
    _warmed("prose-clipped", ByteTransformer, Prose, lr=2e-3, batch=32, beta2=0.95, weight_decay=0.1, clip=1.0),
    _warmed(
        "sources-transformer",
        partial(BytePredictor, Shape(64, 4, 4, 64)),
        ShortSources,
        lr=2e-3,
        batch=16,
        weight_decay=0.1,
    ),
    # 8,192 bytes a step: its gradients have so little noise that curvature limits the learning rate
    _warmed(
        "sources-large-batch",
        partial(BytePredictor, Shape(128, 8, 2, 256)),
        Sources,
        lr=1e-3,
        batch=32,
        weight_decay=0.1,
    ),
    # the largest: it comes to where curvature bears no steps without a momentum (docs/convergence.md, Large networks)
    _warmed(
        "sources-wide", partial(BytePredictor, Shape(512, 8, 8, 256)), Sources, lr=1e-3, batch=16, weight_decay=0.1
    ),
)

# Tasks on which no default was chosen. They judge: a change of the defaults that they suggest needs other judges.
_JUDGES = (
    Task("digits-vit", DigitsViT, Digits, "accuracy", "adamw", lr=1e-3, steps=420, batch=64, beta2=0.999, warmup=0.1),
    _warmed("headers-transformer", ByteTransformer, Headers, lr=3e-3, batch=16, weight_decay=0.1),
    Task("headers-lstm", ByteLSTM, Headers, "loss", "sgd", lr=2.0, steps=400, batch=16, weight_decay=0.0, clip=0.5),
    _warmed("restoring-transformer", Restorer, Restored, lr=2e-3, batch=16, beta2=0.98, weight_decay=0.01, clip=1.0),
    _warmed("names-recommender", Recommender, Names, lr=1e-2, batch=512),
    _warmed(
        "noisy-groupnorm",
        partial(ResidualNet, grouped),
        DigitsInNoise,
        lr=2e-3,
        batch=32,
        beta2=0.999,
        weight_decay=0.01,
        clip=1.0,
    ),
    _adamw(
        "noisy-separable",
        SeparableConvNet,
        DigitsInNoise,
        lr=3e-3,
        batch=64,
        beta2=0.999,
        weight_decay=0.01,
        schedule="onecycle",
    ),
    _adamw(
        "noisy-vit", DigitsViT, DigitsInNoise, lr=1e-3, batch=64, beta2=0.999, weight_decay=0.01, schedule="constant"
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


_FINE_TUNED = _warmed(
    "prose-fine-tuning",
    partial(_trained, "bytes-transformer"),
    Prose,
    lr=1e-3,
    batch=16,
    beta2=0.999,
    weight_decay=0.01,
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
    changes = typed(text, options, hints_of(Task.__init__, without=PARTS))
    look_up("optimizer", changes.get("optimizer", task.optimizer), OPTIMIZERS)
    return replace(task, name=text, **changes)

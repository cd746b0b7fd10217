"""The optimizers of the tasks: those that people train with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from lab.tasks.task import Task

Make = Callable[["Task", Sequence[Tensor], float, float, float], list[Optimizer]]


def _sgd(task: Task, params: Sequence[Tensor], lr: float, momentum: float, beta2: float) -> list[Optimizer]:
    return [torch.optim.SGD(params, lr, momentum=momentum, weight_decay=task.weight_decay, foreach=True)]


def _of_adams_kind(
    kind: type[Optimizer], task: Task, params: Sequence[Tensor], lr: float, momentum: float, beta2: float
) -> list[Optimizer]:
    options: dict[str, Any] = {"betas": (momentum, beta2), "weight_decay": task.weight_decay}
    options["fused" if task.fused else "foreach"] = True
    return [kind(params, lr=lr, **options)]  # type: ignore[call-arg]  # each of Adam's kind takes them


def _rmsprop(task: Task, params: Sequence[Tensor], lr: float, momentum: float, beta2: float) -> list[Optimizer]:
    return [torch.optim.RMSprop(params, lr, alpha=beta2, weight_decay=task.weight_decay, foreach=True)]


def _adagrad(task: Task, params: Sequence[Tensor], lr: float, momentum: float, beta2: float) -> list[Optimizer]:
    return [torch.optim.Adagrad(params, lr, weight_decay=task.weight_decay, foreach=True)]


def _adafactor(task: Task, params: Sequence[Tensor], lr: float, momentum: float, beta2: float) -> list[Optimizer]:
    return [torch.optim.Adafactor(params, lr, weight_decay=task.weight_decay, foreach=True)]


def _muon(task: Task, params: Sequence[Tensor], lr: float, momentum: float, beta2: float) -> list[Optimizer]:
    """Muon for matrices, AdamW for the rest, at the learning rate that serves AdamW alone (Moonlight's scale)."""
    matrices = [param for param in params if param.ndim == 2]
    others = [param for param in params if param.ndim != 2]
    muon = torch.optim.Muon(matrices, lr, weight_decay=task.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, *_of_adams_kind(torch.optim.AdamW, task, others, lr, momentum, beta2)]


def _lion(task: Task, params: Sequence[Tensor], lr: float, momentum: float, beta2: float) -> list[Optimizer]:
    from lion_pytorch import Lion  # a dependency of this row only

    return [Lion(params, lr, betas=(momentum, beta2), weight_decay=task.weight_decay)]


def _schedule_free(task: Task, params: Sequence[Tensor], lr: float, momentum: float, beta2: float) -> list[Optimizer]:
    from schedulefree import AdamWScheduleFree  # a dependency of this row only

    options = {"betas": (momentum, beta2), "weight_decay": task.weight_decay}
    optimizer = AdamWScheduleFree(params, lr, warmup_steps=round(task.warmup * task.steps), **options)
    optimizer.train()
    return [optimizer]


@contextmanager
def for_use(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Has schedule-free optimizers put the weights in place that are used after training, and back."""
    switched: list[Any] = [optimizer for optimizer in optimizers if hasattr(optimizer, "eval")]
    for optimizer in switched:
        optimizer.eval()
    yield
    for optimizer in switched:
        optimizer.train()


#: Makes optimizers of a task, its parameters, learning rate, momentum (first beta) and second beta, by name.
OPTIMIZERS: MappingProxyType[str, Make] = MappingProxyType(
    {
        "sgd": _sgd,
        "adamw": partial(_of_adams_kind, torch.optim.AdamW),
        "nadam": partial(_of_adams_kind, torch.optim.NAdam),
        "radam": partial(_of_adams_kind, torch.optim.RAdam),
        "rmsprop": _rmsprop,
        "adagrad": _adagrad,
        "adafactor": _adafactor,
        "muon": _muon,
        "lion": _lion,
        "schedule-free": _schedule_free,
    }
)

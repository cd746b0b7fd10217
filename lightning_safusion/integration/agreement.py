"""What must be the same on all workers of a job besides the engine's settings, as text that they compare."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

# A process group is another object in every process, and each has devices of its own.
_OWN = {"module", "device_ids", "output_device", "process_group", "device_mesh"}


def ddp_options(given: Mapping[str, Any]) -> dict[str, str]:
    """Every option of DistributedDataParallel, also those that were not given.

    Args:
        given: Keyword arguments for it.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    options = {name: parameter.default for name, parameter in known.items()} | dict(given)
    return {name: _text(value) for name, value in options.items() if name not in _OWN}


def training_options(trainer: Trainer, module: nn.Module | None, optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """What decides when gradients are exchanged and what they are used for.

    Args:
        trainer: Has its options.
        module: The LightningModule.
        optimizers: Those that it has configured; none where workers may differ in them.
    """
    options: dict[str, Any] = {
        "precision": trainer.precision,
        "automatic_optimization": getattr(module, "automatic_optimization", None),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
    }
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning's callback connector
    schedules = [each.scheduling for each in callbacks if isinstance(each, GradientAccumulationScheduler)]
    if schedules:
        options["gradient accumulation schedule"] = [list(each.items()) for each in schedules]
    return {name: _text(value) for name, value in options.items()} | optimizer_options(optimizers)


def optimizer_options(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """The classes of optimizers, and the hyperparameters and sizes of their groups."""
    options = {"optimizers": ", ".join(type(optimizer).__qualname__ for optimizer in optimizers)}
    for number, optimizer in enumerate(optimizers):
        name = f"optimizer {number} ({type(optimizer).__qualname__})"
        for place, group in enumerate(optimizer.param_groups):
            options[f"{name}, group {place}, parameters"] = str(len(group["params"]))
            values = {key: value for key, value in sorted(group.items()) if key != "params"}
            options |= {f"{name}, group {place}, {key}": _text(value) for key, value in values.items()}
    return options


def _text(value: Any) -> str:
    """The same text in every process for the same value."""
    if isinstance(value, str):  # also the names of an enumeration
        return str(getattr(value, "value", value))
    if isinstance(value, (bool, int, float, type(None))):
        return repr(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return repr(value.item())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return type(value).__qualname__

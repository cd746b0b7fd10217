"""What must be the same on all workers of a job besides the engine's settings, and is compared."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_safusion.comm.transport.interface import Transport, during
from lightning_safusion.integration.parameters import trainable

# A process group is another object in every process, and each has devices of its own.
_OWN = {"module", "device_ids", "output_device", "process_group", "device_mesh"}


def ddp_options(given: Mapping[str, Any]) -> dict[str, str]:
    """Every option of DistributedDataParallel as text: those given, and the defaults of the others."""
    known = inspect.signature(DistributedDataParallel).parameters
    options = {name: parameter.default for name, parameter in known.items()} | dict(given)
    return {name: _text(value) for name, value in options.items() if name not in _OWN}


def training_options(trainer: Trainer, module: nn.Module | None, optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """What decides when gradients are exchanged and what they are used for, as text; of ``optimizers`` all options."""
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
    options["optimizers"] = ", ".join(type(optimizer).__qualname__ for optimizer in optimizers)
    for number, optimizer in enumerate(optimizers):
        name = f"optimizer {number} ({type(optimizer).__qualname__})"
        for place, group in enumerate(optimizer.param_groups):
            options[f"{name}, group {place}, parameters"] = len(group["params"])
            options |= {f"{name}, group {place}, {key}": group[key] for key in sorted(group) if key != "params"}
    return {name: _text(value) for name, value in options.items()}


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


def replaced_parameters(
    module: nn.Module, wrapped: Sequence[tuple[str, nn.Parameter]], transport: Transport, epoch: int
) -> list[str] | None:
    """Whether parameters were frozen, unfrozen or replaced since DDP wrapped the ``wrapped`` ones. Collective.

    Returns:
        Names of parameters that are other objects now; None if nothing has changed on any rank.

    Raises:
        RuntimeError: If the ranks have different trainable parameters, with their names.
    """
    now, known = dict(trainable(module)), dict(wrapped)
    replaced = [name for name, param in now.items() if known.get(name, param) is not param]
    same = not replaced and list(now) == list(known)
    with during(f"the beginning of epoch {epoch}, when workers compare their trainable parameters"):
        everyone = transport.gather_objects((list(now), same))
    for rank, (names, _) in enumerate(everyone):
        if names != everyone[0][0]:
            different = sorted(set(names) ^ set(everyone[0][0]))
            raise RuntimeError(
                f"ranks 0 and {rank} have different trainable parameters: {', '.join(different[:20])}. Freeze and "
                "unfreeze the same ones on all ranks."
            )
    return None if all(unchanged for _, unchanged in everyone) else replaced

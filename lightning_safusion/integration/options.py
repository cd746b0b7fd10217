"""Options of DDP and of training: which are refused, and which must be the same on all workers of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import product
from typing import Any

import torch
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_safusion.integration.parameters import as_text, optimizer_options
from lightning_safusion.lookup import suggestion

#: Options of DDP under which the strategy would not see every gradient. LightningCLI passes every option with its
#: default, so only other values are refused.
REFUSED_OPTIONS: dict[str, str] = {
    "ddp_comm_hook": "the strategy is the communication hook; use DDPStrategy for another one",
    "ddp_comm_state": "the strategy is the communication hook; use DDPStrategy for another one",
    "ddp_comm_wrapper": "the wire format is chosen with wire='bf16' or wire='fp16'",
    "model_averaging_period": "gradients are exchanged in every step; use DDPStrategy for post-local SGD",
    "skip_all_reduce_unused_params": "every parameter must reach the communication hook",
    "bucket_cap_mb_list": "every parameter has a bucket of its own; fusion=... decides what is sent together",
    "delay_all_reduce_named_params": "every parameter must reach the communication hook; use dense=[...] for "
    "exceptions",
    "param_to_hook_all_reduce": "every parameter must reach the hook; use dense=[...] for exceptions",
    "mixed_precision": "use Trainer(precision=...), which this strategy supports",
}
# A process group is another object in every process, and each has devices of its own.
_OWN = {"module", "device_ids", "output_device", "process_group", "device_mesh"}

# Of the trainer: after which batches all workers validate and end.
_LENGTHS = (
    "max_epochs", "max_steps", "limit_train_batches", "limit_val_batches", "check_val_every_n_epoch",
    "num_sanity_val_steps",
)  # fmt: skip


def refuse_options(
    options: dict[str, Any], own: list[str], strategy: type = DDPStrategy, name: str = "SAFusionStrategy"
) -> None:
    """Refuses options that contradict a strategy, and names that neither it nor DDP has; suggests its ``own``.

    Args:
        options: That were given, beside its own.
        own: Names of its own.
        strategy: Lightning's, whose options it takes.
        name: Of the strategy in errors.

    Raises:
        MisconfigurationException: If an option contradicts the strategy.
        TypeError: If there is no such option.
    """
    for option, reason in REFUSED_OPTIONS.items():
        value = options.get(option)
        if value is not None and value is not False:
            raise MisconfigurationException(f"{name} does not take {option}={value!r}: {reason}.")
    known = {*signature(strategy).parameters, *signature(DistributedDataParallel).parameters}
    for option in options:
        if option not in known | REFUSED_OPTIONS.keys():
            hint = suggestion(option, [*own, *known])
            raise TypeError(f"{name} has no argument {option!r}, nor has DistributedDataParallel.{hint}")


def register_launchers(registry: _StrategyRegistry, strategy: type, unused: Sequence[bool | None]) -> None:
    """Registers the names of a strategy: one for each launcher and value of ``find_unused_parameters``."""
    launchers = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    for (launcher, start), finds in product(launchers.items(), unused):
        suffix = "" if finds is None else f"_find_unused_parameters_{finds}".lower()
        options: dict[str, Any] = {} if finds is None else {"find_unused_parameters": finds}
        if (name := f"safusion{launcher}{suffix}") not in registry:
            description = f"{strategy.__name__} with start_method {start!r}"
            registry.register(name, strategy, description, start_method=start, **options)


def refuse_accelerator(compressor: object) -> None:
    """Raises :class:`TypeError` if the first argument without a name is that of DDPStrategy."""
    if isinstance(compressor, Accelerator):
        raise TypeError(
            f"the first argument of SAFusionStrategy is the compressor, not an accelerator: give arguments of "
            f"DDPStrategy by name, accelerator={type(compressor).__name__}()."
        )


def refuse_python_reducer() -> None:
    """Raises :class:`MisconfigurationException` if Dynamo is set to bypass DDP's buckets."""
    if torch._dynamo.config.optimize_ddp == "python_reducer":
        raise MisconfigurationException(
            "torch._dynamo.config.optimize_ddp='python_reducer' bypasses DDP's buckets, which this strategy "
            "works on; set it to True (the default) or False."
        )


def ddp_options(given: Mapping[str, Any]) -> dict[str, str]:
    """Every option of DistributedDataParallel as text: those given, and the defaults of the others."""
    known = signature(DistributedDataParallel).parameters
    options = {name: parameter.default for name, parameter in known.items()} | dict(given)
    return {name: as_text(value) for name, value in options.items() if name not in _OWN}


def training_options(trainer: Trainer, module: nn.Module | None, optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """What decides when gradients are exchanged and what they are used for, as text; of ``optimizers`` all options."""
    options: dict[str, Any] = {
        "precision": trainer.precision,
        "automatic_optimization": getattr(module, "automatic_optimization", None),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "val_check_interval": _val_check_interval(trainer),
    } | {name: getattr(trainer, name) for name in _LENGTHS}
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning's callback connector
    schedules = [each.scheduling for each in callbacks if isinstance(each, GradientAccumulationScheduler)]
    if schedules:
        options["gradient accumulation schedule"] = [list(each.items()) for each in schedules]
    return {name: as_text(value) for name, value in options.items()} | optimizer_options(optimizers)


def _val_check_interval(trainer: Trainer) -> Any:
    # a time, from Lightning 2.6 on, is an attribute of its own, in place of the other
    seconds = getattr(trainer, "_val_check_time_interval", None)
    return trainer.val_check_interval if seconds is None else f"{seconds:g} s"

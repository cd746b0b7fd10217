"""When DeAR's step must not reach into the next forward pass: what Lightning or the user would see too early."""

from __future__ import annotations

from types import FunctionType

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import LBFGS, Optimizer

# Hooks between the backward pass and the end of the step: those who are given the optimizer, and those who run when
# gradients are expected to be averages.
_READ_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")


def reason_to_settle(trainer: Trainer, module: LightningModule, optimizer: Optimizer, compiled: bool) -> str | None:
    """Why gradients must be averages, and weights new, when a step ends; None if they need not.

    It may differ between ranks: what is launched, and in which order, does not depend on it.

    Args:
        trainer: Trains the module.
        module: The model.
        optimizer: Is about to step.
        compiled: A part of the model has been compiled.

    Returns:
        The reason, to follow a "because".
    """
    if compiled:
        return "the model is compiled, and its uses of parameters cannot be seen"
    return _of_optimizer(optimizer) or _of_trainer(trainer, module)


def _of_optimizer(optimizer: Optimizer) -> str | None:
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS) or not type(optimizer).__module__.startswith("torch.optim."):
        return f"{name} is not known to treat every parameter by itself, as all optimizers of torch but LBFGS do"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has step hooks, which would run once for every bucket"
    return None


def _of_trainer(trainer: Trainer, module: LightningModule) -> str | None:
    if not module.automatic_optimization:
        return "optimization is manual, and steps and backward passes may come in any order"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "a loss scaler looks at all gradients before it steps"
    if trainer.gradient_clip_val or is_overridden("configure_gradient_clipping", module):
        return "gradients are clipped, which needs all of them"
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning's callback connector
    for hook in _READ_GRADIENTS:
        if is_overridden(hook, module):
            return f"{type(module).__name__}.{hook} may look at gradients"
        for callback in callbacks:
            ours = type(callback).__module__.startswith("lightning_safusion.")
            if not ours and is_overridden(hook, callback, parent=Callback):
                return f"{type(callback).__name__}.{hook} may look at gradients"
    return None


def runs_compiled(module: nn.Module) -> bool:
    """Whether a part of the model, or a function that it keeps, has been compiled: uses of parameters cannot be seen.

    Args:
        module: The model.
    """
    parts = list(module.modules())
    kinds = (torch._dynamo.OptimizedModule, torch.jit.ScriptModule)
    if any(isinstance(part, kinds) or part._compiled_call_impl is not None for part in parts):
        return True
    classes = {cls for part in parts for cls in type(part).__mro__}
    return any(
        "_torchdynamo_orig_callable" in _attributes(kept) for it in (*parts, *classes) for kept in vars(it).values()
    )


def _attributes(kept: object) -> dict[str, object]:
    return kept.__dict__ if isinstance(kept, FunctionType) else {}

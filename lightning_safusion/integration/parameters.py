"""Which of a model's parameters are exchanged, and what is refused before training begins."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_safusion.integration.optimizer import carried_momentum, is_muon, momenta_of
from lightning_safusion.integration.units import is_schedule_free
from lightning_safusion.lookup import suggestion
from lightning_safusion.sparsify.memory.contract import Memory
from lightning_safusion.sparsify.memory.momentum import EF21Memory
from lightning_safusion.sparsify.memory.residual import DecoupledMomentum
from lightning_safusion.sparsify.schedule import SuitedDensity

# Density from which on Adam hardly suffers from error feedback.
_DENSE_ENOUGH = 0.25
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


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters whose gradients DDP manages, in its order.

    Raises:
        MisconfigurationException: If one has no shape yet.
    """
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    # DDP compares "module.parameter", which begins with a dot for parameters of the root
    named = [
        (name, p)
        for name, p in module.named_parameters()
        if p.requires_grad and (name if "." in name else f".{name}") not in ignored
    ]
    for name, param in named:
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise MisconfigurationException(
                f"parameter {name} of a lazy module has no shape yet: run one forward pass on a sample (in setup or "
                "configure_model) before training."
            )
    return named


def dense_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters whose gradients are ordinary tensors."""
    sparse = {id(param) for _, param in sparse_parameters(module)}
    return [(name, param) for name, param in trainable(module) if id(param) not in sparse]


def sparse_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters whose gradients are sparse tensors, as DDP expects them."""
    tables = [m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
    weights = {id(table.weight) for table in tables}
    return [(name, param) for name, param in trainable(module) if id(param) in weights]


def refuse_options(options: dict[str, Any], own: list[str]) -> None:
    """Refuses options that contradict the strategy, and names that neither it nor DDP has.

    Args:
        options: Keyword arguments for DDPStrategy and DistributedDataParallel.
        own: Names of the strategy's own arguments, for suggestions.

    Raises:
        MisconfigurationException: If an option contradicts the strategy.
        TypeError: If there is no such option.
    """
    for name, reason in REFUSED_OPTIONS.items():
        value = options.get(name)
        if value is not None and value is not False:
            raise MisconfigurationException(f"SAFusionStrategy does not take {name}={value!r}: {reason}.")
    known = {*signature(DDPStrategy.__init__).parameters, *signature(DistributedDataParallel).parameters}
    for name in options:
        if name not in known | REFUSED_OPTIONS.keys():
            hint = suggestion(name, [*own, *known])
            raise TypeError(f"SAFusionStrategy has no argument {name!r}, nor has DistributedDataParallel.{hint}")


def refuse_python_reducer() -> None:
    """Raises :class:`MisconfigurationException` if Dynamo is set to bypass DDP's buckets."""
    if torch._dynamo.config.optimize_ddp == "python_reducer":
        raise MisconfigurationException(
            "torch._dynamo.config.optimize_ddp='python_reducer' bypasses DDP's buckets, which this strategy "
            "works on; set it to True (the default) or False."
        )


def refuse_double_momentum(memory: Memory, optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose momentum would come on top of the memory's.

    Raises:
        MisconfigurationException: If both have momentum, or if the memory's is not made for such an optimizer.
    """
    name = type(optimizer).__name__
    if memory.name == "dgc" and any(group.get("momentum") or "betas" in group for group in optimizer.param_groups):
        raise MisconfigurationException(
            f"memory='dgc' applies momentum before selection, and {name} would apply it again. Use "
            "torch.optim.SGD with momentum=0, or memory='residual'."
        )
    if isinstance(memory, DecoupledMomentum | EF21Memory) and memory.momentum:
        if momenta_of(optimizer, isinstance(memory, EF21Memory)) is not None:
            return  # a switch turns it off
        twice = [group for group in optimizer.param_groups if group.get("momentum") or group.get("betas", (0,))[0]]
        if twice:
            instead = "EF21Memory(momentum=0)" if isinstance(memory, EF21Memory) else "memory='residual'"
            none = "betas=(0.0, ...)" if "betas" in twice[0] else "momentum=0 (and cycle_momentum=False to a schedule)"
            raise MisconfigurationException(
                f"memory={memory.name!r} applies momentum before selection, and {name} would apply it again, "
                f"which makes its steps too old. Give {name} {none}, or use {instead}."
            )


def suit_density(
    density: SuitedDensity, memory: Memory, optimizers: Sequence[torch.optim.Optimizer], by_update: bool
) -> None:
    """Chooses the density that ends level with dense training below these optimizers (``docs/convergence.md``).

    Args:
        density: Is set.
        memory: Error feedback.
        optimizers: All that step with what was sent.
        by_update: Elements are compared in units of the update.

    Raises:
        MisconfigurationException: If there is none that is known.
    """
    if isinstance(memory, EF21Memory):
        density.density = SuitedDensity.ESTIMATED if any(map(is_muon, optimizers)) else SuitedDensity.PLAIN
        return
    if any(type(optimizer).__name__ == "Muon" for optimizer in optimizers):
        raise MisconfigurationException(
            "with Muon a density is known to end level with dense training (docs/convergence.md) for torch.optim.Muon, "
            "alone or beside Adam, AdamW, RAdam, or SGD without dampening, with memory='auto' and another collective "
            "than 'gtopk'. Use these, plain DDP, or name a density, as in SAFusionStrategy(density=0.5), to train so "
            "all the same."
        )
    density.density = SuitedDensity.PLAIN  # not that of optimizers before these
    if carried_momentum(memory, density, optimizers, by_update) is not None:
        density.density = max(map(_level_with_momentum, optimizers))
    else:
        cautioned = any(caution(memory, SuitedDensity.PLAIN, optimizer) for optimizer in optimizers)
        density.density = SuitedDensity.CAUTIOUS if cautioned else SuitedDensity.PLAIN


def _level_with_momentum(optimizer: torch.optim.Optimizer) -> float:
    """The lowest density that ended level with dense training, with a momentum in the residual."""
    if is_schedule_free(optimizer):
        return SuitedDensity.PLAIN
    return SuitedDensity.RECTIFIED if isinstance(optimizer, torch.optim.RAdam) else SuitedDensity.WITH_MOMENTUM


def caution(memory: Memory, density: float, optimizer: torch.optim.Optimizer, carried: bool = False) -> str | None:
    """What error feedback costs an optimizer that has a momentum, other than SGD; None if nothing is known.

    Measured in ``docs/convergence.md``.

    Args:
        memory: Error feedback.
        density: Share of the elements that is sent.
        optimizer: Steps with what was sent.
        carried: Its momentum is the memory's.
    """
    if memory.lives_on_sparsity and density >= 1:
        return f"memory={memory.name!r} is the momentum of the residual: at density 1 training has none"
    groups, has_betas = optimizer.param_groups, any(group.get("betas", (0,))[0] for group in optimizer.param_groups)
    adaptive = has_betas or (
        not isinstance(optimizer, torch.optim.SGD) and any(group.get("momentum") for group in groups)
    )
    name = type(optimizer).__name__
    if name == "Muon" and memory.name in ("residual", "auto", "ef21") and density < SuitedDensity.ESTIMATED:
        return (
            f"Muon may end with a higher loss at a density of {density:.2g} than without compression. What "
            f"memory='auto' with density=None takes with torch.optim.Muon, {SuitedDensity.ESTIMATED}, ended level"
        )
    if not adaptive or carried or memory.name not in ("residual", "auto") or density >= _DENSE_ENOUGH:
        return None
    remedy = "memory='decoupled'"
    if not has_betas:
        remedy = "AdamW"
    elif momenta_of(optimizer) is None:
        remedy += f" with betas=(0.0, ...) for {name}"
    return (
        f"{name} may end with a higher loss at a density of {density:.2g} than without compression, since the "
        f"residual reaches it late and at once. {remedy}, or a density of {_DENSE_ENOUGH}, lose least"
    )

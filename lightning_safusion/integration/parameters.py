"""Which of a model's parameters are exchanged: those with a gradient that DDP manages and an optimizer has."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_safusion.announce import MisconfigurationException
from lightning_safusion.comm.transport.interface import Transport, during
from lightning_safusion.literal import first_of

_BROADCAST_BYTES = 250 * 1024 * 1024  # of a message with parameters, as in DDP


def managed(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that DDP is not told to ignore, in its order."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    # DDP compares "module.parameter", which begins with a dot for parameters of the root
    return [each for each in module.named_parameters() if (each[0] if "." in each[0] else f".{each[0]}") not in ignored]


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters whose gradients DDP manages, in its order.

    Raises:
        MisconfigurationException: If one has no shape yet.
    """
    named = [(name, param) for name, param in managed(module) if param.requires_grad]
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


def share_parameters(module: nn.Module, group: dist.ProcessGroup | None = None, wanted: bool = True) -> None:
    """Gives all workers of a group the first one's parameters, if all want it and have the same shapes. Collective."""
    named = managed(module)
    wanted = wanted and not any(isinstance(param, nn.parameter.UninitializedParameter) for _, param in named)
    among: Any = group or dist.group.WORLD  # torch declares a group, and takes None
    shapes = [(name, tuple(param.shape), str(param.dtype)) for name, param in named] if wanted else None
    everyone: list[Any] = [None] * dist.get_world_size(among)
    dist.all_gather_object(everyone, hashlib.sha256(repr(shapes).encode()).digest(), group=among)
    if wanted and len(set(everyone)) == 1:
        dist._broadcast_coalesced(among, [param.detach() for _, param in named], _BROADCAST_BYTES, 0)


def untrained(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[str, nn.Parameter]]:
    """Parameters with ordinary gradients that no optimizer has.

    Where optimizers have no parameter of the model, something else trains it: none is left out.
    """
    trained = {id(param) for optimizer in optimizers for param in params_of(optimizer)}
    named = dense_parameters(module)
    left = [(name, param) for name, param in named if id(param) not in trained]
    return left if len(left) < len(named) else []


def trained(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[str, nn.Parameter]]:
    """The other parameters with ordinary gradients, in registration order."""
    left = {id(param) for _, param in untrained(module, optimizers)}
    return [(name, param) for name, param in dense_parameters(module) if id(param) not in left]


@contextmanager
def needing(gradients: bool, params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Has frozen parameters need gradients meanwhile, or trainable ones none."""
    for param in params:
        param.requires_grad_(gradients)
    try:
        yield
    finally:
        for param in params:
            param.requires_grad_(not gradients)


def describe_untrained(left: Sequence[tuple[str, nn.Parameter]], automatic: bool) -> str:
    """One line about parameters that no optimizer has; with automatic optimization nothing steps them."""
    shown = first_of([name for name, _ in left])
    if len(left) == 1:
        what, its, them = f"the parameter {shown} is in no optimizer", "its gradient is", "it"
    else:
        what, its, them = f"{len(left)} parameters ({shown}) are in no optimizer", "their gradients are", "them"
    elements = sum(param.numel() for _, param in left)
    done = "not exchanged, and 0" if automatic else "averaged uncompressed, as DDP does"
    return f"{what} ({elements:,} elements): {its} {done}. To freeze {them}, call requires_grad_(False)"


def replaced_parameters(
    module: nn.Module,
    wrapped: Sequence[tuple[str, nn.Parameter]],
    transport: Transport,
    epoch: int,
    beside: Container[str] = (),
) -> list[str] | None:
    """Whether parameters were frozen, unfrozen or replaced since DDP wrapped the ``wrapped`` ones. Collective.

    Those ``beside``, by name, are of no concern to DDP.

    Returns:
        Names of parameters that are other objects now; None if nothing has changed on any rank.

    Raises:
        RuntimeError: If the ranks have different trainable parameters, with their names.
    """
    now, known = {name: param for name, param in trainable(module) if name not in beside}, dict(wrapped)
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


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def members(optimizers: Sequence[Optimizer]) -> list[object]:
    """Optimizers, and of each of their groups None and its parameters: the same objects until one comes or goes."""
    found: list[object] = []
    for optimizer in optimizers:
        found.append(optimizer)
        for group in optimizer.param_groups:
            found += [None, *group["params"]]
    return found


def same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether these are the same objects, in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


def optimizer_options(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Kinds of optimizers, and all options of their groups, as text."""
    options: dict[str, Any] = {"optimizers": ", ".join(type(optimizer).__qualname__ for optimizer in optimizers)}
    for number, optimizer in enumerate(optimizers):
        name = f"optimizer {number} ({type(optimizer).__qualname__})"
        for place, group in enumerate(optimizer.param_groups):
            options[f"{name}, group {place}, parameters"] = len(group["params"])
            options |= {f"{name}, group {place}, {key}": group[key] for key in sorted(group) if key != "params"}
    return {name: as_text(value) for name, value in options.items()}


def as_text(value: Any) -> str:
    """The same text in every process for the same value."""
    if isinstance(value, str):  # also the names of an enumeration
        return str(getattr(value, "value", value))
    if isinstance(value, (bool, int, float, type(None))):
        return repr(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return repr(value.item())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(as_text, value))}]"
    return type(value).__qualname__

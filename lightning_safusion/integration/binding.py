"""What optimizers train: which parameters none of them has, and when they, or what they have, become others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_safusion.integration.parameters import dense_parameters

_SHOWN = 8


def untrained(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[str, nn.Parameter]]:
    """Parameters with ordinary gradients that no optimizer has.

    Args:
        module: The model.
        optimizers: Of the trainer. Where these have no parameter of the model, something else trains it: none is left
            out.
    """
    trained = {id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}
    named = dense_parameters(module)
    left = [(name, param) for name, param in named if id(param) not in trained]
    return left if len(left) < len(named) else []


def trained(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[str, nn.Parameter]]:
    """The other parameters with ordinary gradients, in registration order."""
    left = {id(param) for _, param in untrained(module, optimizers)}
    return [(name, param) for name, param in dense_parameters(module) if id(param) not in left]


def describe_untrained(left: Sequence[tuple[str, nn.Parameter]], automatic: bool) -> str:
    """One line about parameters that no optimizer has.

    Args:
        left: They.
        automatic: Optimization is automatic, so that nothing steps them.
    """
    shown = ", ".join(name for name, _ in left[:_SHOWN]) + (f" and {len(left) - _SHOWN} more" if left[_SHOWN:] else "")
    if len(left) == 1:
        what, its, them = f"the parameter {shown} is in no optimizer", "its gradient is", "it"
    else:
        what, its, them = f"{len(left)} parameters ({shown}) are in no optimizer", "their gradients are", "them"
    elements = sum(param.numel() for _, param in left)
    done = "not exchanged, and 0" if automatic else "averaged uncompressed, as DDP does"
    return f"{what} ({elements:,} elements): {its} {done}. To freeze {them}, call requires_grad_(False)"


def needs_plain_ddp(optimizers: Sequence[Optimizer]) -> str | None:
    """Why optimizers need plain DDP, to follow a "because"; None if they do not."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        return "LBFGS compares the gradients of several backward passes, which must all be dense"
    return None


class Bound:
    """Optimizers and their groups, as they were when an exchange was bound to them.

    Args:
        optimizers: They.
    """

    def __init__(self, optimizers: Sequence[Optimizer] = ()) -> None:
        # held, so that no other object takes their place in memory
        self._held = [
            (optimizer, [(group["params"], len(group["params"])) for group in optimizer.param_groups])
            for optimizer in optimizers
        ]

    def are(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether these are the same optimizers, with the same groups."""
        if len(optimizers) != len(self._held):
            return False
        return all(
            optimizer is held
            and len(optimizer.param_groups) == len(groups)
            and all(
                group["params"] is params and len(params) == length
                for group, (params, length) in zip(optimizer.param_groups, groups, strict=True)
            )
            for optimizer, (held, groups) in zip(optimizers, self._held, strict=True)
        )

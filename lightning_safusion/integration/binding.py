"""What optimizers train: which parameters none of them has, and when they, or what they have, become others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_

import torch
from torch import Tensor, nn
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
        self._optimizers = list(optimizers)
        self._params = list(map(_params_of, optimizers))

    def are(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether these are the same optimizers, with the same parameters in their groups."""
        if len(optimizers) != len(self._optimizers) or not all(map(is_, optimizers, self._optimizers)):
            return False
        return all(map(_same, map(_params_of, optimizers), self._params))


def _params_of(optimizer: Optimizer) -> list[list[Tensor]]:
    return [list(group["params"]) for group in optimizer.param_groups]


def _same(groups: Sequence[Sequence[Tensor]], others: Sequence[Sequence[Tensor]]) -> bool:
    return list(map(len, groups)) == list(map(len, others)) and all(map(is_, chain(*groups), chain(*others)))

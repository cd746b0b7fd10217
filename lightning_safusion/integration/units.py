"""What is known of optimizers: their momenta, and their second moments, the units in which elements are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.sparsify.memory.momentum import EF21Memory
from lightning_safusion.sparsify.selection.units import Moment, UpdateUnits

#: Optimizers that divide gradients by their second moment, and whose momentum a memory can carry.
ADAPTIVE = (Adam, AdamW, RAdam)
# Those whose momentum, if they have one, stays with them; and the package of others.
_DIVIDING, _SCHEDULE_FREE = (NAdam, RMSprop, Adagrad, Adafactor), "schedulefree"
# In the state of Adam, AdamW, NAdam and RAdam (with amsgrad the first), RMSprop, and Adagrad.
_NAMES = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum")
_EPSILON = 1e-8  # of an optimizer that names none

# Orthogonalizes its momentum; torch has it from 2.9 on.
_MUON: tuple[type[Optimizer], ...] = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()

Group = dict[str, Any]


def is_muon(optimizer: Optimizer) -> bool:
    """Whether an optimizer is torch's Muon."""
    return type(optimizer) in _MUON


def momenta_of(optimizer: Optimizer, estimated: bool = False) -> list[float] | None:
    """The momentum of each of an optimizer's groups, 0 without one; None if a memory cannot carry it in its place.

    It can for Adam, AdamW, RAdam, and SGD without dampening, but not for classes derived from them; with estimates
    (``"ef21"``) for torch's Muon as well.
    """
    groups, known = optimizer.param_groups, (*ADAPTIVE, SGD, *(_MUON if estimated else ()))
    if type(optimizer) not in known or any(group.get("dampening") for group in groups):
        return None
    momenta = [momentum for momentum in map(own_momentum, groups) if not isinstance(momentum, Tensor)]
    return momenta if len(momenta) == len(groups) and all(0 <= momentum < 1 for momentum in momenta) else None


def own_momentum(group: Group) -> float | Tensor:
    momentum: float | Tensor = group["betas"][0] if "betas" in group else group["momentum"]
    return momentum


class SecondMoments:
    """What the gradients of parameters are divided by, as the latest steps of their optimizers have left it."""

    def __init__(self, optimizers: Sequence[Optimizer], params: Sequence[Tensor]) -> None:
        owners = {
            id(param): (optimizer, place)
            for optimizer in optimizers
            for place, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        self._params = [(param, *owners.get(id(param), (None, 0))) for param in params]
        self._known: dict[int, tuple[dict[str, Any], str, Tensor, Moment | None]] = {}  # while the state holds it

    def __call__(self, indices: Sequence[int]) -> list[Moment | None]:
        """Those of the parameters with registration indices; None before the first step, and if there is none."""
        moments: list[Moment | None] = []
        for index in indices:
            param, optimizer, place = self._params[index]
            state = optimizer.state.get(param) if optimizer is not None else None
            if not state or optimizer is None:
                moments.append(None)
                continue
            if (known := self._known.get(index)) is not None:
                of, name, values, moment = known
                if of is state and state.get(name) is values:
                    moments.append(moment)
                    continue
            moments.append(self._read(index, param, state, optimizer.param_groups[place]))
        return moments

    def _read(self, index: int, param: Tensor, state: dict[str, Any], group: Group) -> Moment | None:
        epsilon = group.get("eps", _EPSILON)
        epsilon = epsilon if isinstance(epsilon, float) else _EPSILON
        found = next((name for name in _NAMES if isinstance(state.get(name), Tensor)), None)
        if found is None:
            return _moment(_factored(state), param, epsilon) if "row_var" in state else None
        moment = _moment(state[found], param, epsilon)
        self._known[index] = state, found, state[found], moment
        return moment


def _moment(values: Tensor, param: Tensor, epsilon: float) -> Moment | None:
    """The second moment of a parameter, or of its shard; None if it is not in the memory order of the gradient."""
    if hasattr(values, "to_local"):
        values, param = values.to_local(), param.to_local()  # type: ignore[attr-defined]  # of DTensor
    if not values.is_floating_point() or values.layout is not torch.strided or values.device != param.device:
        return None
    if values.shape != param.shape or values.stride() != param.stride():
        return None
    return Moment(values.as_strided((values.numel(),), (1,)), epsilon)


def _factored(state: dict[str, Any]) -> Tensor:
    """Adafactor's second moment (Shazeer and Stern, 2018, algorithm 4), from its rows and columns."""
    rows, columns = state["row_var"], state["col_var"]
    moment: Tensor = rows @ columns / rows.mean(dim=-2, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    return moment


def divides(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to divide gradients by their second moment; classes derived from such are not."""
    free = is_schedule_free(optimizer) and "Adam" in type(optimizer).__name__
    return free or type(optimizer) in (*ADAPTIVE, *_DIVIDING)


def is_schedule_free(optimizer: Optimizer) -> bool:
    """Whether an optimizer is of the package schedulefree: it trains an average (Defazio et al., NeurIPS 2024)."""
    return type(optimizer).__module__.partition(".")[0] == _SCHEDULE_FREE


def compares_updates(settings: EngineSettings, optimizers: Sequence[Optimizer]) -> bool:
    """Whether elements are to be compared in units of the update; by default only if the residual has a momentum."""
    if settings.select_by == "auto":
        gradients = isinstance(settings.memory, EF21Memory)  # their differences, which no optimizer ever sees
        return settings.knows_updates and not gradients and any(map(divides, optimizers))
    return settings.select_by == "update"


def update_units(
    settings: EngineSettings, optimizers: Sequence[Optimizer], params: Sequence[Tensor], carries: bool
) -> UpdateUnits | None:
    """The units of the update, if elements are to be compared in them; ``carries``: the residual has a momentum."""
    compares = compares_updates(settings, optimizers) and (carries or settings.select_by == "update")
    return UpdateUnits(SecondMoments(optimizers, params), params[0].device) if compares and params else None

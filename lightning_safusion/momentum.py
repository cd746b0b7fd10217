"""The momentum of an optimizer, carried by the memory of what was not sent: ahead of the selection, not behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_safusion.sparsify.feedback import AutoMemory, DecoupledMomentum
from lightning_safusion.sparsify.memory import Memory
from lightning_safusion.sparsify.schedule import ConstantDensity, DensitySchedule

# Densities up to which the memory carries the momentum better than the optimizer does (docs/convergence.md).
_ADAPTIVE_UP_TO, _SGD_UP_TO = 0.25, 0.02
# Memories as long as elements wait would hold gradients of a thousand steps at a density of 0.1 %.
_LONGEST = 0.99

Group = dict[str, Any]


def momenta_of(optimizer: Optimizer) -> list[float] | None:
    """The momentum of each of an optimizer's groups, 0 without one; None if a memory cannot carry it in its place.

    It can for Adam, AdamW and SGD without dampening: what classes derived from them do is not known.
    """
    groups = optimizer.param_groups
    if type(optimizer) not in (Adam, AdamW, SGD) or any(group.get("dampening") for group in groups):
        return None
    momenta = [_own_momentum(group) for group in groups]
    return None if any(isinstance(momentum, Tensor) for momentum in momenta) else momenta


def _own_momentum(group: Group) -> float:
    momentum: float = group["betas"][0] if "betas" in group else group["momentum"]
    return momentum


def carried_momentum(memory: Memory, density: DensitySchedule, optimizers: Sequence[Optimizer]) -> float | None:
    """The factor with which a memory carries the momentum of the optimizers, whose own is off then; None: it does not.

    ``memory="decoupled"`` always does so. ``memory="auto"`` where that has been measured to lose less: Adam and AdamW
    at constant densities of up to a quarter, SGD up to 2 %, if all optimizers are of these and have a momentum. It
    remembers for as long as an element waits on average, if that is longer than the optimizer would.

    Args:
        memory: Error feedback.
        density: Share of the elements that is sent.
        optimizers: All that step with what was sent.
    """
    known = [momenta_of(optimizer) for optimizer in optimizers]
    own = [momentum for momenta in known if momenta is not None for momentum in momenta]
    if isinstance(memory, DecoupledMomentum):
        return memory.momentum if any(own) else None
    if not isinstance(memory, AutoMemory) or not isinstance(density, ConstantDensity):
        return None
    bounds = [_SGD_UP_TO if type(optimizer) is SGD else _ADAPTIVE_UP_TO for optimizer in optimizers]
    if not own or None in known or not all(own) or density.density > min(bounds):
        return None
    return max(*own, min(1.0 - density.density, _LONGEST))


class MomentumSwitch:
    """Switches the momentum of an optimizer off for tensors whose momentum a memory carries.

    Only while parameters are updated: training steps, schedules, loggers and checkpoints see the optimizer as it was
    made. SGD makes ``1 / (1 - momentum)`` steps of every gradient with its momentum, and one without: its learning rate
    is that much larger meanwhile.

    Args:
        optimizer: Adam, AdamW or SGD.
        carried: Whether the memory carries the momentum of a parameter, as of the latest gradients.
    """

    def __init__(self, optimizer: Optimizer, carried: Callable[[Tensor], bool]) -> None:
        self._optimizer, self._carried = optimizer, carried
        self._groups: list[Group] | None = None  # as they were made, while others are in their place
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(lambda *_: self.restore()),
        ]

    def _before(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Has the momentum off once the closure, which is the training step in Lightning, has returned."""
        given = len(args) > 1  # the first is the optimizer
        closure = args[1] if given else kwargs.get("closure")
        if closure is None:
            self._switch()
            return None

        def closure_first() -> Any:
            result = closure()
            self._switch()
            return result

        if given:
            return (args[0], closure_first, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_first}

    def _switch(self) -> None:
        self.restore()
        self._groups = self._optimizer.param_groups
        self._optimizer.param_groups = [part for group in self._groups for part in self._parts(group)]

    def _parts(self, group: Group) -> Iterator[Group]:
        """The parameters of a group with their own momentum, and those without."""
        own = _own_momentum(group)
        carried = [bool(own) and self._carried(param) for param in group["params"]]
        if not all(carried):
            yield {**group, "params": [p for p, gone in zip(group["params"], carried, strict=True) if not gone]}
        if not any(carried):
            return
        params = [p for p, gone in zip(group["params"], carried, strict=True) if gone]
        if "betas" in group:
            yield {**group, "params": params, "betas": (0.0, group["betas"][1])}
            return
        for param in params:
            self._optimizer.state.get(param, {}).pop("momentum_buffer", None)  # old, if it is ever used again
        yield {**group, "params": params, "momentum": 0.0, "nesterov": False, "lr": group["lr"] / (1.0 - own)}

    def restore(self) -> None:
        """Puts the optimizer's groups back, where a step has ended with an error."""
        if self._groups is not None:
            self._optimizer.param_groups, self._groups = self._groups, None

    def close(self) -> None:
        """Leaves the optimizer as it was made."""
        self.restore()
        for handle in self._handles:
            handle.remove()

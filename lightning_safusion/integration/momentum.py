"""The momentum of an optimizer while error feedback carries it, and how large its steps are then."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from lightning_safusion.announce import rank_zero_warn
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.integration.units import Group, is_muon, own_momentum

# Densities are those of two workers. Below one of them steps are larger, by this power of how far it is below: an
# element that is sent moves for all the steps in which it was not.
_PACED_BELOW, _PACE = 0.05, 0.25
# Share of the optimizer's momentum that stays: all of it at density 1, falling with the logarithm to none at 4 %.
_NONE_KEPT_AT = 0.04
# In the first steps, while networks leave their first plateau. Then it falls with the density, not at once: with a
# momentum of 0.9 a training comes to where curvature is up to 19 times what steps without one bear (Cohen et al.,
# Adaptive Gradient Methods at the Edge of Stability, 2022).
_KEPT_AT_FIRST = 0.95


class Pace:
    """Steps of Adam's kind where elements are compared in units of the update (docs/convergence.md).

    They depend on the share of the elements that moves in a window: with many workers each selects others.

    Args:
        density: Share of the elements that a worker selected in the latest window.
        first: Whether that was one of the first windows, which send the most.
        workers: Whose selections all workers receive.
    """

    def __init__(
        self, density: Callable[[], float], first: Callable[[], bool] = lambda: False, workers: int = 2
    ) -> None:
        self._density, self._first, self._workers = density, first, workers

    @staticmethod
    def of(engine: Engine) -> Pace:
        """That of the engine's windows."""
        space, first = engine.space, engine.first_windows
        # owners select again, and deliver as many elements with few workers as with many
        workers = engine.transport.world_size if space.scattered == 1 else 2
        return Pace(
            lambda: space.scattered * space.quotas.density,
            lambda: engine.density.opens and first.includes(engine.windows - 1),
            workers,
        )

    def of_two(self, density: float) -> float:
        """Density at which two workers move as many elements as all workers do at another."""
        return 1.0 - (1.0 - density) ** (self._workers / 2)

    def factor_at(self, density: float) -> float:
        """On the learning rate at a density: with it the learning rate that serves dense training serves."""
        return max(1.0, (_PACED_BELOW / self.of_two(density)) ** _PACE)

    @property
    def factor(self) -> float:
        """On the learning rate after the latest window."""
        return self.factor_at(self._density())

    @property
    def kept(self) -> float:
        """Share of the optimizer's momentum that stays.

        The more often elements move, the more do steps without a momentum shake the weights; the less often, the
        less do they need one.
        """
        least = _KEPT_AT_FIRST if self._first() else 0.0
        return max(least, 1.0 - math.log(self.of_two(self._density())) / math.log(_NONE_KEPT_AT))


def risen(optimizers: Iterable[Optimizer]) -> float:
    """Share of the largest learning rate of the training that the coming step has, in [0, 1].

    The largest is what schedulers write into an optimizer's groups: ``max_lr`` of ``OneCycleLR``, else ``initial_lr``,
    from which ``LinearLR`` and ``LambdaLR`` take shares. Without a scheduler, and where another device has the learning
    rate, it is the present one.
    """
    shares = [
        float(rate) / largest
        for optimizer in optimizers
        for group in optimizer.param_groups
        if not isinstance(rate := group["lr"], Tensor) or rate.is_cpu
        if (largest := max(float(rate), *(float(group.get(name, 0.0)) for name in ("initial_lr", "max_lr")))) > 0
    ]
    return max(shares, default=1.0)


class MomentumSwitch:
    """Switches the momentum of an optimizer off for tensors whose momentum a memory carries.

    Only while parameters are updated: training steps, schedules, loggers and checkpoints see the optimizer as it was
    made. With its momentum SGD uses every gradient ``1 / (1 - momentum)`` times, without it once: its learning rate is
    that much larger meanwhile. A momentum that is switched on again begins from zero. What is carried was decided when
    the group was first seen: a momentum that changes in training changes the steps, with a warning, and nothing else.

    Args:
        optimizer: Adam, AdamW, RAdam, Muon or SGD.
        carried: Whether the memory carries the momentum of a parameter, as of the latest gradients.
        pace: How Adam's kind steps with such parameters, if not as without a momentum; weight decay stays what it is.
        estimates: The memory is ``"ef21"``, not a residual.
    """

    def __init__(
        self, optimizer: Optimizer, carried: Callable[[Tensor], bool], pace: Pace | None = None, estimates: bool = False
    ) -> None:
        self._optimizer, self._carried, self._pace, self._estimates = optimizer, carried, pace, estimates
        self._groups: list[Group] | None = None  # the optimizer's own, while others are in their place
        self._gone: dict[int, Tensor] = {}  # parameters whose latest step was without their own momentum
        self._first: list[float] = []  # momentum of each group when it was first seen, which decides what is carried
        # share of each group's momentum that fades in a step; SGD's steps are divided by it
        self._fades: list[float] = []
        self._see_groups(optimizer.param_groups)
        self._warned = False
        after = optimizer.register_step_post_hook(lambda *_: self.restore())
        # hooks of others see the optimizer's own groups
        cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks).move_to_end(after.id, last=False)
        self._handles = [optimizer.register_step_pre_hook(self._before), after]

    @torch.compiler.disable
    def _before(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Switches the momentum off after the closure, which is the training step in Lightning."""
        self.restore()  # where a step has ended with an error
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

    @torch.compiler.disable
    def _switch(self) -> None:
        self._groups = self._optimizer.param_groups
        self._see_groups(self._groups)
        parts = [self._parts(number, group) for number, group in enumerate(self._groups)]
        self._optimizer.param_groups = [part for group in parts for part in group]

    def _see_groups(self, groups: Sequence[Group]) -> None:
        for group in groups[len(self._first) :]:  # groups may be added later
            self._first.append(float(own_momentum(group)))
            self._fades.append(1.0 - self._first[-1])

    def _parts(self, number: int, group: Group) -> Iterator[Group]:
        """The parameters of a group with their own momentum, and those without."""
        own, first = own_momentum(group), self._first[number]
        before = self._fades[number]
        # 1 / fades gradients add up: a buffer that is to hold more grows by no more than one of them in a step
        fades = self._fades[number] = max(1.0 - float(own), before / (1.0 + before))
        if own != first:
            self._warn(number, float(own))
        carried = [bool(first) and self._carried(param) for param in group["params"]]
        keep = [param for param, gone in zip(group["params"], carried, strict=True) if not gone]
        gone = [param for param, gone in zip(group["params"], carried, strict=True) if gone]
        for param in keep:
            if self._gone.pop(id(param), None) is not None:
                self._forget(param)
        for param in gone:
            if id(param) not in self._gone:
                self._forget(param)
                self._gone[id(param)] = param
        if keep or not gone:
            self._complete(group, keep)
            yield {**group, "params": keep}
        if gone and "betas" in group:
            betas = own * self._kept, group["betas"][1]
            yield {**group, "params": gone, "betas": betas, **self._paced(group)}
        elif gone:
            rate = 1.0 if is_muon(self._optimizer) else fades  # Muon's steps do not depend on the scale
            yield {**group, "params": gone, "momentum": 0.0, "nesterov": False, "lr": group["lr"] / rate}

    def _warn(self, number: int, own: float) -> None:
        if self._warned or not self._first[number]:
            return
        self._warned = True
        kind = type(self._optimizer).__name__
        name = f"{kind}'s {'betas[0]' if 'betas' in self._optimizer.defaults else 'momentum'} (group {number})"
        kept = "The residual carries the momentum of sparse tensors, with the factor that it had then"
        if self._estimates:
            kept = "Gradients are averaged over time in its place, with a factor that stays"
        follows = "" if self._estimates else " Only what stays of it follows."
        if isinstance(self._optimizer, SGD):
            follows = " Only their steps follow."
        rank_zero_warn(
            f"{name} is {own:.4g} now, and was {self._first[number]:.4g} when training began. {kept}.{follows} Pass "
            "memory='residual' to keep the momentum in the optimizer, or cycle_momentum=False to a scheduler that "
            "changes it."
        )

    @property
    def _kept(self) -> float:
        """Share of the momentum that stays."""
        return 0.0 if self._pace is None else self._pace.kept

    def _paced(self, group: Group) -> Group:
        """Learning rate and weight decay of the parameters whose momentum the memory carries."""
        if self._pace is None or (pace := self._pace.factor) == 1:
            return {}
        decoupled = group.get("decoupled_weight_decay", isinstance(self._optimizer, AdamW))
        decay = group["weight_decay"] / pace if decoupled else group["weight_decay"]
        return {"lr": group["lr"] * pace, "weight_decay": decay}

    def _forget(self, param: Tensor) -> None:
        """Empties the momentum of a parameter, unless it keeps some."""
        if self._kept:
            return
        state = self._optimizer.state.get(param, {})
        for name in ("exp_avg", "momentum_buffer"):
            if isinstance(state.get(name), Tensor):
                state[name].zero_()

    def _complete(self, group: Group, params: Sequence[Tensor]) -> None:
        """Gives all parameters a buffer if some have one, which fused SGD insists on."""
        if not group.get("fused") or not group.get("momentum"):
            return
        states = [self._optimizer.state[param] for param in params]
        if any(state.get("momentum_buffer") is not None for state in states):
            for param, state in zip(params, states, strict=True):
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def restore(self) -> None:
        """Puts the optimizer's groups back."""
        if self._groups is not None:
            self._optimizer.param_groups, self._groups = self._groups, None

    def settle(self) -> None:
        """Makes the optimizer's state one that a step with its own momentum can use, as for a checkpoint."""
        self.restore()
        for param in self._gone.values():
            self._forget(param)
        if self._gone:
            for group in self._optimizer.param_groups:
                self._complete(group, group["params"])
        # in the order of the first steps, which is that of the parts; workers with other shards gather it in one order
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param in state:
                    state[param] = state.pop(param)

    def close(self) -> None:
        """Leaves the optimizer as it was made."""
        self.settle()
        self._gone.clear()
        for handle in self._handles:
            handle.remove()

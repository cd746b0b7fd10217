"""The momentum of an optimizer, carried by error feedback: before the selection, not after it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from lightning_safusion.comm.catalogue import find_collective
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.integration.pace import Pace, risen
from lightning_safusion.integration.units import (
    ADAPTIVE,
    compares_updates,
    divides,
    update_units,
)
from lightning_safusion.sparsify.memory.contract import Memory
from lightning_safusion.sparsify.memory.momentum import AutoEF21Memory, EF21Memory
from lightning_safusion.sparsify.memory.residual import AutoMemory, DecoupledMomentum
from lightning_safusion.sparsify.schedule import BY_GRADIENT, BY_UPDATE, DensitySchedule

# Densities up to which the memory carries the momentum better than the optimizer does (docs/convergence.md).
_ADAPTIVE_UP_TO, _SGD_UP_TO = 0.25, 0.02
# How long the residual's momentum lasts, in times that an element waits on average (docs/convergence.md).
_BY_GRADIENT, _BY_UPDATE = 2, 4
# At a density of 0.1 % elements wait for a thousand steps: that long a momentum would be too old (docs/convergence.md).
_LONGEST = 0.99

_COMPARE = ", and longer in a warm-up, so compare longer runs"

# Orthogonalizes its momentum; torch has it from 2.9 on.
_MUON: tuple[type[Optimizer], ...] = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()

Group = dict[str, Any]


def suited(settings: EngineSettings, optimizers: Sequence[Optimizer]) -> EngineSettings:
    """The settings with the memory that ``memory="auto"`` stands for with these optimizers.

    :class:`EF21Memory` with Muon, whose matrices must be dense before they are made orthogonal (Gruntkowska et al.,
    Error Feedback for Muon and Friends, 2025), if the collective sends all that it is given; else a residual.
    """
    memory = settings.memory
    if not isinstance(memory, AutoMemory | AutoEF21Memory):
        return settings
    momenta = [momenta_of(optimizer, estimated=True) for optimizer in optimizers]
    estimates = any(map(is_muon, optimizers)) and None not in momenta
    if not estimates or not find_collective(settings.collective).conserves:
        return settings if isinstance(memory, AutoMemory) else replace(settings, memory=AutoMemory())
    if isinstance(memory, AutoEF21Memory):
        return settings
    own = any(momentum for each in momenta for momentum in each or ())
    return replace(settings, memory=AutoEF21Memory() if own else AutoEF21Memory(0.0))


def is_muon(optimizer: Optimizer) -> bool:
    """Whether an optimizer is torch's Muon."""
    return type(optimizer) in _MUON


def momenta_of(optimizer: Optimizer, estimated: bool = False) -> list[float] | None:
    """The momentum of each of an optimizer's groups, 0 without one; None if a memory cannot carry it in its place.

    It can for Adam, AdamW, RAdam, and SGD without dampening, but not for classes derived from them.

    Args:
        optimizer: Steps with what was sent.
        estimated: The memory is ``"ef21"``, which can for torch's Muon as well.
    """
    groups, known = optimizer.param_groups, (*ADAPTIVE, SGD, *(_MUON if estimated else ()))
    if type(optimizer) not in known or any(group.get("dampening") for group in groups):
        return None
    momenta = [momentum for momentum in map(_own_momentum, groups) if not isinstance(momentum, Tensor)]
    return momenta if len(momenta) == len(groups) and all(0 <= momentum < 1 for momentum in momenta) else None


def _own_momentum(group: Group) -> float | Tensor:
    momentum: float | Tensor = group["betas"][0] if "betas" in group else group["momentum"]
    return momentum


def carried_momentum(
    memory: Memory,
    density: DensitySchedule,
    optimizers: Sequence[Optimizer],
    by_update: bool = False,
    scattered: float = 1.0,
) -> float | None:
    """The factor of a momentum that the memory has; None if it has none.

    ``memory="decoupled"`` and ``"ef21"`` always carry that of optimizers. ``memory="auto"`` where that has been
    measured to lose less: at densities of up to a quarter for Adam, AdamW and RAdam, and, where elements are compared
    in units of the update, for all that divide gradients by their second moment; up to 2 % for SGD with a momentum; if
    all optimizers are of these. It then lasts twice as long as an element waits on average, by update four times as
    long, at most 100 steps, if that is longer than that of the optimizers whose place it takes.

    Args:
        memory: Error feedback.
        density: Share of the elements that is sent; of a schedule that which lasts.
        optimizers: All that step with what was sent.
        by_update: Elements are compared in units of the update.
        scattered: Share of that which a worker selects itself.
    """
    known = [momenta_of(optimizer, isinstance(memory, EF21Memory)) for optimizer in optimizers]
    own = [momentum for momenta in known if momenta is not None for momentum in momenta]
    if isinstance(memory, DecoupledMomentum | EF21Memory):
        return memory.momentum if any(own) and memory.momentum else None
    lasting = density.lasting()
    if not isinstance(memory, AutoMemory) or lasting is None or not optimizers:
        return None
    for optimizer, momenta in zip(optimizers, known, strict=True):
        carried = momenta is not None and all(momenta)
        bound = _SGD_UP_TO if type(optimizer) is SGD else _ADAPTIVE_UP_TO
        if lasting > bound or not (carried or (by_update and divides(optimizer))):
            return None
    waits = _BY_UPDATE if by_update else _BY_GRADIENT
    return max(*own, min(1.0 - scattered * lasting / waits, _LONGEST), 0.0)


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
        self,
        optimizer: Optimizer,
        carried: Callable[[Tensor], bool],
        pace: Pace | None = None,
        estimates: bool = False,
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
            self._first.append(float(_own_momentum(group)))
            self._fades.append(1.0 - self._first[-1])

    def _parts(self, number: int, group: Group) -> Iterator[Group]:
        """The parameters of a group with their own momentum, and those without."""
        own, first = _own_momentum(group), self._first[number]
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

    def close(self) -> None:
        """Leaves the optimizer as it was made."""
        self.settle()
        self._gone.clear()
        for handle in self._handles:
            handle.remove()


def carry_momentum(
    memories: Sequence[Memory],
    density: DensitySchedule,
    optimizers: Sequence[Optimizer],
    carried: Callable[[Tensor], bool],
    pace: Pace | None = None,
    scattered: float = 1.0,
) -> tuple[list[MomentumSwitch], str]:
    """Gives memories a momentum, and takes that of optimizers away, where :func:`carried_momentum` says so.

    Args:
        memories: Error feedback, of one worker or of several, all alike.
        density: Share of the elements that is sent.
        optimizers: All that step with what was sent.
        carried: Whether the latest gradient of a parameter is a mean of selected elements.
        pace: If elements are compared in units of the update.
        scattered: As in :func:`carried_momentum`.

    Returns:
        A switch for every optimizer without its momentum, and a line about all; it is empty if the residual has none.
    """
    momentum = carried_momentum(memories[0], density, optimizers, pace is not None, scattered)
    for memory in memories:
        if isinstance(memory, AutoMemory):
            memory.carry(momentum)
    if momentum is None:
        return [], ""
    estimates = isinstance(memories[0], EF21Memory)
    leaving = [optimizer for optimizer in optimizers if any(momenta_of(optimizer, estimates) or ())]
    names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in leaving))
    if estimates:
        note = f"gradients are averaged over time before they are sent (memory='ef21', factor {momentum:.3g}), in "
        note += f"place of the momentum of {names}"
        return [MomentumSwitch(optimizer, carried, estimates=True) for optimizer in leaving], note
    note = f"{names} leaves the momentum of sparse tensors to the residual" if leaving else "the residual fades"
    note += f" (factor {momentum:.3g}); memory='residual' " + ("keeps it in the optimizer" if leaving else "keeps it")
    if pace is not None:
        steps = _in_the_long_run(density, scattered, pace if leaving else None)
        note += f". Elements are compared by how far they would move{steps}; select_by='gradient' compares gradients"
    return [MomentumSwitch(optimizer, carried, pace) for optimizer in leaving], note


def _in_the_long_run(density: DensitySchedule, scattered: float, pace: Pace | None) -> str:
    """How steps differ in the long run, if they are paced, and how many send more at first; empty if they do not."""
    lasting = density.lasting()
    if lasting is None:
        return ""
    factor = 1.0 if pace is None else pace.factor_at(scattered * lasting)
    first = BY_UPDATE.lasts(lasting) if density.opens else 0
    told = f", with steps {factor:.2g} times as large" if factor > 1 else ""
    return told + (f"; the first {first} steps send more{_COMPARE}" if first else "")


def fit_to_optimizers(
    engines: Sequence[Engine],
    settings: EngineSettings,
    optimizers: Sequence[Optimizer],
    params: Sequence[Tensor],
    carried: Callable[[Tensor], bool],
) -> tuple[list[MomentumSwitch], bool, str]:
    """Has engines treat gradients as suits the optimizers: a momentum in the memory, units, first windows.

    Args:
        engines: Of one worker or of several, all alike.
        settings: Theirs.
        optimizers: All that step with what was sent.
        params: By registration index.
        carried: Whether the latest gradient of a parameter is a mean of selected elements.

    Returns:
        A switch for every optimizer without its momentum, whether the memory has one, and a line about all; it is empty
        if there is nothing to say.
    """
    memories, density, scattered = [each.space.memory for each in engines], settings.density, engines[0].space.scattered
    if isinstance(memories[0], EF21Memory):
        exchanged = set(map(id, params))  # dense tensors are averaged over time as well
        switches, note = carry_momentum(memories, density, optimizers, lambda param: id(param) in exchanged)
    else:
        pace = Pace.of(engines[0]) if compares_updates(settings, optimizers) else None
        switches, note = carry_momentum(memories, density, optimizers, carried, pace, scattered)
    carries = bool(note)
    plain = isinstance(memories[0], AutoEF21Memory) or (isinstance(memories[0], AutoMemory) and not carries)
    for engine in engines:
        units = update_units(settings, optimizers, params, carries)
        engine.space.compare_in(units)
        opening = BY_UPDATE if units is not None else BY_GRADIENT if plain else None
        engine.open_with(opening, dense=units is None, rate=partial(risen, WeakSet(optimizers)))
    lasting = density.lasting()
    if (
        engines[0].first_windows.opening is BY_GRADIENT
        and density.opens
        and lasting is not None
        and lasting < BY_GRADIENT.density
    ):
        first = BY_GRADIENT.lasts(lasting)
        note += f"{'; ' if note else ''}the first {first} steps send more than {lasting:.2g}{_COMPARE}"
    return switches, carries, note

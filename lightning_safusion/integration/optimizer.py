"""Which momentum and which density suit error feedback with an optimizer, and what is refused.

What ended level with dense training is measured in ``docs/convergence.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer, RAdam

from lightning_safusion.announce import MisconfigurationException
from lightning_safusion.comm.catalogue import find_collective
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.integration.momentum import MomentumSwitch, Pace, risen
from lightning_safusion.integration.units import (
    compares_updates,
    divides,
    is_muon,
    is_schedule_free,
    momenta_of,
    update_units,
)
from lightning_safusion.sparsify.memory.contract import Memory
from lightning_safusion.sparsify.memory.momentum import AutoEF21Memory, EF21Memory
from lightning_safusion.sparsify.memory.residual import AutoMemory, DecoupledMomentum
from lightning_safusion.sparsify.schedule import BY_GRADIENT, BY_UPDATE, DensitySchedule, SuitedDensity

# Densities up to which the memory carries the momentum better than the optimizer does.
_ADAPTIVE_UP_TO, _SGD_UP_TO = 0.25, 0.02
# How long the residual's momentum lasts, in times that an element waits on average.
_BY_GRADIENT, _BY_UPDATE = 2, 4
# At a density of 0.1 % elements wait for a thousand steps: that long a momentum would be too old.
_LONGEST = 0.99
# Density from which on Adam hardly suffers from error feedback.
_DENSE_ENOUGH = 0.25

_COMPARE = ", and longer in a warm-up, so compare longer runs"


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
    if not estimates or not find_collective(settings.collective).exchange.ability.conserves:
        return settings if isinstance(memory, AutoMemory) else replace(settings, memory=AutoMemory())
    if isinstance(memory, AutoEF21Memory):
        return settings
    own = any(momentum for each in momenta for momentum in each or ())
    return replace(settings, memory=AutoEF21Memory() if own else AutoEF21Memory(0.0))


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

    With ``by_update`` elements are compared in units of the update; of what is sent a worker selects the share
    ``scattered`` itself.
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
        settings: The engines' settings.
        optimizers: All that step with what was sent.
        params: By registration index.
        carried: Whether the latest gradient of a parameter is a mean of selected elements.

    Returns:
        A switch for every optimizer without its momentum, whether the memory has one, and a line about all; it is empty
        if there is nothing to say.
    """
    first, memory, density = engines[0], engines[0].space.memory, settings.density
    pace = Pace.of(first) if compares_updates(settings, optimizers) else None
    momentum = carried_momentum(memory, density, optimizers, pace is not None, first.space.scattered)
    carries, estimates = momentum is not None, isinstance(memory, EF21Memory)
    leaving = [each for each in optimizers if carries and any(momenta_of(each, estimates) or ())]
    if estimates:
        exchanged = set(map(id, params))  # dense tensors are averaged over time as well
        switches = [MomentumSwitch(each, lambda param: id(param) in exchanged, estimates=True) for each in leaving]
    else:
        switches = [MomentumSwitch(each, carried, pace) for each in leaving]
    plain = isinstance(memory, AutoEF21Memory) or (isinstance(memory, AutoMemory) and not carries)
    for engine in engines:
        if isinstance(engine.space.memory, AutoMemory):
            engine.space.memory.carry(momentum)
        units = update_units(settings, optimizers, params, carries)
        engine.space.compare_in(units)
        opening = BY_UPDATE if units is not None else BY_GRADIENT if plain else None
        engine.open_with(opening, dense=units is None, rate=partial(risen, WeakSet(optimizers)))
    notes = [] if momentum is None else [_about_momentum(momentum, leaving, estimates, density, first, pace)]
    lasting = density.lasting()
    sends_more = first.first_windows.opening is BY_GRADIENT and density.opens
    if sends_more and lasting is not None and lasting < BY_GRADIENT.density:
        notes.append(f"the first {BY_GRADIENT.lasts(lasting)} steps send more than {lasting:.2g}{_COMPARE}")
    return switches, carries, "; ".join(notes)


def _about_momentum(
    momentum: float,
    leaving: Sequence[Optimizer],
    estimates: bool,
    density: DensitySchedule,
    engine: Engine,
    pace: Pace | None,
) -> str:
    names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in leaving))
    if estimates:
        return (
            f"gradients are averaged over time before they are sent (memory='ef21', factor {momentum:.3g}), in place "
            f"of the momentum of {names}"
        )
    note = f"{names} leaves the momentum of sparse tensors to the residual" if leaving else "the residual fades"
    note += f" (factor {momentum:.3g}); memory='residual' " + ("keeps it in the optimizer" if leaving else "keeps it")
    if pace is None:
        return note
    note += ". Elements are compared by how far they would move"
    lasting = density.lasting()
    if lasting is not None:
        factor = pace.factor_at(engine.space.scattered * lasting) if leaving else 1.0
        note += f", with steps {factor:.2g} times as large" if factor > 1 else ""
        steps = BY_UPDATE.lasts(lasting) if density.opens else 0
        note += f"; the first {steps} steps send more{_COMPARE}" if steps else ""
    return f"{note}; select_by='gradient' compares gradients"


def needs_plain_ddp(optimizers: Sequence[Optimizer]) -> str | None:
    """Why optimizers need plain DDP, to follow a "because"; None if they do not."""
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        return "LBFGS compares the gradients of several backward passes, which must all be dense"
    return None


def refuse_double_momentum(memory: Memory, optimizer: Optimizer) -> None:
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


def refuse_lost_epsilon(optimizer: Optimizer) -> None:
    """Refuses an optimizer of torch whose ``eps`` is 0 in the type of a parameter: 0 / 0 where nothing was sent yet.

    Fused optimizers compute in float32.

    Raises:
        MisconfigurationException: With the value.
    """
    name, ours = type(optimizer).__name__, type(optimizer).__module__.startswith("torch.optim")
    for group in optimizer.param_groups if ours else ():
        eps, half = group.get("eps"), any(param.dtype == torch.float16 for param in group["params"])
        if half and isinstance(eps, float) and not group.get("fused") and not torch.tensor(eps, dtype=torch.float16):
            raise MisconfigurationException(
                f"{name} has eps={eps:g}, which is 0 in float16, the type of its parameters: elements of which nothing "
                f"was sent yet would become NaN. Use {name}(..., eps=1e-4) or fused=True, or precision='16-mixed' or "
                "'bf16-true'."
            )


def suit_density(density: SuitedDensity, memory: Memory, optimizers: Sequence[Optimizer], by_update: bool) -> None:
    """Chooses the density that ends level with dense training below these optimizers (``docs/convergence.md``).

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


def _level_with_momentum(optimizer: Optimizer) -> float:
    """The lowest density that ended level with dense training, with a momentum in the residual."""
    if is_schedule_free(optimizer):
        return SuitedDensity.PLAIN
    return SuitedDensity.RECTIFIED if isinstance(optimizer, RAdam) else SuitedDensity.WITH_MOMENTUM


def caution(memory: Memory, density: float, optimizer: Optimizer, carried: bool = False) -> str | None:
    """What error feedback costs an optimizer that has a momentum, other than SGD; None if nothing is known.

    Measured in ``docs/convergence.md``. With ``carried`` its momentum is the memory's.
    """
    if memory.lives_on_sparsity and density >= 1:
        return f"memory={memory.name!r} is the momentum of the residual: at density 1 training has none"
    groups, has_betas = optimizer.param_groups, any(group.get("betas", (0,))[0] for group in optimizer.param_groups)
    adaptive = has_betas or (not isinstance(optimizer, SGD) and any(group.get("momentum") for group in groups))
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

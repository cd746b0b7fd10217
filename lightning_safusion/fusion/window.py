"""One backward window: the gradients of one synchronised backward pass, from the first to the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import nan
from time import perf_counter

import numpy as np
from torch import Tensor

from lightning_safusion.fusion.buffer import FusionBuffer
from lightning_safusion.fusion.clock import Mark
from lightning_safusion.fusion.plans.plan import Group


@dataclass(eq=False)
class BufferTimes:
    """When things happened to one buffer: marks of the controller's clock, NaN while unknown.

    See :class:`BufferEvents` for their meaning; ``finished`` may be set by a callback on any thread.
    """

    closed: Mark = nan
    selected: Mark = nan
    launched: Mark = nan
    issued: Mark = nan
    finished: Mark = nan
    awaited: Mark = nan
    arrived: Mark = nan
    decoded: Mark = nan

    def finish(self, now: float) -> None:
        """Notes the end of the collective (callback of the transport)."""
        self.finished = now


def unmarked() -> Mark:
    """In place of a clock's mark where nobody wants to know."""
    return nan


@dataclass(eq=False)
class Window:
    """Gradients submitted so far and buffers under way.

    Args:
        length: Tensors of the layout (L).
        groups: Groups of the plan; empty while the order is not known.
        step: Number of the window.
        density: Density in force.
        mark: Takes down the moment.
        surveyed: All ranks take down when collectives end.
        timed: This rank takes down when collectives end.
        ticking: Buffers are fused from what is ready at ticks of a clock, not by a plan.
        hold: Launch nothing before every tensor has been submitted.
        deferred: The device decides at its end; the host learns of it later.
        plain: Gradients are averaged as DDP does, at its end: nothing is launched.
        scale: Factor of the loss that the gradients carry (one element, on their device); None for 1.
    """

    length: int
    groups: Sequence[Group]
    step: int
    density: float
    mark: Callable[[], Mark] = perf_counter
    surveyed: bool = True
    timed: bool = True
    ticking: bool = False
    hold: bool = False
    deferred: bool = False
    scale: Tensor | None = None
    plain: bool = False
    grads: list[Tensor | None] = field(init=False)
    fresh: np.ndarray = field(init=False)  # bool [L]
    raw: np.ndarray = field(init=False)  # bool [L]
    arrived: list[Mark] = field(init=False)  # [L]
    drained: Mark = nan
    order: list[int] = field(default_factory=list)
    unused: list[int] = field(default_factory=list)  # places that are raw on some rank
    inflight: list[tuple[FusionBuffer, BufferTimes]] = field(default_factory=list)
    unsent: list[tuple[FusionBuffer, BufferTimes, Tensor | None]] = field(default_factory=list)  # closed, with flags
    launched: int = 0  # places below this one have left, or are about to
    next_group: int = 0
    sequential: int = 0  # places below this one were submitted in their order
    in_order: bool = True
    planned: bool = False  # its groups were those of a plan
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.let_go()
        self.fresh = np.ones(self.length, bool)
        self.raw = np.zeros(self.length, bool)
        self.arrived = [nan] * self.length

    def let_go(self) -> None:
        """Holds no gradient any more."""
        self.grads = [None] * self.length

    @property
    def complete(self) -> bool:
        """Whether every tensor has been submitted."""
        return len(self.order) == self.length

    @property
    def ready(self) -> int:
        """Places below this one have been submitted; a gradient out of its order counts when all have."""
        return self.length if self.complete else self.sequential

    def submit(self, place: int, grad: Tensor, fresh: bool, raw: bool) -> Group | None:
        """Takes one gradient; returns the planned group that it completes, if any."""
        self.in_order = self.in_order and place == len(self.order)
        if self.in_order:
            self.sequential = place + 1
        self.order.append(place)
        self.grads[place] = grad
        if not fresh:
            self.fresh[place] = False
        if raw or self.plain:
            self.raw[place] = True
        self.arrived[place] = self.mark()
        if self.hold or not self.in_order or self.next_group == len(self.groups):
            return None
        group = self.groups[self.next_group]
        if group.stop != place + 1:
            return None
        self.next_group += 1
        return group

    def grads_of(self, group: Group) -> list[Tensor]:
        """Gradients of a group whose tensors have all arrived."""
        grads = self.grads[group.start : group.stop]
        return [grad for grad in grads if grad is not None]

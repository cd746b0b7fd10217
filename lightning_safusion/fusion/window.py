"""One backward window: its gradients, and their ways into the residual, out of it, and back from the means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import nan
from time import perf_counter
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import TensorFlag, all_finite, saturated
from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.fusion.events import Clock, Mark
from lightning_safusion.fusion.plans.plan import Group
from lightning_safusion.sparsify.memory.contract import Memory, as_float32
from lightning_safusion.sparsify.selection.view import device_constant

_FRESH, _BAD, _BYPASS = int(TensorFlag.FRESH), int(TensorFlag.BAD), int(TensorFlag.BYPASS)

#: What a narrow gradient cannot hold of the mean, float32: the elements ``[start, stop)`` of the flat space.
Rounding = tuple[int, int, Tensor]


@dataclass(eq=False)
class Window:
    """Gradients submitted so far; places are those of the layout (L)."""

    length: int  #: tensors of the layout
    groups: Sequence[Group]  #: of the plan; empty while the order is not known
    step: int  #: number of the window
    density: float  #: in force
    clock: Clock  #: of this rank's device
    surveyed: bool  #: all ranks record when collectives end
    timed: bool  #: this rank records when collectives end
    ticking: bool  #: buffers are fused from what is ready at ticks of a clock, not by a plan
    hold: bool  #: nothing is launched before every tensor has been submitted
    deferred: bool  #: the device decides at the end; the host reads the decision one window later
    repeats: bool  #: of some tensors a gradient was exchanged that no optimizer has used
    plain: bool  #: gradients are averaged as DDP does, at the end: nothing is launched
    wary: bool  #: a gradient may not be finite: means are written when all messages have come, after a copy
    scale: Tensor | None  #: factor of the loss that the gradients carry (a scalar on their device); None for 1
    grads: list[Tensor | None] = field(init=False)  #: by place; None until submitted
    fresh: np.ndarray = field(init=False)  #: bool [L], computed in this window
    bypass: np.ndarray = field(init=False)  #: bool [L], must not pass through the residual
    regular: bool = field(init=False)  #: every tensor so far is fresh, and none bypasses the residual
    complete: bool = field(init=False)  #: every tensor has been submitted
    in_order: bool = True  #: so far, tensors have been submitted in the order of the layout
    order: list[int] = field(default_factory=list)  #: places in the order of submission
    launched: int = 0  #: buffers of the places below this one are launched, or about to be
    next_group: int = 0  #: the group of the plan that is completed next
    error: Exception | None = None  #: why this rank could not fill a message
    profiled: bool = field(init=False)  #: torch.profiler is active: shipments mark their ranges
    mark: Callable[[], Mark] = field(init=False)  #: the present moment; NaN if that costs something and is not needed
    arrived: list[Mark] = field(init=False)  #: when each tensor was submitted [L]
    submitted: list[float] = field(init=False)  #: the same by the host's clock, where the device has one of its own
    worked: list[float] = field(init=False)  #: seconds of the engine's calls before that
    calls: float = 0.0  #: seconds of the engine's calls so far
    drained: Mark = nan  #: gradients and residual are final
    #: By place: this rank's gradients, where some tensor of a wary window was not finite; none elsewhere.
    copies: dict[int, Tensor] = field(default_factory=dict)
    _sequential: int = 0  # places below this one were submitted in their order

    def __post_init__(self) -> None:
        self.grads = [None] * self.length
        self.fresh = np.ones(self.length, bool)
        self.bypass = np.full(self.length, self.plain)
        self.regular = not self.plain
        self.complete = self.length == 0
        self.arrived, self.submitted, self.worked = ([nan] * self.length for _ in range(3))
        self.mark = self.clock.mark if self.clock.instant or self.timed else lambda: nan
        self.profiled = torch.autograd._profiler_enabled()

    @property
    def repairs(self) -> bool:
        """Tensors that are not finite are averaged again, as DDP does; a loss scaler only has to see that there are."""
        return self.wary and self.scale is None

    @property
    def ready(self) -> int:
        """Places below this one have been submitted; a gradient out of its order counts when all have."""
        return self.length if self.complete else self._sequential

    def submit(self, place: int, grad: Tensor, fresh: bool, bypass: bool) -> Group | None:
        """Adds one gradient; returns the planned group that it completes, if any."""
        if self.in_order and place == self._sequential:
            self._sequential = place + 1
        else:
            self.in_order = False
        self.order.append(place)
        self.grads[place] = grad
        if not fresh:
            self.fresh[place] = self.regular = False
        if bypass:
            self.bypass[place] = True
            self.regular = False
        self.arrived[place] = self.mark()
        self.complete = len(self.order) == self.length
        if self.hold or not self.in_order or self.next_group == len(self.groups):
            return None
        group = self.groups[self.next_group]
        if group.stop != place + 1:
            return None
        self.next_group += 1
        return group

    def note_call(self, place: int, begin: float) -> None:
        """Notes when the host has submitted a tensor, in a call of the engine that began at a moment of its clock."""
        now = perf_counter()
        self.submitted[place], self.worked[place] = now, self.calls + now - begin

    def taken(self, group: Group) -> np.ndarray | None:
        """bool [T]: tensors of a group that are fresh and do not bypass the residual; None if all are."""
        if self.regular:
            return None
        taken = self.fresh[group.start : group.stop] & ~self.bypass[group.start : group.stop]
        return None if taken.all() else taken

    def flags_of(self, group: Group) -> np.ndarray:
        """uint8 [T] of :class:`TensorFlag`, of the tensors of a group."""
        part = slice(group.start, group.stop)
        return (self.fresh[part] * _FRESH + self.bypass[part] * _BYPASS).astype(np.uint8)

    def grads_of(self, start: int, stop: int) -> list[Tensor]:
        """Gradients at the places ``[start, stop)``, which have all been submitted."""
        return cast(list[Tensor], self.grads[start:stop])


def compensate(
    buffer: Buffer, grads: Sequence[Tensor], tensors: Sequence[int], flags: Tensor, scale: Tensor | None
) -> Tensor:
    """Adds fresh gradients to the residual; those that are not finite are flagged instead.

    Args:
        buffer: Holds the tensors.
        grads: Flat gradients of some of its tensors.
        tensors: Which these are, 0 to T - 1.
        flags: uint8 [T]; not changed.
        scale: Factor that the gradients carry; the residual is without it.

    Returns:
        uint8 [T], the flags with those of bad tensors.
    """
    if not grads:
        return flags
    memory, ids = buffer.memory, [buffer.places[t] for t in tensors]
    if scale is None and (added := memory.compensate_finite(ids, grads)) is not None:
        return marked(flags, [tensors[i] for i in added.left_out])
    narrowed = list(grads)
    if torch.float64 in buffer.dtypes:  # added as the memory holds it
        narrowed = [grad.float() if grad.dtype == torch.float64 else grad for grad in grads]
    if grads[0].device.type != "cpu":
        narrowed, norms, finite = zeroed(narrowed)
        flags = flags | _spread((~finite).to(torch.uint8) * _BAD, tensors, len(flags))
    elif not all_finite(norms := torch.stack(torch._foreach_norm(narrowed, 2, dtype=torch.float32))):
        # the norm of finite numbers can overflow: look at the elements before calling a tensor bad
        usable = [all_finite(grad) for grad in narrowed]
        flags = marked(flags, [t for t, good in zip(tensors, usable, strict=True) if not good])
        narrowed, tensors, norms = list(compress(narrowed, usable)), list(compress(tensors, usable)), norms[usable]
    if narrowed and scale is not None:
        narrowed = unscaled(narrowed, scale)
        norms = norms / scale
    if narrowed:
        ids, dense = [buffer.places[t] for t in tensors], [bool(buffer.dense[t]) for t in tensors]
        memory.compensate(ids, narrowed, dense, norms)
    return flags


def zeroed(grads: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Replaces gradients that are not finite by zeros, on their device: to decide on the host would wait for it.

    Returns:
        The gradients; their norms, float32 (infinite where that has no such number); and bool, which were finite.
    """
    # in double precision: the squares of finite numbers overflow float32 from a norm of 1.8e19 on
    norms = torch.stack(torch._foreach_norm(list(grads), 2, dtype=torch.float64))
    finite = torch.isfinite(norms)
    kept = [torch.where(good, grad, 0) for good, grad in zip(finite, grads, strict=True)]
    return kept, torch.where(finite, norms, 0.0).float(), finite


def marked(flags: Tensor, bad: list[int]) -> Tensor:
    """Flags of tensors, those at some positions bad."""
    if bad:
        flags = flags.clone()
        flags[bad] |= _BAD
    return flags


def _spread(values: Tensor, positions: Sequence[int], length: int) -> Tensor:
    """The values at their positions in a vector of zeros, without waiting for the device."""
    if len(positions) == length:
        return values
    index = device_constant(np.array(positions, np.int64), values.device)
    return torch.zeros(length, dtype=values.dtype, device=values.device).index_copy_(0, index, values)


def unscaled(grads: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    """Gradients without the factor of the loss; float32, since the factor keeps 16-bit ones from underflow."""
    return list(torch._foreach_mul(as_float32(grads), scale.reciprocal()))


def withdraw(memory: Memory, window: Window, grads: Mapping[int, Tensor]) -> None:
    """Takes gradients, by place, out of the residual again, as far as they have been added to it."""
    for place, grad in grads.items():
        # what is not finite was never added
        if window.fresh[place] and not window.bypass[place] and all_finite(grad):
            memory.withdraw(place, grad if window.scale is None else unscaled([grad], window.scale)[0])


class Scratch:
    """Zeros to decode into: the same memory for all buffers of one stream."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros(0, dtype=torch.float32, device=device)

    def of(self, buffer: Buffer) -> Tensor:
        """float32 [N], or empty if the buffer needs none; zero again after :meth:`Exchange.release`."""
        numel = buffer.stop - buffer.start if buffer.exchange.ability.uses_scratch else 0
        if len(self._memory) < numel:
            self._memory = torch.zeros(numel, dtype=torch.float32, device=self._memory.device)
        return self._memory[:numel]

    def release(self) -> None:
        """Frees the memory."""
        self._memory = self._memory[:0].clone()


def deliver(window: Window, buffer: Buffer, mean: Tensor, chosen: np.ndarray | None = None) -> list[Rounding]:
    """Writes the mean into the gradients of a buffer.

    Args:
        window: Holds the gradients.
        buffer: The buffer.
        mean: Floating [N].
        chosen: bool [T], tensors to write; None writes all.

    Returns:
        What narrow gradients cannot hold.
    """
    if window.scale is not None:
        mean = mean * window.scale
    targets = window.grads_of(buffer.group.start, buffer.group.stop)
    tensors = list(range(len(targets))) if chosen is None else np.flatnonzero(chosen).tolist()
    if not tensors:
        return []
    written = [targets[t] for t in tensors]
    fitting = {dtype: saturated(mean, dtype).split(buffer.sizes) for dtype in buffer.dtypes}
    torch._foreach_copy_(written, [fitting[targets[t].dtype][t] for t in tensors])
    if not buffer.narrow or not any(target.itemsize < mean.itemsize for target in written):
        return []
    # of all tensors at once: a few launches for each of hundreds would take longer than the rest of the window
    error = mean.to(torch.float32, copy=True)
    pieces = error.split(buffer.sizes)
    torch._foreach_copy_([pieces[t] for t in tensors], written)
    torch.sub(mean, error, out=error)
    if window.scale is not None:
        error *= window.scale.reciprocal()
    return [(buffer.start, buffer.stop, error)]

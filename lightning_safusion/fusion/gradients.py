"""The ways of gradients: into the residual, out of it again, and back from the means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import TensorFlag, all_finite, saturated
from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.fusion.window import Window
from lightning_safusion.sparsify.memory.contract import Memory, as_float32
from lightning_safusion.sparsify.selection.view import device_constant

_BAD = int(TensorFlag.BAD)

#: What a narrow gradient cannot hold of the mean, float32: the elements ``[start, stop)`` of the flat space.
Rounding = tuple[int, int, Tensor]


def compensate(
    buffer: Buffer, grads: Sequence[Tensor], tensors: Sequence[int], flags: Tensor, scale: Tensor | None
) -> Tensor:
    """Adds fresh gradients to the residual; those that are not finite are flagged instead.

    Args:
        buffer: Holds the tensors.
        grads: Flat gradients of some of its tensors: of ``tensors``, 0 to T - 1.
        flags: uint8 [T]; not changed, but returned with those of bad tensors.
        scale: Factor that the gradients carry; the residual is without it.
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

    Returns the gradients; their norms, float32 (infinite where that has no such number); and bool, which were finite.
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
    """Writes the mean (floating [N]) into the gradients of a buffer: of ``chosen`` tensors (bool [T]), or of all.

    Returns what narrow gradients cannot hold.
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

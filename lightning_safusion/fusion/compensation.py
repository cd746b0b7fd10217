"""Error feedback on its way in: fresh gradients are added to the residual, and elements are selected from the sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import TensorFlag, all_finite
from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.sparsify.selection.view import device_constant

_BAD = int(TensorFlag.BAD)


def compensate(buffer: Buffer, grads: Sequence[Tensor], ids: list[int], flags: Tensor, scale: Tensor | None) -> Tensor:
    """Adds fresh gradients to the memory; those that are not finite are flagged instead.

    Args:
        buffer: Holds the tensors.
        grads: Flat gradients of some of its tensors.
        ids: Their places.
        flags: uint8 [T]; not changed.
        scale: Factor that the gradients carry; the memory holds them without it.

    Returns:
        uint8 [T], the flags with those of bad tensors.
    """
    if not grads:
        return flags
    memory, first = buffer.memory, buffer.group.start
    if scale is None and (added := memory.compensate_finite(ids, grads)) is not None:
        return marked(flags, [ids[i] - first for i in added.left_out])
    narrowed = list(grads)
    if torch.float64 in buffer.dtypes:  # added as the memory holds it
        narrowed = [grad.float() if grad.dtype == torch.float64 else grad for grad in grads]
    norms = torch.stack(torch._foreach_norm(narrowed, 2, dtype=torch.float32))
    if norms.device.type != "cpu":
        # deciding on the host would wait for the device: what is not finite is replaced by zeros there
        finite = torch.isfinite(norms)
        flags = flags | _spread((~finite).to(torch.uint8) * _BAD, [i - first for i in ids], len(flags))
        narrowed = [torch.where(ok, grad, 0) for ok, grad in zip(finite, narrowed, strict=True)]
        norms = torch.where(finite, norms, 0.0)
    elif not all_finite(norms):
        # the norm of finite numbers can overflow: look at the elements before calling a tensor bad
        good = [i for i, grad in enumerate(narrowed) if all_finite(grad)]
        kept = set(good)
        flags = marked(flags, [ids[i] - first for i in range(len(ids)) if i not in kept])
        narrowed, ids, norms = [narrowed[i] for i in good], [ids[i] for i in good], norms[good]
    if narrowed and scale is not None:
        narrowed = unscaled(narrowed, scale)
        norms = norms / scale
    if narrowed:
        memory.compensate(ids, narrowed, [bool(buffer.dense[i - first]) for i in ids], norms)
    return flags


def marked(flags: Tensor, bad: list[int]) -> Tensor:
    """Flags of tensors, those at some places bad."""
    if bad:
        flags = flags.clone()
        flags[bad] |= _BAD
    return flags


def _spread(values: Tensor, places: list[int], length: int) -> Tensor:
    """The values at their places in a vector of zeros, without waiting for the device."""
    if len(places) == length:
        return values
    index = device_constant(np.array(places, np.int64), values.device)
    return torch.zeros(length, dtype=values.dtype, device=values.device).index_copy_(0, index, values)


def unscaled(grads: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    """Gradients without the factor of the loss; in float32, since the factor is there to save 16-bit ones from
    underflow."""
    return list(torch._foreach_mul([grad.float() for grad in grads], scale.reciprocal()))

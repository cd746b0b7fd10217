"""Memories with a momentum of their own, applied before selection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_safusion.sparsify.memory.contract import Flat, Memory, as_float32


class DGCMemory(Memory):
    """Momentum correction with masking and local clipping (Lin et al., Deep Gradient Compression, ICLR 2018, 3.1-3.2).

    Every gradient passes through a local momentum ``u`` into the velocity ``v``, from which is selected; the optimizer
    must be plain SGD. A dense tensor sends its velocity and keeps its momentum: momentum SGD.

    Args:
        momentum: Momentum factor, in [0, 1).
        nesterov: Adds ``m (u + g) + g`` to the velocity instead of ``m u + g``.
        masking: Also zeroes the momentum of elements that were sent (momentum factor masking).
        clip: Bound on the norm of the averaged gradient of a tensor. Each of ``N`` workers clips its gradient to
            ``clip * sqrt(N)`` before it is accumulated, as in the paper.

    Raises:
        ValueError: If ``momentum`` is outside [0, 1) or ``clip`` is not positive.
    """

    name: ClassVar[str] = "dgc"
    conserves = False
    shapes_updates = True
    vectors = ("momentum", "velocity")
    pending = "velocity"

    def __init__(
        self, momentum: float = 0.9, nesterov: bool = False, masking: bool = True, clip: float | None = None
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be positive, got {clip}; None leaves gradients as they are")
        self.momentum = momentum
        self.nesterov = nesterov
        self.masking = masking
        self.clip = clip

    def compensate(self, ids: Sequence[int], grads: Sequence[Tensor], dense: Sequence[bool], norms: Tensor) -> None:
        g = as_float32(grads)
        if self.clip is not None:
            g = list(torch._foreach_mul(g, list(self._clipping(norms).unbind())))
        u, v = (flat.of(ids) for flat in self._flats.values())
        if self.nesterov:
            torch._foreach_add_(u, g)
            torch._foreach_mul_(u, self.momentum)
            torch._foreach_add_(v, g)
        else:
            torch._foreach_mul_(u, self.momentum)
            torch._foreach_add_(u, g)
        torch._foreach_add_(v, u)

    def _clipping(self, norms: Tensor) -> Tensor:
        """float32, one factor of at most 1 per gradient; a gradient of zeros divides by 0 and is left alone."""
        limit = math.inf if self.clip is None else self.clip * math.sqrt(self.world_size)
        return (limit / norms).clamp(max=1)

    def commit(self, start: int, indices: Tensor, sent: Tensor) -> None:
        super().commit(start, indices, sent)
        if self.masking:
            u = self._flats["momentum"].data[start:]
            # Subtracting what is there zeroes it exactly, and padding, which may repeat an index, subtracts nothing.
            u.index_add_(0, indices, torch.where(sent != 0, u[indices], 0), alpha=-1)

    def withdraw(self, tensor: int, grad: Tensor) -> None:
        u, v = (flat.views[tensor] for flat in self._flats.values())
        g = grad.float()
        if self.clip is not None:
            g = g * self._clipping(torch.linalg.vector_norm(g))
        v -= u
        if self.nesterov:
            v -= g
        if self.momentum == 0:
            u.zero_()  # it is multiplied by 0 before it is used again
        elif self.nesterov:
            u.div_(self.momentum).sub_(g)
        else:
            u.sub_(g).div_(self.momentum)


class EF21Memory(Memory):
    """Sends how a gradient has changed; the optimizer gets a running estimate of the mean gradient (EF21).

    Every worker averages its gradients over time, ``v <- m v + (1 - m) g``, and holds an estimate of ``v`` that all
    workers know the mean of. Elements are selected from the difference of both, and those that are sent move the
    estimate. The optimizer sees the mean estimate, dense in every step. Density 1 gives the mean of ``v`` itself.

    The momentum here replaces that of the optimizer, which the strategy switches off for Adam, AdamW, RAdam, Muon and
    SGD (whose steps it makes ``1 / (1 - m)`` times as large, ``m`` being SGD's own, since ``v`` is an average); other
    optimizers must have none. It needs four copies of the parameters in fp32; error feedback needs one.

    Sources: Richtárik, Sokolov, Fatkhullin, EF21, NeurIPS 2021; Fatkhullin, Tyurin, Richtárik, Momentum Provably
    Improves Error Feedback, NeurIPS 2023 (EF21-SGDM). As there, ``v`` begins as the first gradient.

    Args:
        momentum: Share of the past in the average, in [0, 1); 0 is EF21 without momentum. The estimate lags by itself,
            so that less momentum than an optimizer's usual 0.9 serves better.

    Raises:
        ValueError: If ``momentum`` is outside [0, 1).
    """

    name: ClassVar[str] = "ef21"
    conserves = False
    shapes_updates = True
    vectors = ("average", "difference", "estimate")  # v, v less its estimate, and the mean estimate of all workers
    pending = "difference"

    def __init__(self, momentum: float = 0.8) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        self.momentum = momentum

    def bind(self, edges: Sequence[int], device: torch.device, world_size: int = 1) -> None:
        super().bind(edges, device, world_size)
        self._average, self._estimate = self._flats["average"], self._flats["estimate"]
        self._next = Flat(edges, device)  # the mean estimate after this window
        self._begun: set[int] = set()  # tensors that have had a gradient other than zero
        self._replaced: set[int] = set()  # tensors whose average is their latest gradient alone

    def compensate(self, ids: Sequence[int], grads: Sequence[Tensor], dense: Sequence[bool], norms: Tensor) -> None:
        average = self._average.of(ids)
        change = list(torch._foreach_sub(as_float32(grads), average))
        torch._foreach_mul_(change, self._weights(ids, norms))
        torch._foreach_add_(average, change)
        torch._foreach_add_(self._pending.of(ids), change)

    def _weights(self, ids: Sequence[int], norms: Tensor) -> list[float]:
        """Of each gradient in its average: 1 for the first one."""
        weight = 1 - self.momentum
        self._replaced.difference_update(ids)
        if self._begun.issuperset(ids):
            return [weight] * len(ids)
        self._replaced.update(i for i in ids if i not in self._begun)
        weights = [weight if i in self._begun else 1.0 for i in ids]
        # elsewhere reading the norms would wait for the device
        nonzero = norms.tolist() if norms.device.type == "cpu" else [1.0] * len(ids)
        self._begun.update(i for i, norm in zip(ids, nonzero, strict=True) if norm > 0)
        return weights

    def withdraw(self, tensor: int, grad: Tensor) -> None:
        average, difference = self._average.views[tensor], self._pending.views[tensor]
        estimate = average - difference
        if self.momentum == 0 or tensor in self._replaced:
            # what the average was before is not known, and not needed: the next gradient takes its place
            average.copy_(estimate)
            difference.zero_()
            if tensor in self._replaced:
                self._begun.discard(tensor)
        else:
            average.sub_(grad.float(), alpha=1 - self.momentum).div_(self.momentum)
            torch.sub(average, estimate, out=difference)

    def add(self, start: int, stop: int, error: Tensor) -> None:
        """Forgets the error: the estimate itself is not rounded."""

    def received(self, start: int, stop: int, mean: Tensor) -> Tensor:
        return torch.add(self._estimate.data[start:stop], mean, out=self._next.data[start:stop])

    def settle(self, start: int, stop: int, good: Tensor | None = None) -> None:
        estimate, following = self._estimate.data[start:stop], self._next.data[start:stop]
        estimate.copy_(following if good is None else torch.where(good, following, estimate))

    def permute(self, order: Sequence[int], edges: Sequence[int]) -> None:
        super().permute(order, edges)
        self._next.permute(order, edges)
        places = {old: place for place, old in enumerate(order)}
        self._begun = {places[old] for old in self._begun}
        self._replaced = {places[old] for old in self._replaced}

    def to_host(self) -> None:
        super().to_host()
        self._next.to_host()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._begun = {i for i, view in enumerate(self._average.views) if bool(view.any())}
        self._replaced = set()


class AutoEF21Memory(EF21Memory):
    """:class:`EF21Memory` as ``memory="auto"`` takes it: plain DDP with the optimizer's momentum may take its place."""

    shapes_updates = False

"""What happens to the elements that were not sent: error-feedback memories."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor


class Memory(ABC):
    """Flat fp32 state over the whole gradient space, in the order in which gradients become ready.

    Tensor ``i`` of the layout owns ``[edges[i], edges[i + 1])``. One backward window is:
    :meth:`compensate` for the tensors with a fresh, finite gradient, then selection from :meth:`accumulated`, and, when
    the exchange has ended well on all ranks, :meth:`commit`. A window that ends badly (overflow) is never committed,
    so that what was sent is still there.
    """

    name: ClassVar[str]
    #: sum over steps of world_size * update + sum over ranks of residuals == sum of all gradients
    conserves: bool
    #: Workers whose gradients are averaged; whoever binds the memory sets it.
    world_size: int = 1

    @abstractmethod
    def bind(self, edges: Sequence[int], device: torch.device) -> None:
        """Allocates zero state for a layout; forgets any earlier one."""

    @abstractmethod
    def compensate(self, ids: Sequence[int], grads: Sequence[Tensor], dense: Sequence[bool], norms: Tensor) -> None:
        """Adds fresh, finite gradients to the state.

        Args:
            ids: Positions in the layout.
            grads: Flat gradients, any floating dtype, one per id; not changed.
            dense: Whether each travels whole in this window.
            norms: float32 [len(ids)], Euclidean norms of the gradients (known from the finiteness test).
        """

    @abstractmethod
    def accumulated(self, start: int, stop: int) -> Tensor:
        """float32 view of the elements ``[start, stop)`` of the flat space: what selection reads, never writes."""

    @abstractmethod
    def commit(self, start: int, indices: Tensor, sent: Tensor) -> None:
        """Takes what was sent out of the state.

        Args:
            start: First element of the span in the flat space.
            indices: int64 [K] positions in the span (padding has ``sent`` 0 and must do no harm).
            sent: float32 [K] values as the receivers decoded them, so that rounding on the wire stays in the state.
        """

    @abstractmethod
    def commit_dense(self, start: int, stop: int, sent: Tensor) -> None:
        """The same for a piece that travelled whole; ``sent`` is float32 [stop - start] as decoded."""

    @abstractmethod
    def withdraw(self, tensor: int, grad: Tensor) -> None:
        """Takes an uncommitted gradient of this window out again (it travels outside the compressed path)."""

    @abstractmethod
    def add(self, start: int, stop: int, error: Tensor) -> None:
        """Adds a rounding error (float32 [stop - start]) of the decoded mean, the same on all ranks."""

    @abstractmethod
    def permute(self, order: Sequence[int], edges: Sequence[int]) -> None:
        """Moves the state to a new layout in which place ``j`` holds the tensor that was at place ``order[j]``."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """The flat state by name (``{"residual": float32[D]}``); references, not copies."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores flat state of the same layout."""


class _Flat:
    """A flat fp32 vector with one cached view per tensor, so that a whole group is updated by one foreach call.

    Args:
        edges: Tensor ``i`` owns ``[edges[i], edges[i + 1])``.
        device: Where the vector lives.
    """

    def __init__(self, edges: Sequence[int], device: torch.device) -> None:
        self._adopt(torch.zeros(edges[-1], device=device), edges)

    def _adopt(self, data: Tensor, edges: Sequence[int]) -> None:
        self.data = data
        self.views = list(data.split([stop - start for start, stop in pairwise(edges)]))

    def of(self, ids: Sequence[int]) -> list[Tensor]:
        return [self.views[i] for i in ids]

    def permute(self, order: Sequence[int], edges: Sequence[int]) -> None:
        self._adopt(torch.cat([self.data[:0], *self.of(order)]), edges)

    def load(self, state: dict[str, Any], name: str) -> None:
        value = state.get(name)
        if not isinstance(value, Tensor) or value.shape != self.data.shape:
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"the memory needs {name!r} as a vector of {self.data.numel()} elements, got {found}:"
                " the checkpoint was made with another memory or model"
            )
        self.data.copy_(value)


def _as_float32(grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of 16 bits as float32: mixed types would drop out of the fused foreach kernels."""
    if all(grad.dtype == torch.float32 for grad in grads):
        return list(grads)
    wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    torch._foreach_copy_(wide, list(grads))
    return wide


class ResidualMemory(Memory):
    """Error feedback: what was not sent is added to the next gradient (Seide et al. 2014; Karimireddy et al. 2019).

    The residual is in units of the gradient: the learning rate acts when it is sent.

    Args:
        decay: Factor on the residual before a fresh gradient is added, in (0, 1]. Below 1 old errors are forgotten,
            and the sum of gradients is no longer conserved.

    Raises:
        ValueError: If ``decay`` is outside (0, 1].
    """

    name: ClassVar[str] = "residual"

    def __init__(self, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise ValueError(f'decay must be in (0, 1], got {decay}; memory="none" forgets everything')
        self.decay = decay
        self.conserves = decay == 1
        self._residual = _Flat([0], torch.device("cpu"))

    def bind(self, edges: Sequence[int], device: torch.device) -> None:
        self._residual = _Flat(edges, device)

    def compensate(self, ids: Sequence[int], grads: Sequence[Tensor], dense: Sequence[bool], norms: Tensor) -> None:
        views = self._residual.of(ids)
        if self.decay != 1:
            torch._foreach_mul_(views, self.decay)
        torch._foreach_add_(views, _as_float32(grads))

    def accumulated(self, start: int, stop: int) -> Tensor:
        return self._residual.data[start:stop]

    def commit(self, start: int, indices: Tensor, sent: Tensor) -> None:
        # An addition, not an assignment: padding may repeat the index of an element that was sent.
        self._residual.data[start:].index_add_(0, indices, sent, alpha=-1)

    def commit_dense(self, start: int, stop: int, sent: Tensor) -> None:
        self._residual.data[start:stop] -= sent

    def withdraw(self, tensor: int, grad: Tensor) -> None:
        self._residual.views[tensor] -= grad

    def add(self, start: int, stop: int, error: Tensor) -> None:
        self._residual.data[start:stop] += error

    def permute(self, order: Sequence[int], edges: Sequence[int]) -> None:
        self._residual.permute(order, edges)

    def state_dict(self) -> dict[str, Tensor]:
        return {"residual": self._residual.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._residual.load(state, "residual")


class DGCMemory(Memory):
    """Momentum correction with masking and local clipping (Lin et al., Deep Gradient Compression, ICLR 2018, 3.1-3.2).

    Every gradient passes through a local momentum ``u`` into the velocity ``v``, from which is selected; the optimizer
    must be plain SGD. A tensor that travels whole sends its velocity and keeps its momentum: momentum SGD.

    Args:
        momentum: Momentum factor, in [0, 1).
        nesterov: Adds ``m (u + g) + g`` to the velocity instead of ``m u + g``.
        masking: Also zeroes the momentum of elements that were sent, so that it does not carry on in a direction that
            is as old as the element waited (momentum factor masking).
        clip: Bound on the norm of the averaged gradient of a tensor. Locally, each worker's share ``g / N`` of the
            average is clipped to ``clip / sqrt(N)`` before it is accumulated, as in the paper: ``N`` independent shares
            of that size have the norm ``clip`` together. In terms of ``g`` that is ``clip * sqrt(N)``.

    Raises:
        ValueError: If ``momentum`` is outside [0, 1) or ``clip`` is not positive.
    """

    name: ClassVar[str] = "dgc"
    conserves = False

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
        self._u = self._v = _Flat([0], torch.device("cpu"))

    def bind(self, edges: Sequence[int], device: torch.device) -> None:
        self._u, self._v = _Flat(edges, device), _Flat(edges, device)

    def compensate(self, ids: Sequence[int], grads: Sequence[Tensor], dense: Sequence[bool], norms: Tensor) -> None:
        g = _as_float32(grads)
        if self.clip is not None:
            g = list(torch._foreach_mul(g, list(self._clipping(norms).unbind())))
        u, v = self._u.of(ids), self._v.of(ids)
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

    def accumulated(self, start: int, stop: int) -> Tensor:
        return self._v.data[start:stop]

    def commit(self, start: int, indices: Tensor, sent: Tensor) -> None:
        self._v.data[start:].index_add_(0, indices, sent, alpha=-1)
        if self.masking:
            u = self._u.data[start:]
            # Subtracting what is there zeroes it exactly, and padding, which may repeat an index, subtracts nothing.
            u.index_add_(0, indices, torch.where(sent != 0, u[indices], 0), alpha=-1)

    def commit_dense(self, start: int, stop: int, sent: Tensor) -> None:
        self._v.data[start:stop] -= sent

    def withdraw(self, tensor: int, grad: Tensor) -> None:
        u, v = self._u.views[tensor], self._v.views[tensor]
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

    def add(self, start: int, stop: int, error: Tensor) -> None:
        self._v.data[start:stop] += error

    def permute(self, order: Sequence[int], edges: Sequence[int]) -> None:
        self._u.permute(order, edges)
        self._v.permute(order, edges)

    def state_dict(self) -> dict[str, Tensor]:
        return {"momentum": self._u.data, "velocity": self._v.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._u.load(state, "momentum")
        self._v.load(state, "velocity")


class NoMemory(Memory):
    """Forgets what was not sent: only the gradients of the current window are selected from.

    The first gradient after a commit begins a new window. A tensor without a gradient in it reads as zeros.
    """

    name: ClassVar[str] = "none"
    conserves = False

    def __init__(self) -> None:
        self._grads = _Flat([0], torch.device("cpu"))
        self._filled: set[int] = set()
        self._ended = False

    def bind(self, edges: Sequence[int], device: torch.device) -> None:
        self._grads = _Flat(edges, device)
        self._filled, self._ended = set(), False

    def compensate(self, ids: Sequence[int], grads: Sequence[Tensor], dense: Sequence[bool], norms: Tensor) -> None:
        if self._ended:
            torch._foreach_zero_(self._grads.of(sorted(self._filled)))
            self._filled, self._ended = set(), False
        # Copied, not added: after a window that ended badly and was never committed its gradients are still there.
        torch._foreach_copy_(self._grads.of(ids), list(grads))
        self._filled.update(ids)

    def accumulated(self, start: int, stop: int) -> Tensor:
        return self._grads.data[start:stop]

    def commit(self, start: int, indices: Tensor, sent: Tensor) -> None:
        self._ended = True

    def commit_dense(self, start: int, stop: int, sent: Tensor) -> None:
        self._ended = True

    def withdraw(self, tensor: int, grad: Tensor) -> None:
        self._grads.views[tensor].zero_()

    def add(self, start: int, stop: int, error: Tensor) -> None:
        """Forgets the error, as everything else."""

    def permute(self, order: Sequence[int], edges: Sequence[int]) -> None:
        self._grads.permute(order, edges)
        self._filled = {place for place, old in enumerate(order) if old in self._filled}

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Has nothing to restore."""


_MEMORIES: dict[str, type[Memory]] = {memory.name: memory for memory in (ResidualMemory, DGCMemory, NoMemory)}


def resolve_memory(spec: str | Memory) -> Memory:
    """Builds a memory from its name ("residual", "dgc", "none"); a memory is returned as it is.

    Raises:
        ValueError: If the name is unknown.
        TypeError: If ``spec`` is neither a name nor a memory.
    """
    if isinstance(spec, Memory):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"memory must be a name or a Memory, got {spec!r} of type {type(spec).__name__}")
    if spec not in _MEMORIES:
        raise ValueError(f"unknown memory {spec!r}; choose one of {', '.join(map(repr, _MEMORIES))} or pass a Memory")
    return _MEMORIES[spec]()

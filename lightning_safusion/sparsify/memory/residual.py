"""Memories that pass on to the optimizer what was sent: the residual of error feedback, and none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_safusion.kernels import cpu as native
from lightning_safusion.registry import Registry
from lightning_safusion.sparsify.memory.contract import Memory, as_float32
from lightning_safusion.sparsify.memory.momentum import DGCMemory, EF21Memory


class ResidualMemory(Memory):
    """Error feedback: the residual is added to the next gradient (Seide et al. 2014; Karimireddy et al. 2019).

    The residual is in units of the gradient: the learning rate acts when it is sent.

    Args:
        decay: Factor on the residual before a fresh gradient is added, in (0, 1]. Below 1 old errors are forgotten,
            and the sum of gradients is no longer conserved.

    Raises:
        ValueError: If ``decay`` is outside (0, 1].
    """

    name: ClassVar[str] = "residual"
    vectors = ("residual",)
    pending = "residual"

    def __init__(self, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise ValueError(f'decay must be in (0, 1], got {decay}; memory="none" forgets everything')
        self.decay = decay
        self.conserves = decay == 1

    def compensate(self, ids: Sequence[int], grads: Sequence[Tensor], dense: Sequence[bool], norms: Tensor) -> None:
        views, added = self._pending.of(ids), as_float32(grads)
        if self.decay != 1:  # rounded twice, as kernels do
            torch._foreach_mul_(views, self.decay)
        torch._foreach_add_(views, added)

    def compensate_finite(
        self,
        ids: Sequence[int],
        grads: Sequence[Tensor],
        wanted: native.Wanted | None = None,
        cut: native.Parts | None = None,
    ) -> native.Added | None:
        data, parts = self._pending.data, self._pending.parts[ids if isinstance(ids, range) else tuple(ids)]
        if parts is None or type(self).compensate is not ResidualMemory.compensate:
            return None
        if not native.serves(data, *grads, dtypes=native.FLOAT32):
            return None
        if cut is not None:
            parts = cut._replace(starts=cut.starts + parts.starts[0])
        return native.add_finite(data, parts, grads, self.decay, wanted)

    def commit(self, start: int, indices: Tensor, sent: Tensor) -> None:
        # a collective of another package may return fewer values, which PyTorch refuses
        if len(indices) == len(sent) and native.serves(self._pending.data, indices, sent):
            native.take_out(self._pending.data[start:], indices, sent)
        else:
            super().commit(start, indices, sent)

    def commit_message(self, start: int, stop: int, message: native.Message) -> bool:
        if type(self).commit is not ResidualMemory.commit:
            return False
        native.take_out_message(self._pending.data[start:stop], message)
        return True

    def withdraw(self, tensor: int, grad: Tensor) -> None:
        residual = self._pending.views[tensor]
        residual -= grad
        if self.decay != 1:
            residual /= self.decay


class DecoupledMomentum(ResidualMemory):
    """A residual that is a momentum as well: elements that are sent leave every worker's momentum, the others fade.

    It replaces the optimizer's momentum, which the strategy switches off for Adam, AdamW and SGD. Elements that fade
    are not conserved. ``collective="auto"`` sends no buffer dense: it would have no momentum at all.

    Sources: Peng, Quesnelle, Kingma, DeMo: Decoupled Momentum Optimization, 2024, algorithm 1 (its transform and the
    sign are not part of this); Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025.

    Args:
        momentum: Momentum factor, in (0, 1). Memories should last two to four times as long as elements wait: 0.95 to
            0.975 serve a density of 10 %, 0.99 one of 2 % and less.

    Raises:
        ValueError: If ``momentum`` is outside (0, 1).
    """

    name: ClassVar[str] = "decoupled"
    shapes_updates = True
    lives_on_sparsity = True

    def __init__(self, momentum: float = 0.9) -> None:
        if not 0 < momentum < 1:
            raise ValueError(f'momentum must be in (0, 1), got {momentum}; memory="none" has none')
        super().__init__(decay=momentum)

    @property
    def momentum(self) -> float:
        """The momentum factor."""
        return self.decay


class AutoMemory(ResidualMemory):
    """A residual, which is the optimizer's momentum as well where that has been measured to lose less accuracy.

    :func:`lightning_safusion.integration.optimizer.carried_momentum` says where. The optimizer's own momentum is off
    then for sparse tensors, as with :class:`DecoupledMomentum`, and on for dense ones.
    """

    name: ClassVar[str] = "auto"

    def __init__(self) -> None:
        super().__init__()

    def bind(self, edges: Sequence[int], device: torch.device, world_size: int = 1) -> None:
        super().bind(edges, device, world_size)
        self.carry(None)

    def carry(self, momentum: float | None) -> None:
        """Multiplies the residual by a momentum factor in every step; None keeps it."""
        self.decay = 1.0 if momentum is None else momentum
        self.conserves = momentum is None


class NoMemory(Memory):
    """No error feedback: elements are selected from the gradients of the current window alone.

    The first gradient after a commit begins a new window. A tensor without a gradient in it reads as zeros.
    """

    name: ClassVar[str] = "none"
    conserves = False
    vectors = ("gradients",)
    pending = "gradients"

    @property
    def holds(self) -> bool:
        return False

    def bind(self, edges: Sequence[int], device: torch.device, world_size: int = 1) -> None:
        super().bind(edges, device, world_size)
        self._filled: set[int] = set()
        self._ended = False

    def compensate(self, ids: Sequence[int], grads: Sequence[Tensor], dense: Sequence[bool], norms: Tensor) -> None:
        if self._ended and self._filled:
            torch._foreach_zero_(self._pending.of(sorted(self._filled)))
            self._filled = set()
        self._ended = False
        # Copied, not added: the gradients of a window that was not committed are still there.
        torch._foreach_copy_(self._pending.of(ids), list(grads))
        self._filled.update(ids)

    def commit(self, start: int, indices: Tensor, sent: Tensor) -> None:
        self._ended = True

    def commit_dense(self, start: int, stop: int, sent: Tensor) -> None:
        self._ended = True

    def withdraw(self, tensor: int, grad: Tensor) -> None:
        self._pending.views[tensor].zero_()

    def add(self, start: int, stop: int, error: Tensor) -> None:
        """Forgets the error, as everything else."""

    def permute(self, order: Sequence[int], edges: Sequence[int]) -> None:
        super().permute(order, edges)
        self._filled = {place for place, old in enumerate(order) if old in self._filled}

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Has nothing to restore."""


#: By the names that ``memory`` takes.
MEMORIES: dict[str, type[Memory]] = {
    memory.name: memory for memory in (AutoMemory, ResidualMemory, DecoupledMomentum, DGCMemory, EF21Memory, NoMemory)
}
_REGISTRY: Registry[Memory] = Registry("memory", Memory, MEMORIES, "memories", "a Memory")


def resolve_memory(spec: str | Memory) -> Memory:
    """Builds a memory from its name ("auto", "residual", "decoupled", "dgc", "ef21", "none", or one that an installed
    package adds); others are returned.

    Errors are those of :meth:`Registry.resolve`.
    """
    return _REGISTRY.resolve(spec)

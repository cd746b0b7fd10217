"""Error feedback: the contract of memories, which keep the residual."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.kernels.cpu import Added, Message, Parts, Wanted, rearranged, zeros

_KEPT_LISTS = 4  # windows whose lists of tensors are kept; each tensor is in one list per window


class Memory(ABC):
    """Flat fp32 vectors over the whole gradient space, in the order in which gradients become ready.

    Tensor ``i`` of the layout owns ``[edges[i], edges[i + 1])``. In a window :meth:`compensate` adds fresh, finite
    gradients, elements are selected from :meth:`accumulated`, and :meth:`commit` subtracts what was sent once the
    exchange has succeeded on all ranks. A window with an overflow is not committed: what was sent is still there.

    A subclass names its vectors, and overrides what does not fit. Nothing is allocated before :meth:`bind`.
    """

    name: ClassVar[str]
    #: Names of the vectors, as in checkpoints.
    vectors: ClassVar[tuple[str, ...]]
    #: The vector from which elements are selected.
    pending: ClassVar[str]
    #: sum over steps of world_size * update + sum over ranks of residuals == sum of all gradients
    conserves: bool
    #: Its momentum, or what it passes to the optimizer, is part of the algorithm at density 1 too: no gradient may
    #: bypass it.
    shapes_updates: ClassVar[bool] = False
    #: Dense buffers bypass this memory, so that ``collective="auto"`` never picks dense.
    lives_on_sparsity: ClassVar[bool] = False
    #: :meth:`received` returns the mean as it is, so that it may be written straight into the gradients.
    hands_on: ClassVar[bool] = True
    #: :meth:`settle` does something.
    settles: ClassVar[bool] = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.hands_on, cls.settles = cls.received is Memory.received, cls.settle is not Memory.settle

    def bind(self, edges: Sequence[int], device: torch.device, world_size: int = 1) -> None:
        """Allocates zero state for a layout and a number of workers; forgets any earlier one."""
        self.world_size = world_size
        self._flats = {name: Flat(edges, device) for name in self.vectors}
        self._pending = self._flats[self.pending]

    def views(self, ids: Sequence[int], vector: str | None = None) -> list[Tensor]:
        """float32 views of tensors in a vector, for a subclass to change.

        Args:
            ids: Positions in the layout.
            vector: One of :attr:`vectors`; :attr:`pending` by default.
        """
        return self._flats[vector or self.pending].of(ids)

    @abstractmethod
    def compensate(self, ids: Sequence[int], grads: Sequence[Tensor], dense: Sequence[bool], norms: Tensor) -> None:
        """Adds fresh, finite gradients to the state.

        Args:
            ids: Positions in the layout.
            grads: Flat gradients, any floating dtype, one per id; not changed.
            dense: Whether each is dense in this window.
            norms: float32 [len(ids)], Euclidean norms of the gradients (known from the finiteness test).
        """

    def compensate_finite(
        self, ids: Sequence[int], grads: Sequence[Tensor], wanted: Wanted | None = None, cut: Parts | None = None
    ) -> Added | None:
        """:meth:`compensate` for gradients that may not be finite, in one pass that also looks for elements and sums.

        Args:
            wanted: What to look for in the new memory, with a floor for each id.
            cut: These tensors, cut into parts with a floor each; positions count from the first tensor.

        Returns:
            Which gradients were left out, and what was found; None if this memory or device has no such pass.
        """
        return None

    def accumulated(self, start: int, stop: int) -> Tensor:
        """float32 view of the elements ``[start, stop)`` of the flat space: what selection reads, never writes."""
        return self._pending.data[start:stop]

    def commit(self, start: int, indices: Tensor, sent: Tensor) -> None:
        """Subtracts what was sent from the state.

        Args:
            start: First element of the span in the flat space.
            indices: int64 [K] positions in the span (padding has ``sent`` 0 and must do no harm).
            sent: float32 [K] values as the receivers decoded them, so that rounding on the wire stays in the state.
        """
        # An addition, not an assignment: padding may repeat the index of an element that was sent.
        self._pending.data[start:].index_add_(0, indices, sent, alpha=-1)

    @property
    def holds(self) -> bool:
        """Whether anything waits to be sent. Reads the device."""
        return bool(self._pending.data.any())

    def commit_message(self, start: int, stop: int, message: Message) -> bool:
        """:meth:`commit` of a message of the span ``[start, stop)``, which takes less memory.

        Returns:
            Whether that was done; if not, call :meth:`commit`.
        """
        return False

    def commit_dense(self, start: int, stop: int, sent: Tensor) -> None:
        """The same for a dense piece; ``sent`` is float32 [stop - start] as decoded."""
        self._pending.data[start:stop] -= sent

    @abstractmethod
    def withdraw(self, tensor: int, grad: Tensor) -> None:
        """Subtracts an uncommitted gradient of this window again (it bypasses the memory)."""

    def add(self, start: int, stop: int, error: Tensor) -> None:
        """Adds a rounding error (float32 [stop - start]) of the decoded mean, the same on all ranks."""
        self._pending.data[start:stop] += error

    def received(self, start: int, stop: int, mean: Tensor) -> Tensor:
        """What the optimizer gets for ``[start, stop)``, from the decoded mean over ranks (floating [N], not changed).

        Returns:
            Floating [N], valid until :meth:`settle` or the next call for these elements.
        """
        return mean

    def settle(self, start: int, stop: int, good: Tensor | None = None) -> None:
        """Keeps what :meth:`received` has returned for ``[start, stop)``; called once the window has succeeded.

        Where the host does not know that it has, ``good`` (bool on the device) says so.
        """
        return  # most memories keep nothing that all ranks have received

    def beyond(self, limit: float, start: int, stop: int) -> Tensor | None:
        """Which elements of the span ``[start, stop)`` have state that is NaN or larger than a limit.

        Waits for the device. Not called in ordinary windows.

        Returns:
            bool [stop - start]; None if there is none.
        """
        found = None
        for state in self.state_dict().values():
            part = state[start:stop]
            if not float(torch.linalg.vector_norm(part, math.inf)) <= limit:
                beyond = ~(part.abs() <= limit)
                found = beyond if found is None else found | beyond
        return found

    def clear(self, start: int, mask: Tensor) -> None:
        """Zeroes the state of some elements (bool [N]) of the span that begins at ``start``."""
        for state in self.state_dict().values():
            state[start : start + len(mask)].masked_fill_(mask, 0.0)

    def permute(self, order: Sequence[int], edges: Sequence[int]) -> None:
        """Moves the state to a new layout in which place ``j`` holds the tensor that was at place ``order[j]``."""
        for flat in self._flats.values():
            flat.permute(order, edges)

    def to_host(self) -> None:
        """Moves the state to the host's memory, where it can be saved; :meth:`bind` begins another one."""
        for flat in getattr(self, "_flats", {}).values():  # a memory of one's own may have other state
            flat.to_host()

    def state_dict(self) -> dict[str, Tensor]:
        """The flat state by name (``{"residual": float32[D]}``); references, not copies."""
        return {name: flat.data for name, flat in self._flats.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores flat state of the same layout."""
        for name, flat in self._flats.items():
            flat.load(state, name)


class _PartsOf(dict[Sequence[int], Parts | None]):
    """Parts of ascending tensors by their ids, a range or a tuple; None if one is empty. Kept for the next windows."""

    def __init__(self, edges: Sequence[int]) -> None:
        self._edges = np.asarray(edges, np.int64)

    def __missing__(self, ids: Sequence[int]) -> Parts | None:
        # other tensors may be missing in every window: the oldest lists make room
        while self and sum(map(len, self)) + len(ids) > _KEPT_LISTS * (len(self._edges) - 1):
            del self[next(iter(self))]
        places = np.asarray(ids, np.int64)
        starts, stops = self._edges[places], self._edges[places + 1]
        parts = self[ids] = Parts.of(starts, stops - starts) if (stops > starts).all() else None
        return parts


class Flat:
    """A flat fp32 vector with a view per tensor (``[edges[i], edges[i + 1])``), for one foreach call per buffer."""

    def __init__(self, edges: Sequence[int], device: torch.device) -> None:
        if device.type == "cpu":
            self._adopt(zeros(edges[-1], np.float32), edges)
        else:
            self._adopt(torch.zeros(edges[-1], dtype=torch.float32, device=device), edges)

    def _adopt(self, data: Tensor | np.ndarray, edges: Sequence[int]) -> None:
        self._memory, self._edges = data, edges
        self.data = data if isinstance(data, Tensor) else torch.from_numpy(data)
        self.parts = _PartsOf(edges)  #: by ids: where the tensors lie, as compiled kernels take it
        self.views = list(self.data.split([stop - start for start, stop in pairwise(edges)]))

    def of(self, ids: Sequence[int]) -> list[Tensor]:
        return [self.views[i] for i in ids]

    def permute(self, order: Sequence[int], edges: Sequence[int]) -> None:
        if isinstance(self._memory, np.ndarray):
            runs = [(self._edges[place], self._edges[place + 1]) for place in order]
            self._adopt(rearranged(self._memory, runs), edges)
        else:
            self._adopt(torch.cat([self.data[:0], *self.of(order)]), edges)

    def to_host(self) -> None:
        if not self.data.is_cpu:
            self._adopt(self.data.cpu(), self._edges)

    def load(self, state: dict[str, Any], name: str) -> None:
        value = state.get(name)
        if not isinstance(value, Tensor) or value.shape != self.data.shape:
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"the memory needs {name!r} as a vector of {self.data.numel()} elements, got {found}:"
                " the checkpoint was made with another memory or model"
            )
        self.data.copy_(value)


def as_float32(grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of 16 bits as float32: mixed types would drop out of the fused foreach kernels."""
    if all(grad.dtype == torch.float32 for grad in grads):
        return list(grads)
    wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    torch._foreach_copy_(wide, list(grads))
    return wide

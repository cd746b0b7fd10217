"""The units in which elements are compared: those of the gradient, or those of the optimizer's update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.kernels import cpu as native

#: Units in which elements are compared; ``"auto"``: those of the update where that has been measured to lose less.
SelectBy: TypeAlias = Literal["auto", "gradient", "update"]


class Moment(NamedTuple):
    """What an optimizer divides the gradient of one tensor by: ``sqrt(values) + epsilon``.

    Args:
        values: Floating, of any shape, in the memory order of the gradient.
        epsilon: Small and positive.
    """

    values: Tensor
    epsilon: float


#: The second moment of the tensor with a registration index; None if there is none (yet).
Moments: TypeAlias = Callable[[int], Moment | None]


class UpdateUnits:
    """Keys of elements: how far the optimizer would move them, up to a factor for each tensor.

    Adam's kind divides a gradient by the root of its second moment. What a tensor's elements have in common (bias
    correction, learning rate) is left out.

    Args:
        moments: Of the optimizer's state, which is the same on all ranks.
        device: Where elements live.
        least: Moments count as no less than this share of their mean over the tensor: those of elements that were never
            sent are zero.
    """

    def __init__(self, moments: Moments, device: torch.device, least: float = 0.0) -> None:
        self.moments, self.least = moments, least
        self._memory = torch.empty(0, device=device)

    def of(self, indices: Sequence[int], edges: Sequence[int], together: bool = False) -> SpanUnits | None:
        """The units of a span; None if its elements are compared as they are.

        Args:
            indices: Registration indices of its tensors (T).
            edges: T + 1, where they begin and end.
            together: Elements of different tensors are compared: all must be in the same units.
        """
        known = [self.moments(index) for index in indices]
        if not any(known) or (together and not all(known)):
            return None
        if len(self._memory) < edges[-1]:
            self._memory = self._memory.new_empty(edges[-1])
        return SpanUnits(known, edges, self.least, self._memory[: edges[-1]])


class SpanUnits:
    """The units of one span.

    Args:
        moments: Of its tensors (T); elements of one without are their own keys.
        edges: T + 1, where the tensors begin and end.
        least: See :class:`UpdateUnits`.
        keys: float32 [N]; :meth:`weigh` writes into it.
    """

    def __init__(self, moments: Sequence[Moment | None], edges: Sequence[int], least: float, keys: Tensor) -> None:
        self._moments = [None if each is None else Moment(_flat(each.values), each.epsilon) for each in moments]
        self._edges, self._least, self.keys = edges, least, keys

    def weights(self) -> native.Weights | None:
        """What compiled kernels take; None if they cannot read the moments."""
        known = [moment for moment in self._moments if moment is not None]
        if not native.serves(*(moment.values for moment in known), dtypes=native.FLOAT32):
            return None
        return native.Weights(
            np.array([0 if moment is None else moment.values.data_ptr() for moment in self._moments], np.int64),
            np.array([0.0 if moment is None else self._smallest(moment) for moment in self._moments], np.float32),
            np.array([0.0 if moment is None else moment.epsilon for moment in self._moments], np.float32),
        )

    def _smallest(self, moment: Moment) -> float | Tensor:
        return moment.values.mean(dtype=torch.float32) * self._least if self._least else 0.0

    def weigh(self, x: Tensor) -> Tensor:
        """Writes the keys of a span (float32 [N]), with the signs of its elements, and returns them."""
        weights = self.weights() if native.serves(x, self.keys) else None
        if weights is not None and len(x):
            # empty tensors have no part
            full = np.diff(self._edges) > 0
            each = native.Weights(*(run[full] for run in weights))
            native.weigh(x.numpy(), native.Parts.between(self._edges), each, self.keys.numpy())
            return self.keys
        for moment, start, stop in zip(self._moments, self._edges[:-1], self._edges[1:], strict=True):
            own, keys = x[start:stop], self.keys[start:stop]
            if moment is None:
                keys.copy_(own)
            elif stop > start:
                values = moment.values.float()
                if self._least:
                    values = values.clamp(min=self._smallest(moment))
                torch.div(own, _root(values).add_(moment.epsilon), out=keys)
        return self.keys


def _root(values: Tensor) -> Tensor:
    """The square root, float32; on the CPU rounded as kernels do, which PyTorch leaves to MKL."""
    return torch.from_numpy(np.sqrt(values.numpy())) if values.is_cpu else values.sqrt()


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor as a vector in the order of its memory; not a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))

"""The units in which elements are compared: those of the gradient, or those of the optimizer's update."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import is_
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.kernels import cpu as native


class Moment(NamedTuple):
    """What an optimizer divides the gradient of one tensor by: ``sqrt(values) + epsilon``."""

    values: Tensor  #: floating, flat, in the memory order of the gradient
    epsilon: float  #: small and positive


#: The second moments of the tensors with some registration indices; None for one that has none (yet).
Moments: TypeAlias = Callable[[Sequence[int]], Sequence[Moment | None]]


class UpdateUnits:
    """Keys of elements: how far the optimizer would move them, up to a factor for each tensor.

    Adam's kind divides a gradient by the root of its second moment. What a tensor's elements have in common (bias
    correction, learning rate) is left out.

    Args:
        moments: Of the optimizer's state, which is the same on all ranks.
        device: Where elements live.
    """

    def __init__(self, moments: Moments, device: torch.device) -> None:
        self.moments = moments
        self._memory = torch.empty(0, dtype=torch.float32, device=device)
        self._spans: dict[int, SpanUnits] = {}  # the latest, by the index of their first tensor

    def of(self, indices: Sequence[int], edges: Sequence[int], together: bool = False) -> SpanUnits | None:
        """The units of a span; None if its elements are compared as they are.

        Args:
            indices: Registration indices of its tensors (T).
            edges: T + 1, where they begin and end.
            together: Elements of different tensors are compared: all must be in the same units.
        """
        known = self.moments(indices)
        if not any(known) or (together and not all(known)):
            return None
        if len(self._memory) < edges[-1]:
            self.release()
            self._memory = self._memory.new_empty(edges[-1])
        units = self._spans.get(indices[0])
        # those of a buffer, whose moments stay where they are, are the same in every step
        if units is None or units.edges is not edges or not all(map(is_, units.moments, known)):
            units = self._spans[indices[0]] = SpanUnits(known, edges, self._memory[: edges[-1]])
        return units

    def release(self) -> None:
        """Frees the memory of keys, which spans use in turn on the stream on which they are selected from."""
        self._memory, self._spans = self._memory.new_empty(0), {}


class SpanUnits:
    """The units of one span.

    Args:
        moments: Of its tensors (T); elements of one without are their own keys.
        edges: T + 1, where the tensors begin and end.
        keys: float32 [N]; :meth:`weigh` writes into it, or kernels do.
    """

    def __init__(self, moments: Sequence[Moment | None], edges: Sequence[int], keys: Tensor) -> None:
        self.moments, self.edges, self.keys = moments, edges, keys

    def within(self, runs: Sequence[tuple[int, int]]) -> SpanUnits:
        """The units of parts of the span (where they begin and end), put one behind the other."""
        moments, edges = [], [0]
        for begin, end in runs:
            start = begin
            while start < end:
                tensor = bisect_right(self.edges, start) - 1
                moment, first = self.moments[tensor], start - self.edges[tensor]
                stop = min(end, self.edges[tensor + 1])
                part = None if moment is None else Moment(moment.values[first : first + stop - start], moment.epsilon)
                moments.append(part)
                edges.append(edges[-1] + stop - start)
                start = stop
        return SpanUnits(moments, edges, self.keys.new_empty(edges[-1]))

    @cached_property
    def weights(self) -> native.Weights | None:
        """What compiled kernels take; None if they cannot read the moments."""
        number = len(self.moments)
        known, places, epsilons = [], np.zeros(number, np.int64), np.zeros(number, np.float32)
        for tensor, moment in enumerate(self.moments):
            if moment is not None:
                known.append(moment.values)
                places[tensor], epsilons[tensor] = moment.values.data_ptr(), moment.epsilon
        return native.Weights(places, epsilons) if native.serves(*known, dtypes=native.FLOAT32) else None

    def weigh(self, x: Tensor) -> Tensor:
        """Writes the keys of a span (float32 [N]), with the signs of its elements, and returns them."""
        weights = self.weights if native.serves(x, self.keys) else None
        if weights is not None and len(x):
            # empty tensors have no part
            full = np.diff(self.edges) > 0
            each = native.Weights(*(run[full] for run in weights))
            native.weigh(x.numpy(), native.Parts.between(self.edges), each, self.keys.numpy())
            return self.keys
        pieces = self.keys.copy_(x).split(np.diff(self.edges).tolist())
        known = [(moment, keys) for moment, keys in zip(self.moments, pieces, strict=True) if moment is not None]
        if not known:  # parts of a span may have none
            return self.keys
        roots = _roots([moment.values.float() for moment, _ in known])
        torch._foreach_add_(roots, [moment.epsilon for moment, _ in known])
        torch._foreach_div_([keys for _, keys in known], roots)
        return self.keys


def _roots(values: list[Tensor]) -> list[Tensor]:
    """Square roots, float32; on the CPU rounded as kernels do, which PyTorch leaves to MKL."""
    if values[0].is_cpu:
        return [torch.from_numpy(np.sqrt(each.numpy())) for each in values]
    return list(torch._foreach_sqrt(values))

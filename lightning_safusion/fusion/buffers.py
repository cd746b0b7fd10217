"""The persistent buffer of a group of tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import Exchange, TensorFlag
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.fusion.plans.plan import Group
from lightning_safusion.literal import first_of
from lightning_safusion.recent import Recent
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.memory.contract import Memory
from lightning_safusion.sparsify.selection.survey import Foresight, History, Selector
from lightning_safusion.sparsify.selection.units import SpanUnits
from lightning_safusion.sparsify.selection.view import device_constant

T = TypeVar("T")
_ABSENCES = 2  # cuts without absent tensors that are kept


@dataclass(eq=False)
class Buffer:
    """A group's tensors, their span of the residual, and their collective.

    What happens to it in one window is a :class:`~lightning_safusion.fusion.shipment.Shipment`.
    """

    group: Group  #: places of its tensors
    layout: InitVar[Layout]
    memory: Memory  #: error feedback; the buffer is a span of it
    segments: Segments | None  #: cut for selection; None if all tensors are dense
    exchange: Exchange  #: its collective
    dense: np.ndarray  #: bool [T], dense tensors
    fused: bool  #: elements are selected from the fused span, not from each tensor

    def __post_init__(self, layout: Layout) -> None:
        group = self.group
        self.device = self.exchange.device
        self.places = range(group.start, group.stop)
        self.start, self.stop = int(layout.edges[group.start]), int(layout.edges[group.stop])
        #: float32 [N]: its part of the residual, with the gradients that have been added. Read, never written.
        self.span = self.memory.accumulated(self.start, self.stop)
        self.edges = self.exchange.spec.edges
        #: The same as an array; other integers would be converted in every search.
        kinds = (np.int32, np.int64) if self.edges[-1] < 2**31 else (np.int64,)
        self.edges_as = {np.dtype(kind): np.array(self.edges, kind) for kind in kinds}
        self.sizes: list[int] = np.diff(self.edges).tolist()
        self.names = layout.names(self.places)
        self.indices = layout.indices[group.start : group.stop].tolist()  #: registration indices
        self.each_dtype = tuple(spec.dtype for spec in layout.specs[group.start : group.stop])
        self.dtypes = frozenset(self.each_dtype)
        #: Elements of different tensors are compared.
        self.mixed = self.fused or (self.segments is not None and self.segments.pool > 0)
        #: Gradients have fewer bits than the residual, so that a mean may not fit.
        self.narrow = any(dtype.itemsize < 4 for dtype in self.dtypes)
        #: All gradients are float32, as the residual is.
        self.exact = self.dtypes == {torch.float32}
        self.dense_pieces = [(start, stop) for start, stop, _ in self.exchange.spec.dense_runs]
        self.history = None if self.segments is None else History(self.segments)
        self._constants: dict[Hashable, Any] = {}
        #: Cuts without tensors that were absent: each has constants on the device.
        self._absences = Recent[tuple[int, ...], History](_ABSENCES)

    @cached_property
    def all_fresh(self) -> Tensor:
        """uint8 [T]: the flags of almost every step."""
        return device_constant(np.full(len(self.places), int(TensorFlag.FRESH), np.uint8), self.device)

    @cached_property
    def foresight(self) -> Foresight | None:
        """Finds elements while gradients are added; None where nothing is selected from what is in host memory."""
        if self.history is None or self.exchange.ability.selects_itself or self.device.type != "cpu":
            return None
        return Foresight(self.history, self.edges)

    @cached_property
    def title(self) -> str:
        """Names of its first tensors."""
        return first_of(self.names)

    def select(
        self,
        selector: Selector,
        step: int,
        absent: Sequence[int],
        early: Sequence[int],
        units: SpanUnits | None = None,
    ) -> Selection | None:
        """Selects from the span; None if there is nothing to select from.

        Args:
            absent: Tensors of which nothing is sent.
            early: Tensors from which the offloader selects.
            units: Elements are compared in these; None: as they are.
        """
        history, x = self.history, self.span
        if history is None or self.exchange.ability.selects_itself:
            return None
        if absent and self.fused:
            x = x.clone()
            for tensor in absent:  # a fused segment cannot be skipped in part
                x[self.edges[tensor] : self.edges[tensor + 1]] = 0
        elif absent or early:
            history = self._without(history, absent, early)
            if early and not history.segments.capacity:
                return None
        return selector.select(x, history, step, units=units)

    def cut(self, absent: Sequence[int]) -> Segments | None:
        """:attr:`segments` without tensors of which nothing is sent."""
        return self._without(self.history, absent, ()).segments if absent and self.history else self.segments

    def _without(self, history: History, absent: Sequence[int], early: Sequence[int]) -> History:
        """The cut without these tensors: that without early ones alone is the same in every step, and steps of several
        optimizers take turns with few cuts."""

        def cut() -> History:
            skip = np.zeros(len(self.sizes), bool)
            skip[[*absent, *early]] = True
            if self.exchange.ability.cuts_tensors:
                starts = history.segments.edges[:-1]
                # an empty tensor at the end begins where no tensor does
                skip = skip[np.minimum(np.searchsorted(self.edges, starts, side="right"), len(skip)) - 1]
            return History(history.segments.skipping(skip))

        if not absent:
            return self.constant(("without", *sorted(early)), cut)
        return self._absences.get(tuple(sorted({*absent, *early})), cut)

    def constant(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value that ``make`` returns, made once for each key."""
        if key not in self._constants:
            self._constants[key] = make()
        value: T = self._constants[key]
        return value

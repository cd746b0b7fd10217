"""The persistent buffers of a job, each with the collective that carries it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import astuple
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.catalogue import COLLECTIVES, Collective, Communicators, SparseBuffer
from lightning_safusion.comm.collectives.allreduce import DenseAllReduce
from lightning_safusion.comm.collectives.negotiated import Stream, StreamedTensor
from lightning_safusion.comm.exchange import Exchange, SpanSpec, TensorFlag
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.comm.wire.formats import value_format
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.fusion.plans.plan import Group
from lightning_safusion.fusion.quota import QuotaRule, Scope, TensorQuotas, group_segments, selective_quotas
from lightning_safusion.sparsify.base import Segments
from lightning_safusion.sparsify.memory.contract import Memory
from lightning_safusion.sparsify.selection.survey import Foresight, History
from lightning_safusion.sparsify.selection.view import device_constant


class Buffer:
    """One group's persistent buffer: its tensors, their place in the residual, and its collective.

    What happens to it in one window is a :class:`~lightning_safusion.fusion.shipment.Shipment`.

    Args:
        group: Places of its tensors.
        layout: The flat gradient space.
        memory: Error feedback; the buffer is a span of it.
        segments: Cut for selection; None if it is dense.
        exchange: Its collective.
        dense: bool [T], dense tensors.
        fused: Elements are selected from the fused span, not from each tensor.
    """

    def __init__(
        self,
        group: Group,
        layout: Layout,
        memory: Memory,
        segments: Segments | None,
        exchange: Exchange,
        dense: np.ndarray,
        fused: bool,
    ) -> None:
        self.group = group
        self.memory = memory
        self.exchange = exchange
        self.device = exchange.device
        self.dense = dense
        self.fused = fused
        self.places = range(group.start, group.stop)
        self.start, self.stop = int(layout.edges[group.start]), int(layout.edges[group.stop])
        #: float32 [N]: its part of the residual, with the gradients that have been added. Read, never written.
        self.span = memory.accumulated(self.start, self.stop)
        self.edges = exchange.spec.edges
        self.sizes: list[int] = np.diff(self.edges).tolist()
        self.names = layout.names(self.places)
        self.dtypes = frozenset(spec.dtype for spec in layout.specs[group.start : group.stop])
        #: Gradients have fewer bits than the memory, so that a mean may not fit.
        self.narrow = any(dtype.itemsize < 4 for dtype in self.dtypes)
        #: All gradients are what the memory holds, float32.
        self.exact = self.dtypes == {torch.float32}
        self.dense_pieces = [(start, stop) for start, stop, _ in exchange.spec.dense_runs]
        self.history = None if segments is None else History(segments)
        self.constants: dict[Hashable, Any] = {}

    @property
    def segments(self) -> Segments | None:
        """How it is cut for selection; None if it is dense."""
        return None if self.history is None else self.history.segments

    @cached_property
    def all_fresh(self) -> Tensor:
        """uint8 [T]: the flags of almost every step."""
        return device_constant(np.full(len(self.places), int(TensorFlag.FRESH), np.uint8), self.device)

    @cached_property
    def foresight(self) -> Foresight | None:
        """Finds elements while gradients are added; None where nothing is selected from what is in host memory."""
        if self.history is None or self.exchange.selects_itself or self.device.type != "cpu":
            return None
        return Foresight(self.history, self.edges)


class BufferPool:
    """Builds the buffers of groups and keeps them.

    Args:
        memory: Error feedback, bound to the layout.
        communicators: What buffers are exchanged over.
        device: Where they live.
        scope: ``"tensor"`` selects before fusion, ``"group"`` after it.
        quota: ``"proportional"`` or ``"pooled"``.
        wire: Wire format by name.
        stream_transport: A communicator of its own for buffers that fill at each worker's own pace; only they need it.
        stream_elements: Entries that such a buffer holds.
        collective: Carries the buffers that are not dense.

    Attributes:
        buffers: Those that are kept.
    """

    def __init__(
        self,
        memory: Memory,
        communicators: Communicators,
        device: torch.device,
        scope: Scope = "tensor",
        quota: QuotaRule = "proportional",
        wire: str = "auto",
        stream_transport: Transport | None = None,
        stream_elements: int = 65536,
        collective: Collective = COLLECTIVES["allgather"],
    ) -> None:
        self.memory = memory
        self.communicators = communicators
        self.transport = communicators.main
        self.device = device
        self.scope = scope
        self.quota = quota
        self.wire = wire
        self.stream_elements = stream_elements
        self.collective = collective
        self._stream_transport = stream_transport
        self.buffers: dict[Group, Buffer] = {}
        self._restored: dict[Group, dict[str, Any]] = {}  # state of exchanges that are not built yet
        self._stream: Stream | None = None

    def keep_only(self, groups: Sequence[Group]) -> None:
        """Forgets the buffers of groups that no plan uses any more."""
        self.buffers = {group: buffer for group, buffer in self.buffers.items() if group in groups}
        self._restored = {group: state for group, state in self._restored.items() if group in groups}

    def forget(self) -> None:
        """Forgets all buffers: their shapes have changed, or an abandoned collective may still write into them."""
        self.buffers.clear()
        self._restored.clear()
        self._stream = None

    def state_dict(self) -> list[list[Any]]:
        """``[fields of the group, state]`` of each exchange that has learnt something, the same on all ranks."""
        states = self._restored | {group: buffer.exchange.state_dict() for group, buffer in self.buffers.items()}
        return [[list(astuple(group)), state] for group, state in states.items() if state]

    def load_state_dict(self, states: Iterable[Sequence[Any]]) -> None:
        """Forgets all buffers; those that are built anew go on with what :meth:`state_dict` returned."""
        self.forget()
        self._restored = {Group(*fields): state for fields, state in states}

    def build(self, group: Group, layout: Layout, quotas: TensorQuotas) -> Buffer:
        """Builds the buffer of a group, and keeps it until :meth:`forget`: a new layout or new quotas call for that."""
        selective = selective_quotas(layout, quotas, group.start, group.stop, group.dense_upto)
        start, stop = int(layout.edges[group.start]), int(layout.edges[group.stop])
        edges = tuple(int(e) - start for e in layout.edges[group.start : group.stop + 1])
        reduce = group.collective == "allreduce"
        dense = np.ones(group.stop - group.start, bool) if reduce else selective.dense[group.start : group.stop]
        segments = None
        if not dense.all():
            segments = group_segments(layout, selective, group.start, group.stop, self.scope, self.quota)
        runs = dense_runs(layout, group, edges, dense)
        spec = SpanSpec(stop - start, segments.capacity if segments else 0, edges, runs)
        if group.collective == "stream":
            exchange: Exchange = StreamedTensor(spec, self._opened_stream(layout, quotas), group.start)
        else:
            dtypes = {spec.dtype for spec in layout.specs[group.start : group.stop]}
            exchange = self._exchange(group, spec, segments, dtypes)
        if group in self._restored:
            exchange.load_state_dict(self._restored.pop(group))
        buffer = Buffer(group, layout, self.memory, segments, exchange, dense, self.scope == "group")
        self.buffers[group] = buffer
        return buffer

    def _exchange(self, group: Group, spec: SpanSpec, segments: Segments | None, dtypes: set[torch.dtype]) -> Exchange:
        if group.collective == "allreduce":
            return DenseAllReduce(spec, self.transport, self.device, group.half)
        dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
        return self.collective.build(SparseBuffer(spec, self.device, self.wire, dtype, segments), self.communicators)

    def _opened_stream(self, layout: Layout, quotas: TensorQuotas) -> Stream:
        """The one stream of all buffers that fill at each worker's own pace."""
        if self._stream is None:
            if self._stream_transport is None:
                raise ValueError("buffers that fill at each worker's own pace need a stream_transport")
            # a buffer that can never be full would only carry padding
            capacity = min(self.stream_elements, max(1, int(quotas.counts.sum())))
            self._stream = Stream(self._stream_transport, layout.edges, capacity, value_format(self.wire), self.device)
        return self._stream


def dense_runs(
    layout: Layout, group: Group, edges: tuple[int, ...], dense: np.ndarray
) -> tuple[tuple[int, int, torch.dtype], ...]:
    """Neighbouring dense tensors of one dtype, merged."""
    tensors = [(bool(dense[i]), layout.specs[group.start + i].dtype) for i in range(len(dense))]
    runs = []
    for (whole, dtype), members in groupby(range(len(dense)), key=lambda i: tensors[i]):
        ids = list(members)
        if whole and edges[ids[-1] + 1] > edges[ids[0]]:
            runs.append((edges[ids[0]], edges[ids[-1] + 1], dtype))
    return tuple(runs)

"""The persistent buffers of a job, each with the collective that carries it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import torch

from lightning_safusion.comm.allgather import SparseAllGather
from lightning_safusion.comm.allreduce import DenseAllReduce
from lightning_safusion.comm.exchange import Exchange, SpanSpec
from lightning_safusion.comm.gtopk import GTopKExchange
from lightning_safusion.comm.hierarchical import HierarchicalExchange, NodeTransports
from lightning_safusion.comm.hybrid import HybridExchange
from lightning_safusion.comm.oktopk import OkTopkExchange
from lightning_safusion.comm.stream import Stream, StreamedTensor
from lightning_safusion.comm.transport import Transport
from lightning_safusion.comm.wire import resolve_codec
from lightning_safusion.fusion.buffer import FusionBuffer, dense_runs
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.fusion.plans.plan import Group, SparseName
from lightning_safusion.fusion.quota import QuotaRule, Scope, TensorQuotas, group_segments, selective_quotas
from lightning_safusion.sparsify.base import Segments


class BufferPool:
    """Builds the buffer of a group when it is first asked for, and keeps it.

    Args:
        transport: Communicator of the buffers.
        device: Where they live.
        scope: ``"tensor"`` selects ahead of fusion, ``"group"`` behind it.
        quota: ``"proportional"`` or ``"pooled"``.
        wire: Wire format by name.
        stream_transport: A communicator of its own for buffers that fill at each worker's own pace; only they need it.
        stream_elements: Entries that such a buffer holds.
        sparse: What carries the buffers that a plan sends by all-gather.
        dense_transport: A communicator of its own for what travels whole; only ``sparse="hybrid"`` needs it.
        nodes: Communicators inside and between nodes; only ``sparse="hierarchical"`` needs them.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        scope: Scope = "tensor",
        quota: QuotaRule = "proportional",
        wire: str = "auto",
        stream_transport: Transport | None = None,
        stream_elements: int = 65536,
        sparse: SparseName = "allgather",
        dense_transport: Transport | None = None,
        nodes: NodeTransports | None = None,
    ) -> None:
        self.transport = transport
        self.device = device
        self.scope = scope
        self.quota = quota
        self.wire = wire
        self.stream_elements = stream_elements
        self.sparse = sparse
        self.nodes = nodes
        self._stream_transport = stream_transport
        self._dense_transport = dense_transport
        self._buffers: dict[Group, FusionBuffer] = {}
        self._restored: dict[Group, dict[str, Any]] = {}  # state of exchanges that are not built yet
        self._stream: Stream | None = None

    def __len__(self) -> int:
        """Buffers that are kept."""
        return len(self._buffers)

    def buffer(self, group: Group, layout: Layout, quotas: TensorQuotas) -> FusionBuffer:
        """The buffer of a group; the same one until :meth:`forget`, which a new layout or new quotas call for."""
        if group not in self._buffers:
            self._buffers[group] = self._build(group, layout, quotas)
        return self._buffers[group]

    def keep_only(self, groups: Sequence[Group]) -> None:
        """Forgets the buffers of groups that no plan uses any more."""
        self._buffers = {group: buffer for group, buffer in self._buffers.items() if group in groups}
        self._restored = {group: state for group, state in self._restored.items() if group in groups}

    def forget(self) -> None:
        """Forgets all buffers: their shapes have changed, or an abandoned collective may still write into them."""
        self._buffers.clear()
        self._restored.clear()
        self._stream = None

    def state_dict(self) -> list[list[Any]]:
        """``[fields of the group, state]`` of each exchange that has learnt something, the same on all ranks."""
        states = self._restored | {group: buffer.exchange.state_dict() for group, buffer in self._buffers.items()}
        return [[list(astuple(group)), state] for group, state in states.items() if state]

    def load_state_dict(self, states: Iterable[Sequence[Any]]) -> None:
        """Forgets all buffers; those that are built anew go on with what :meth:`state_dict` returned."""
        self.forget()
        self._restored = {Group(*fields): state for fields, state in states}

    def _build(self, group: Group, layout: Layout, quotas: TensorQuotas) -> FusionBuffer:
        selective = selective_quotas(layout, quotas, group.start, group.stop, group.whole_upto)
        start, stop = int(layout.edges[group.start]), int(layout.edges[group.stop])
        edges = tuple(int(e) - start for e in layout.edges[group.start : group.stop + 1])
        reduce = group.collective == "allreduce"
        dense = np.ones(group.stop - group.start, bool) if reduce else selective.dense[group.start : group.stop]
        segments = None
        if not dense.all():
            segments = group_segments(layout, selective, group.start, group.stop, self.scope, self.quota)
        runs = dense_runs(layout, group, edges, dense)
        spec = SpanSpec(stop - start, segments.capacity if segments else 0, edges, runs)
        dtypes = frozenset(spec.dtype for spec in layout.specs[group.start : group.stop])
        if group.collective == "stream":
            exchange: Exchange = StreamedTensor(spec, self._opened_stream(layout, quotas), group.start)
        else:
            exchange = self._exchange(group, spec, segments, dtypes)
        if group in self._restored:
            exchange.load_state_dict(self._restored.pop(group))
        return FusionBuffer(group, start, stop, segments, exchange, dense, dtypes)

    def _exchange(
        self, group: Group, spec: SpanSpec, segments: Segments | None, dtypes: frozenset[torch.dtype]
    ) -> Exchange:
        if group.collective == "allreduce":
            return DenseAllReduce(spec, self.transport, self.device, group.half)
        dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
        if self.sparse == "oktopk":
            return OkTopkExchange(spec, self.transport, self.device, self.wire, dtype)
        if self.sparse == "hierarchical":
            if self.nodes is None:
                raise ValueError("collective='hierarchical' needs communicators of nodes")
            return HierarchicalExchange(spec, self.nodes, self.device, self.wire, dtype, segments=segments)
        codec = resolve_codec(self.wire, spec.numel, spec.capacity, dtype, spec.edges) if spec.capacity else None
        if self.sparse == "gtopk":
            return GTopKExchange(spec, self.transport, self.device, codec)
        if self.sparse == "hybrid" and spec.dense_runs:
            if self._dense_transport is None:
                raise ValueError("a lane for what travels whole needs a dense_transport")
            if codec is None:
                return DenseAllReduce(spec, self._dense_transport, self.device)
            return HybridExchange(spec, self.transport, self._dense_transport, self.device, codec)
        return SparseAllGather(spec, self.transport, self.device, codec)

    def _opened_stream(self, layout: Layout, quotas: TensorQuotas) -> Stream:
        """The one stream of all buffers that fill at each worker's own pace."""
        if self._stream is None:
            self._stream = self._open_stream(layout, quotas)
        return self._stream

    def _open_stream(self, layout: Layout, quotas: TensorQuotas) -> Stream:
        if self._stream_transport is None:
            raise ValueError("buffers that fill at each worker's own pace need a stream_transport")
        dtype = resolve_codec(self.wire, layout.numel, 1, torch.float32).value_dtype
        # a buffer that can never be full would only carry padding
        capacity = min(self.stream_elements, max(1, int(quotas.counts.sum())))
        return Stream(self._stream_transport, layout.edges, capacity, dtype, self.device)

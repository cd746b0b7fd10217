"""The flat gradient space of a job: order, quotas, residual and buffers of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.catalogue import Collective, Communicators, SparseBuffer
from lightning_safusion.comm.collectives.allreduce import DenseAllReduce
from lightning_safusion.comm.collectives.negotiated import Stream, StreamedTensor
from lightning_safusion.comm.exchange import Exchange, SpanSpec
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.comm.wire.formats import message_bytes, value_format
from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.fusion.plans.costs import JobShape
from lightning_safusion.fusion.plans.plan import Group
from lightning_safusion.fusion.quota import (
    QuotaRule,
    Scope,
    TensorQuotas,
    group_segments,
    selective_quotas,
    tensor_quotas,
)
from lightning_safusion.sparsify.base import Segments
from lightning_safusion.sparsify.memory.contract import Memory
from lightning_safusion.sparsify.schedule import check_density
from lightning_safusion.sparsify.selection.survey import Selector

# Elements of a buffer for which the bytes of an entry are computed: positions are written otherwise in longer ones.
_ENTRY_ELEMENTS = 1 << 24


class GradientSpace:
    """Layout, quotas and buffers, which change together when tensors change their order or the density changes.

    Args:
        layout: The tensors.
        memory: Error feedback, bound to the layout.
        selector: The compressor.
        communicators: Of the buffers.
        device: Where gradients live.
        collective: Carries the buffers that are not dense.
        scope: ``"tensor"`` selects before fusion, ``"group"`` after it.
        quota: ``"proportional"`` or ``"pooled"``.
        wire: Wire format by name.
        stream_transport: A communicator for buffers that each worker fills at its own pace; only they need it.
        stream_elements: Entries that such a buffer holds.

    Attributes:
        layout: The tensors in their present order.
        quotas: What each may send at the present density.
        buffers: Those that are kept, by group.
    """

    def __init__(
        self,
        layout: Layout,
        memory: Memory,
        selector: Selector,
        communicators: Communicators,
        device: torch.device,
        collective: Collective,
        scope: Scope,
        quota: QuotaRule,
        wire: str,
        stream_transport: Transport | None = None,
        stream_elements: int = 1,
    ) -> None:
        self.layout = layout
        self.memory = memory
        self.selector = selector
        self.device = device
        self.transport = communicators.main
        self.quotas: TensorQuotas = tensor_quotas(layout, selector.sparsifier, 1.0)
        self.buffers: dict[Group, Buffer] = {}
        self._communicators = communicators
        self._collective = collective
        self._scope = scope
        self._quota = quota
        self._wire = wire
        self._stream_transport = stream_transport
        self._stream_elements = stream_elements
        self._stream: Stream | None = None
        self._restored: dict[Group, dict[str, Any]] = {}  # state of exchanges that are not built yet

    @cached_property
    def shape(self) -> JobShape:
        """What planning knows of the job, in the order and at the density in force."""
        sizes, sparse = np.diff(self.layout.edges), ~self.quotas.dense
        entries, entry_bytes = int(self.quotas.counts[sparse].sum()), 0.0
        if entries:  # of a buffer with the mean density of the model
            numel = int(sizes[sparse].sum())
            scale = min(1.0, _ENTRY_ELEMENTS / numel)
            entries = max(1, int(entries * scale))
            entry_bytes = message_bytes(self._wire, max(1, int(numel * scale)), entries) / entries
        return JobShape(
            numels=tuple(sizes.tolist()),
            widths=tuple(spec.dtype.itemsize for spec in self.layout.specs),
            quotas=tuple(self.quotas.counts.tolist()),
            world_size=self.transport.world_size,
            entry_bytes=entry_bytes,
            hybrid=self._collective.dense_lane,
            device=str(self.device),
        )

    def accumulated(self) -> Tensor:
        """float32 [D]: what the error feedback holds of each element, in the order of ``layout``; not a copy."""
        return self.memory.accumulated(0, self.layout.numel)

    def holds_residual(self, transport: Transport) -> bool:
        """Whether the error feedback of some rank holds anything. Collective on this communicator."""
        held = any(bool(state.any()) for state in self.memory.state_dict().values())
        anywhere = torch.tensor([float(held)], device=self.device)
        transport.all_reduce(anywhere, "max").wait()
        return bool(anywhere.item())

    def set_density(self, density: float) -> None:
        """Sets the density of the next windows.

        Raises:
            TypeError: If it is not a number.
            ValueError: If it is outside (0, 1].
        """
        self._renew(check_density(density))

    def reorder(self, order: Sequence[int]) -> None:
        """Moves everything to a layout in which place ``j`` holds the tensor that was at place ``order[j]``."""
        self.layout = self.layout.reordered(order)
        self.memory.permute(order, self.layout.edges.tolist())
        self._renew(self.quotas.density)

    def _renew(self, density: float) -> None:
        self.quotas = tensor_quotas(self.layout, self.selector.sparsifier, density)
        self.__dict__.pop("shape", None)
        self._drop_buffers()

    def buffer(self, group: Group) -> Buffer:
        """The persistent buffer of a group, in the order and at the density in force."""
        if group not in self.buffers:
            self.buffers[group] = self._build(group)
        return self.buffers[group]

    def keep_only(self, groups: Iterable[Group]) -> None:
        """Drops the buffers of all other groups."""
        kept = set(groups)
        self.buffers = {group: buffer for group, buffer in self.buffers.items() if group in kept}
        self._restored = {group: state for group, state in self._restored.items() if group in kept}

    def exchange_state(self) -> list[list[Any]]:
        """``[fields of the group, state]`` of each exchange that has learnt something, the same on all ranks."""
        states = self._restored | {group: buffer.exchange.state_dict() for group, buffer in self.buffers.items()}
        return [[list(astuple(group)), state] for group, state in states.items() if state]

    def restore_exchanges(self, states: Iterable[Sequence[Any]]) -> None:
        """Drops all buffers; exchanges that are built anew start with what :meth:`exchange_state` returned."""
        self._drop_buffers()
        self._restored = {Group(*fields): state for fields, state in states}

    def _drop_buffers(self) -> None:
        """Their shapes have changed, or an abandoned collective may still write into them."""
        self.buffers.clear()
        self._restored.clear()
        self._stream = None

    def _build(self, group: Group) -> Buffer:
        layout, part = self.layout, slice(group.start, group.stop)
        quotas = selective_quotas(layout, self.quotas, group.start, group.stop, group.dense_upto)
        edges = layout.edges[group.start : group.stop + 1] - layout.edges[group.start]
        dense = np.ones(len(edges) - 1, bool) if group.collective == "allreduce" else quotas.dense[part]
        segments = None
        if not dense.all():
            segments = group_segments(layout, quotas, group.start, group.stop, self._scope, self._quota)
        dtypes = [spec.dtype for spec in layout.specs[part]]
        runs = _dense_runs(edges.tolist(), dense.tolist(), dtypes)
        spec = SpanSpec(int(edges[-1]), segments.capacity if segments else 0, tuple(edges.tolist()), runs)
        exchange = self._exchange(group, spec, segments, dtypes)
        if group in self._restored:
            exchange.load_state_dict(self._restored.pop(group))
        return Buffer(group, layout, self.memory, segments, exchange, dense, self._scope == "group")

    def _exchange(
        self, group: Group, spec: SpanSpec, segments: Segments | None, dtypes: Sequence[torch.dtype]
    ) -> Exchange:
        if group.collective == "allreduce":
            return DenseAllReduce(spec, self.transport, self.device, group.half)
        if group.collective == "stream":
            return StreamedTensor(spec, self._opened_stream(), group.start)
        dtype = dtypes[0] if len({*dtypes}) == 1 else torch.float32
        return self._collective.build(SparseBuffer(spec, self.device, self._wire, dtype, segments), self._communicators)

    def _opened_stream(self) -> Stream:
        """The one stream of all buffers that each worker fills at its own pace."""
        if self._stream is None:
            if self._stream_transport is None:
                raise ValueError("buffers that fill at each worker's own pace need a stream_transport")
            # a buffer that can never be full would only carry padding
            capacity = min(self._stream_elements, max(1, int(self.quotas.counts.sum())))
            values = value_format(self._wire)
            self._stream = Stream(self._stream_transport, self.layout.edges, capacity, values, self.device)
        return self._stream


def _dense_runs(
    edges: Sequence[int], dense: Sequence[bool], dtypes: Sequence[torch.dtype]
) -> tuple[tuple[int, int, torch.dtype], ...]:
    """Neighbouring dense tensors of one dtype, merged."""
    runs = []
    for (is_dense, dtype), members in groupby(range(len(dense)), key=lambda i: (dense[i], dtypes[i])):
        tensors = list(members)
        start, stop = edges[tensors[0]], edges[tensors[-1] + 1]
        if is_dense and stop > start:
            runs.append((start, stop, dtype))
    return tuple(runs)

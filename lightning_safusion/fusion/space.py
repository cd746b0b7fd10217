"""The flat gradient space of a job: order, quotas, residual and buffers of its tensors."""

from __future__ import annotations

import copy
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
from lightning_safusion.comm.transport.interface import Transport, during
from lightning_safusion.comm.wire.formats import message_bytes, value_format
from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.fusion.plans.costs import JobShape
from lightning_safusion.fusion.plans.plan import Group
from lightning_safusion.fusion.plans.policy import Naive
from lightning_safusion.fusion.quota import (
    LargestCounts,
    Shares,
    TensorQuotas,
    group_segments,
    selective_quotas,
    tensor_quotas,
)
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.lookup import QuotaRule
from lightning_safusion.sparsify.schedule import check_density
from lightning_safusion.sparsify.selection.survey import Selector
from lightning_safusion.sparsify.selection.units import UpdateUnits

# Elements of the buffer by which bytes of an entry are measured: positions in spans of billions have other formats.
_ENTRY_ELEMENTS = 1 << 24


class GradientSpace:
    """Layout, quotas and buffers, which change together when tensors change their order or the density changes.

    Args:
        settings: Of the engine; their memory is bound to the layout.
        collective, communicators: Of the buffers.
        device: Where gradients live.
        stream_transport: Of buffers that each worker fills at its own pace; only they need it.
    """

    def __init__(
        self,
        layout: Layout,
        settings: EngineSettings,
        collective: Collective,
        communicators: Communicators,
        device: torch.device,
        stream_transport: Transport | None = None,
    ) -> None:
        self.layout = layout  #: the tensors in their present order
        self.memory = settings.memory
        # a copy of the compressor: what it learns belongs to this job
        self.selector = Selector(copy.deepcopy(settings.compressor))
        self.device = device
        self.transport = communicators.main
        self.quotas = tensor_quotas(layout, self.selector.sparsifier, 1.0)  #: what each may send at the present density
        self.buffers: dict[Group, Buffer] = {}  #: those that are kept
        self._settings = settings
        self._rule: QuotaRule = "shared" if settings.quota == "auto" else settings.quota
        self.shares = Shares()  #: of shared quotas
        self._counts: LargestCounts | None = None  # what this rank says in a review of them
        self.collective = collective
        self._communicators = communicators
        self._stream_transport = stream_transport
        self._stream: Stream | None = None
        self._restored: dict[Group, dict[str, Any]] = {}  # state of exchanges that are not built yet

    @cached_property
    def shape(self) -> JobShape:
        """What planning gets of the job, in the order and at the density in force."""
        sizes, sparse = np.diff(self.layout.edges), ~self.quotas.dense
        entries, entry_bytes = int(self.quotas.counts[sparse].sum()), 0.0
        if entries:  # of a buffer with the mean density of the model
            numel = int(sizes[sparse].sum())
            scale = min(1.0, _ENTRY_ELEMENTS / numel)
            entries = max(1, int(entries * scale))
            entry_bytes = message_bytes(self._settings.wire, max(1, int(numel * scale)), entries) / entries
        return JobShape(
            numels=tuple(sizes.tolist()),
            widths=tuple(spec.dtype.itemsize for spec in self.layout.specs),
            quotas=tuple(self.quotas.counts.tolist()),
            world_size=self.transport.world_size,
            entry_bytes=entry_bytes,
            hybrid=self.collective.dense_lane,
            device=str(self.device),
        )

    @property
    def scattered(self) -> float:
        """Share of the quotas that a worker sends of what it has selected itself."""
        return self.collective.exchange.scattered

    def accumulated(self) -> Tensor:
        """float32 [D]: what the error feedback holds of each element, in the order of ``layout``; not a copy."""
        return self.memory.accumulated(0, self.layout.numel)

    def holds_residual(self, transport: Transport) -> bool:
        """Whether the error feedback of some rank holds anything. Collective on this communicator."""
        anywhere = torch.tensor([float(self.memory.holds)], dtype=torch.float32, device=self.device)
        transport.all_reduce(anywhere, "max").wait()
        return bool(anywhere.item())

    def set_density(self, density: float) -> None:
        """Sets the density of the next windows; raises as :func:`check_density` does."""
        self._renew(check_density(density))

    def compare_in(self, units: UpdateUnits | None) -> None:
        """Compares elements in other units from the next window on; None: in those of the gradient."""
        self.selector.units = None if self.selector.sparsifier.reads == "shape" else units  # that compares none
        if self._settings.quota != "auto":
            return
        rule: QuotaRule = "shared" if units is None else "proportional"
        if rule != self._rule:
            self._rule = rule
            self._renew(self.quotas.density)

    def shares_due(self, window: int) -> bool:
        """Whether all ranks review shared quotas in a window."""
        return self._rule == "shared" and self._settings.scope == "tensor" and self.shares.due(window)

    def count_largest(self, window: int) -> None:
        """Counts for a review, if one is due, before anything of the window is taken out of the residual."""
        if self.shares_due(window):
            self._counts = LargestCounts(self.accumulated(), self.layout, self._proportional(self.quotas.density))

    def forget_counts(self) -> None:
        """There will be no review of a window that did not end well."""
        self._counts = None

    def review_shares(self, window: int) -> None:
        """Lets shared quotas follow what all ranks have counted in a window, if they have. Collective."""
        counts, self._counts = self._counts, None
        if counts is None:
            return
        with during(f"the review of shared quotas after step {window}"):
            quotas = self._proportional(self.quotas.density)
            if self.shares.review(counts.read(), self.layout, quotas, self.transport):
                self._renew(self.quotas.density)

    def _proportional(self, density: float) -> TensorQuotas:
        return tensor_quotas(self.layout, self.selector.sparsifier, density)

    def reorder(self, order: Sequence[int]) -> None:
        """Moves everything to a layout in which place ``j`` holds the tensor that was at place ``order[j]``."""
        self.layout = self.layout.reordered(order)
        self.memory.permute(order, self.layout.edges.tolist())
        self._renew(self.quotas.density)

    def _renew(self, density: float) -> None:
        self.quotas = self._proportional(density)
        if self._rule == "shared" and self._settings.scope == "tensor":
            self.quotas = self.shares.apply(self.layout, self.quotas)
        self.__dict__.pop("shape", None)
        self.restore_exchanges(())

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
        """``[fields of the group, state]`` of each exchange that has a state, the same on all ranks."""
        states = self._restored | {group: buffer.exchange.state_dict() for group, buffer in self.buffers.items()}
        return [[list(astuple(group)), state] for group, state in states.items() if state]

    def restore_exchanges(self, states: Iterable[Sequence[Any]]) -> None:
        """Drops all buffers; exchanges that are built anew start with what :meth:`exchange_state` returned."""
        self.buffers, self._stream = {}, None
        self._restored = {Group(*fields): state for fields, state in states}

    def _build(self, group: Group) -> Buffer:
        layout, settings, part = self.layout, self._settings, slice(group.start, group.stop)
        quotas = selective_quotas(layout, self.quotas, group)
        edges = layout.edges[group.start : group.stop + 1] - layout.edges[group.start]
        dtypes = [spec.dtype for spec in layout.specs[part]]
        dense = np.ones(len(dtypes), bool) if group.collective == "allreduce" else quotas.dense[part]
        segments = None
        if not dense.all():
            segments = group_segments(layout, quotas, group, settings.scope, self._rule == "pooled")
        runs = _dense_runs(edges.tolist(), dense.tolist(), dtypes)
        spec = SpanSpec(int(edges[-1]), segments.capacity if segments else 0, tuple(edges.tolist()), runs)
        exchange: Any  # a collective of another package may build anything
        if group.collective == "allreduce":
            exchange = DenseAllReduce(spec, self.transport, self.device, group.half)
        elif group.collective == "stream":
            exchange = StreamedTensor(spec, self._opened_stream(), group.start)
        else:
            dtype = dtypes[0] if len({*dtypes}) == 1 else torch.float32
            sparse = SparseBuffer(spec, self.device, settings.wire, dtype, segments)
            exchange = self.collective.build(sparse, self._communicators)
            if not isinstance(exchange, Exchange):
                raise TypeError(f"collective {settings.collective!r} has built {exchange!r}, which is no Exchange")
        if group in self._restored:
            exchange.load_state_dict(self._restored.pop(group))
        segments = exchange.segments or segments
        return Buffer(group, layout, self.memory, segments, exchange, dense, settings.scope == "group")

    def _opened_stream(self) -> Stream:
        if self._stream is None:
            fusion = self._settings.fusion
            if self._stream_transport is None or not isinstance(fusion, Naive):
                raise TypeError(f"fusion={fusion.name!r} has no buffers that each worker fills at its own pace")
            # a buffer that can never be full would only carry padding
            capacity = min(fusion.buffer_elements, max(1, int(self.quotas.counts.sum())))
            values = value_format(self._settings.wire)
            self._stream = Stream(self._stream_transport, self.layout.edges, capacity, values, self.device)
        return self._stream


def _dense_runs(
    edges: Sequence[int], dense: Sequence[bool], dtypes: Sequence[torch.dtype]
) -> tuple[tuple[int, int, torch.dtype], ...]:
    runs = []
    for (is_dense, dtype), members in groupby(range(len(dense)), key=lambda i: (dense[i], dtypes[i])):
        tensors = list(members)
        start, stop = edges[tensors[0]], edges[tensors[-1] + 1]
        if is_dense and stop > start:
            runs.append((start, stop, dtype))
    return tuple(runs)

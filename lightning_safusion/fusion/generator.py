"""The Generator: compensates, selects and merges the gradients of a group into one fusion buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.allgather import SparseAllGather
from lightning_safusion.comm.allreduce import DenseAllReduce
from lightning_safusion.comm.exchange import Exchange, Notice, Part, SpanSpec, TensorFlag, all_finite
from lightning_safusion.comm.gtopk import GTopKExchange
from lightning_safusion.comm.oktopk import OkTopkExchange
from lightning_safusion.comm.stream import Stream, StreamedTensor
from lightning_safusion.comm.transport import Transport
from lightning_safusion.comm.wire import resolve_codec
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.fusion.plan import Group, SparseName
from lightning_safusion.fusion.quota import QuotaRule, Scope, TensorQuotas, group_segments, tensor_quotas
from lightning_safusion.sparsify.base import Segments, Selection, Sparsifier, check_selection
from lightning_safusion.sparsify.memory import Memory
from lightning_safusion.sparsify.view import device_constant

_FRESH, _BAD, _RAW = int(TensorFlag.FRESH), int(TensorFlag.BAD), int(TensorFlag.RAW)


@dataclass(eq=False)
class FusionBuffer:
    """One group's persistent buffer, and what this rank put into it in the current window.

    Args:
        group: Places of its tensors.
        start: First element in the flat space.
        stop: Element after its last.
        segments: Cut for selection; None if it travels dense.
        exchange: Its collective.
        dense: bool [T], tensors that travel whole.
        dtypes: What the gradients arrive in.
    """

    group: Group
    start: int
    stop: int
    segments: Segments | None
    exchange: Exchange
    dense: np.ndarray
    dtypes: frozenset[torch.dtype]
    selection: Selection | None = None
    absent: list[int] = field(default_factory=list)

    @cached_property
    def narrow(self) -> bool:
        """Whether gradients have fewer bits than the memory, so that a mean may not fit."""
        return any(dtype.itemsize < 4 for dtype in self.dtypes)

    @cached_property
    def all_fresh(self) -> Tensor:
        """uint8 [T]: the flags of almost every step."""
        return device_constant(np.full(len(self.places), _FRESH, np.uint8), self.exchange.device)

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of its tensors."""
        return np.diff(self.exchange.spec.edges).tolist()

    @property
    def places(self) -> range:
        """Places of its tensors."""
        return range(self.group.start, self.group.stop)

    def selected(self) -> np.ndarray:
        """int64 [T]: elements that each tensor sent in the last window (waits for the device)."""
        edges = np.asarray(self.exchange.spec.edges)
        counts = np.where(self.dense, np.diff(edges), 0)
        if self.selection is not None:
            count = int(self.selection.count)
            counts += np.diff(np.searchsorted(self.selection.indices[:count].cpu().numpy(), edges))
        counts[self.absent] = 0
        return counts


class Generator:
    """Turns gradients into messages.

    Args:
        layout: The flat gradient space.
        memory: Error feedback, bound to the layout.
        sparsifier: Chooses the elements.
        transport: Communicator of the buffers.
        device: Where the flat space lives.
        scope: ``"tensor"`` selects ahead of fusion, ``"group"`` behind it.
        quota: ``"proportional"`` or ``"pooled"``.
        wire: Wire format by name.
        stream_transport: A communicator of its own for buffers that fill at each worker's own pace; only they need it.
        stream_elements: Entries that such a buffer holds.
        sparse: What carries the buffers that a plan sends by all-gather.
    """

    def __init__(
        self,
        layout: Layout,
        memory: Memory,
        sparsifier: Sparsifier,
        transport: Transport,
        device: torch.device,
        scope: Scope = "tensor",
        quota: QuotaRule = "proportional",
        wire: str = "auto",
        stream_transport: Transport | None = None,
        stream_elements: int = 65536,
        sparse: SparseName = "allgather",
    ) -> None:
        self.layout = layout
        self.memory = memory
        self.sparsifier = sparsifier
        # a broken contract would not raise anywhere: it would train on wrong gradients, the same on all ranks
        self._checks = not type(sparsifier).__module__.startswith("lightning_safusion.")
        self.transport = transport
        self.device = device
        self.scope = scope
        self.quota_rule = quota
        self.wire = wire
        self.stream_elements = stream_elements
        self.sparse = sparse
        self.quotas: TensorQuotas = tensor_quotas(layout, sparsifier, 1.0)
        self._buffers: dict[Group, FusionBuffer] = {}
        self._stream: Stream | None = None
        self._stream_transport = stream_transport

    def set_layout(self, layout: Layout) -> None:
        """Adopts a new order; the memory must have been permuted to it."""
        self.layout = layout
        self.quotas = tensor_quotas(layout, self.sparsifier, self.quotas.density)
        self.forget()

    def set_density(self, density: float) -> bool:
        """Sets the density of the next window; returns whether it changed."""
        if density == self.quotas.density:
            return False
        self.quotas = tensor_quotas(self.layout, self.sparsifier, density)
        self.forget()
        return True

    def keep_only(self, groups: Sequence[Group]) -> None:
        """Forgets the buffers of groups that no plan uses any more."""
        self._buffers = {group: buffer for group, buffer in self._buffers.items() if group in groups}

    def forget(self) -> None:
        """Forgets all buffers: their shapes have changed, or an abandoned collective may still write into them."""
        self._buffers.clear()
        self._stream = None

    def buffer(self, group: Group) -> FusionBuffer:
        """The persistent buffer of a group at the current density."""
        if group not in self._buffers:
            self._buffers[group] = self._build(group)
        return self._buffers[group]

    def _build(self, group: Group) -> FusionBuffer:
        layout, quotas = self.layout, self.quotas
        start, stop = int(layout.edges[group.start]), int(layout.edges[group.stop])
        edges = tuple(int(e) - start for e in layout.edges[group.start : group.stop + 1])
        reduce = group.collective == "allreduce"
        dense = np.ones(group.stop - group.start, bool) if reduce else quotas.dense[group.start : group.stop]
        segments = None
        if not dense.all():
            segments = group_segments(layout, quotas, group.start, group.stop, self.scope, self.quota_rule)
        runs = _dense_runs(layout, group, edges, dense)
        spec = SpanSpec(stop - start, segments.capacity if segments else 0, edges, runs)
        dtypes = frozenset(spec.dtype for spec in layout.specs[group.start : group.stop])
        return FusionBuffer(group, start, stop, segments, self._exchange(group, spec), dense, dtypes)

    def _exchange(self, group: Group, spec: SpanSpec) -> Exchange:
        if group.collective == "allreduce":
            return DenseAllReduce(spec, self.transport, self.device)
        if group.collective == "stream":
            if self._stream is None:
                self._stream = self._open_stream()
            return StreamedTensor(spec, self._stream, group.start)
        dtypes = {s.dtype for s in self.layout.specs[group.start : group.stop]}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        if self.sparse == "oktopk":
            return OkTopkExchange(spec, self.transport, self.device, self.wire, dtype)
        codec = resolve_codec(self.wire, spec.numel, spec.capacity, dtype) if spec.capacity else None
        if self.sparse == "gtopk":
            return GTopKExchange(spec, self.transport, self.device, codec)
        return SparseAllGather(spec, self.transport, self.device, codec)

    def _open_stream(self) -> Stream:
        if self._stream_transport is None:
            raise ValueError("buffers that fill at each worker's own pace need a stream_transport")
        dtype = resolve_codec(self.wire, self.layout.numel, 1, torch.float32).value_dtype
        # a buffer that can never be full would only carry padding
        capacity = min(self.stream_elements, max(1, int(self.quotas.counts.sum())))
        return Stream(self._stream_transport, self.layout.edges, capacity, dtype, self.device)

    def select(
        self,
        buffer: FusionBuffer,
        grads: Sequence[Tensor],
        fresh: np.ndarray,
        raw: np.ndarray,
        step: int,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Compensates one group and selects from it.

        Args:
            buffer: The group's buffer.
            grads: Flat gradients of its tensors.
            fresh: bool [T], computed in this window.
            raw: bool [T], must travel outside the compressed path.
            step: Number of the window, the same on all ranks.
            scale: Factor that the gradients carry; the memory holds them without it.

        Returns:
            uint8 [T], the flags of its tensors, for :meth:`pack`.
        """
        taken = fresh & ~raw
        if taken.all():
            buffer.absent = []
            flags = self._compensate(buffer, grads, list(buffer.places), buffer.all_fresh, scale)
        else:
            flags = device_constant((fresh * _FRESH + raw * _RAW).astype(np.uint8), self.device)
            buffer.absent = np.flatnonzero(~taken).tolist()
            present = np.flatnonzero(taken).tolist()
            places = [buffer.group.start + i for i in present]
            flags = self._compensate(buffer, [grads[i] for i in present], places, flags, scale)
        buffer.selection = self._select(buffer, self.memory.accumulated(buffer.start, buffer.stop), step)
        return flags

    def pack(self, buffer: FusionBuffer, flags: Tensor, notices: int = 0) -> None:
        """Writes what was selected into the buffer's message.

        Args:
            buffer: The group's buffer.
            flags: What :meth:`select` returned.
            notices: What this rank tells all others (bits of ``Notice``).
        """
        x = self.memory.accumulated(buffer.start, buffer.stop)
        buffer.exchange.encode(x, Part(buffer.selection, flags, buffer.absent, notices))

    def leave_empty(self, buffer: FusionBuffer, notices: int = 0) -> None:
        """Packs nothing for a group, and the news that this rank has failed."""
        count = len(buffer.places)
        buffer.selection, buffer.absent = None, list(range(count))
        flags = torch.zeros(count, dtype=torch.uint8, device=self.device)
        x = torch.zeros(buffer.stop - buffer.start, device=self.device)
        buffer.exchange.encode(x, Part(None, flags, buffer.absent, notices | int(Notice.FAILED)))

    def _compensate(
        self, buffer: FusionBuffer, grads: Sequence[Tensor], ids: list[int], flags: Tensor, scale: Tensor | None
    ) -> Tensor:
        """Adds fresh gradients to the memory; those that are not finite are flagged instead: returns the flags."""
        if not grads:
            return flags
        first = buffer.group.start
        narrowed = list(grads)
        if torch.float64 in buffer.dtypes:  # added as the memory holds it
            narrowed = [grad.float() if grad.dtype == torch.float64 else grad for grad in grads]
        norms = torch.stack(torch._foreach_norm(narrowed, 2, dtype=torch.float32))
        if self.device.type != "cpu":
            # deciding on the host would wait for the device: what is not finite is replaced by zeros there
            finite = torch.isfinite(norms)
            flags = flags | _spread((~finite).to(torch.uint8) * _BAD, [i - first for i in ids], len(flags))
            narrowed = [torch.where(ok, grad, 0) for ok, grad in zip(finite, narrowed, strict=True)]
            norms = torch.where(finite, norms, 0.0)
        elif not all_finite(norms):
            # the norm of finite numbers can overflow: look at the elements before calling a tensor bad
            good = [i for i, grad in enumerate(narrowed) if all_finite(grad)]
            flags = flags.clone()
            flags[[ids[i] - first for i in range(len(ids)) if i not in set(good)]] |= _BAD
            narrowed, ids, norms = [narrowed[i] for i in good], [ids[i] for i in good], norms[good]
        if narrowed and scale is not None:
            narrowed = unscaled(narrowed, scale)
            norms = norms / scale
        if narrowed:
            dense: list[bool] = buffer.dense.tolist()
            if len(ids) < len(dense):
                dense = [dense[i - first] for i in ids]
            self.memory.compensate(ids, narrowed, dense, norms)
        return flags

    def _select(self, buffer: FusionBuffer, x: Tensor, step: int) -> Selection | None:
        if buffer.segments is None:
            return None
        selection = self._selected(buffer, buffer.segments, x, step)
        if self._checks:
            check_selection(selection, buffer.segments, self.sparsifier.name)
        return selection

    def _selected(self, buffer: FusionBuffer, segments: Segments, x: Tensor, step: int) -> Selection:
        if buffer.absent:
            if self.scope == "group":
                return self.sparsifier.select(self._without(buffer, x), segments, step)
            absent = np.zeros(len(segments), bool)
            absent[buffer.absent] = True
            segments = segments.skipping(absent)
        return self.sparsifier.select(x, segments, step)

    def _without(self, buffer: FusionBuffer, x: Tensor) -> Tensor:
        """A copy of the span in which absent tensors are zero: a fused segment cannot be skipped in part."""
        x = x.clone()
        edges = buffer.exchange.spec.edges
        for tensor in buffer.absent:
            x[edges[tensor] : edges[tensor + 1]] = 0
        return x

    def commit(self, buffer: FusionBuffer, withdrawn: Sequence[int], good: Tensor | None = None) -> None:
        """Takes what was sent out of the memory; called once the whole window has ended well.

        Args:
            buffer: The group's buffer.
            withdrawn: Tensors of the group whose part in the message was not used by any rank.
            good: bool on the device: whether the window ended well, where the host does not know it; None if it did.
        """
        edges = buffer.exchange.spec.edges
        indices, sent = buffer.exchange.sent()
        if buffer.selection is not None:
            for tensor in withdrawn:
                inside = (indices >= edges[tensor]) & (indices < edges[tensor + 1])
                sent = torch.where(inside, 0.0, sent)
            if good is not None:
                sent = torch.where(good, sent, 0.0)
            self.memory.commit(buffer.start, indices, sent)
        left_out = {*buffer.absent, *withdrawn}
        runs = buffer.exchange.spec.dense_runs
        if left_out:
            pieces = [(edges[t], edges[t + 1]) for t in np.flatnonzero(buffer.dense) if t not in left_out]
            pieces = [(start, stop) for start, stop in pieces if stop > start]
        else:
            pieces = [(start, stop) for start, stop, _ in runs]
        x = self.memory.accumulated(buffer.start, buffer.stop)
        for start, stop in pieces:
            whole = buffer.exchange.sent_dense(start, stop, x)
            if good is not None:
                whole = torch.where(good, whole, 0.0)
            self.memory.commit_dense(buffer.start + start, buffer.start + stop, whole)


def _spread(values: Tensor, places: list[int], length: int) -> Tensor:
    """The values at their places in a vector of zeros, without waiting for the device."""
    if len(places) == length:
        return values
    index = device_constant(np.array(places, np.int64), values.device)
    return torch.zeros(length, dtype=values.dtype, device=values.device).index_copy_(0, index, values)


def unscaled(grads: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    """Gradients without the factor of the loss; in float32, since the factor is there to save 16-bit ones from
    underflow."""
    return list(torch._foreach_mul([grad.float() for grad in grads], scale.reciprocal()))


def _dense_runs(
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

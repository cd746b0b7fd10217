"""The Generator: compensates, selects and merges the gradients of a group into one fusion buffer."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import Notice, Part, TensorFlag, all_finite
from lightning_safusion.fusion.buffer import FusionBuffer
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.fusion.plan import Group
from lightning_safusion.fusion.pool import BufferPool
from lightning_safusion.fusion.quota import TensorQuotas, tensor_quotas
from lightning_safusion.sparsify.base import Segments, Selection, Sparsifier, check_selection
from lightning_safusion.sparsify.memory import Memory
from lightning_safusion.sparsify.view import device_constant

_FRESH, _BAD, _RAW = int(TensorFlag.FRESH), int(TensorFlag.BAD), int(TensorFlag.RAW)


class Generator:
    """Turns gradients into messages.

    Args:
        layout: The flat gradient space.
        memory: Error feedback, bound to the layout.
        sparsifier: Chooses the elements.
        pool: The buffers.
    """

    def __init__(self, layout: Layout, memory: Memory, sparsifier: Sparsifier, pool: BufferPool) -> None:
        self.layout = layout
        self.memory = memory
        self.sparsifier = sparsifier
        self.pool = pool
        self.device = pool.device
        self.quotas: TensorQuotas = tensor_quotas(layout, sparsifier, 1.0)
        self._selecting = Lock()  # what a sparsifier learns is not made for two threads
        # a broken contract would not raise anywhere: it would train on wrong gradients, the same on all ranks
        self._checks = not type(sparsifier).__module__.startswith("lightning_safusion.")

    def set_layout(self, layout: Layout) -> None:
        """Adopts a new order; the memory must have been permuted to it."""
        self.layout = layout
        self.quotas = tensor_quotas(layout, self.sparsifier, self.quotas.density)
        self.pool.forget()

    def set_density(self, density: float) -> bool:
        """Sets the density of the next window; returns whether it changed."""
        if density == self.quotas.density:
            return False
        self.quotas = tensor_quotas(self.layout, self.sparsifier, density)
        self.pool.forget()
        return True

    def buffer(self, group: Group) -> FusionBuffer:
        """The persistent buffer of a group at the current density."""
        return self.pool.buffer(group, self.layout, self.quotas)

    def select(
        self,
        buffer: FusionBuffer,
        grads: Sequence[Tensor],
        fresh: np.ndarray,
        raw: np.ndarray,
        step: int,
        scale: Tensor | None = None,
        early: Sequence[int] = (),
    ) -> Tensor:
        """Compensates one group and selects from it.

        Args:
            buffer: The group's buffer.
            grads: Flat gradients of its tensors.
            fresh: bool [T], computed in this window.
            raw: bool [T], must travel outside the compressed path.
            step: Number of the window, the same on all ranks.
            scale: Factor that the gradients carry; the memory holds them without it.
            early: Tensors of the group that have been compensated and are selected from already.

        Returns:
            uint8 [T], the flags of its tensors, for :meth:`pack`; without those of early ones that are bad.
        """
        taken = fresh & ~raw
        if taken.all() and not early:
            buffer.absent = []
            if scale is None and (done := self._compensate_and_select(buffer, grads, step)) is not None:
                return done
            flags = self.compensate(buffer, grads, list(buffer.places), buffer.all_fresh, scale)
        else:
            flags = device_constant((fresh * _FRESH + raw * _RAW).astype(np.uint8), self.device)
            buffer.absent = np.flatnonzero(~taken).tolist()
            present = [i for i in np.flatnonzero(taken).tolist() if i not in early]
            places = [buffer.group.start + i for i in present]
            flags = self.compensate(buffer, [grads[i] for i in present], places, flags, scale)
        x = self.memory.accumulated(buffer.start, buffer.stop)
        buffer.exchange.begin(x, Part(None, flags, buffer.absent))
        buffer.selection = self._select(buffer, x, step, early)
        return flags

    def _compensate_and_select(self, buffer: FusionBuffer, grads: Sequence[Tensor], step: int) -> Tensor | None:
        """:meth:`select` from fresh tensors, where what is wanted can be seen while gradients are added; else None."""
        foresight = buffer.foresight
        wanted = None if foresight is None else foresight.wanted()
        if foresight is None or wanted is None:
            return None
        added = self.memory.compensate_finite(buffer.places, grads, wanted)
        if added is None:
            return None
        flags = _marked(buffer.all_fresh, added.left_out)
        x = self.memory.accumulated(buffer.start, buffer.stop)
        buffer.exchange.begin(x, Part(None, flags, buffer.absent))
        with foresight.known(added.found):
            del added  # candidates are as large as the residual where many elements are sent: no longer than needed
            buffer.selection = self._select(buffer, x, step, ())
        return flags

    def pack(self, buffer: FusionBuffer, flags: Tensor, notices: int = 0) -> None:
        """Writes what was selected into the buffer's message.

        Args:
            buffer: The group's buffer.
            flags: What :meth:`select` returned.
            notices: What this rank tells all others (bits of ``Notice``).
        """
        buffer.pack(flags, self.memory.accumulated(buffer.start, buffer.stop), notices)

    def leave_empty(self, buffer: FusionBuffer, notices: int = 0) -> None:
        """Packs nothing for a group, and the news that this rank has failed."""
        count = len(buffer.places)
        buffer.selection, buffer.absent = None, list(range(count))
        flags = torch.zeros(count, dtype=torch.uint8, device=self.device)
        x = torch.zeros(buffer.stop - buffer.start, device=self.device)
        buffer.pack(flags, x, notices | int(Notice.FAILED))

    def compensate(
        self, buffer: FusionBuffer, grads: Sequence[Tensor], ids: list[int], flags: Tensor, scale: Tensor | None
    ) -> Tensor:
        """Adds fresh gradients to the memory; those that are not finite are flagged instead.

        Args:
            buffer: The group's buffer.
            grads: Flat gradients of some of its tensors.
            ids: Their places.
            flags: uint8 [T]; not changed.
            scale: Factor that the gradients carry.

        Returns:
            uint8 [T], the flags with those of bad tensors.
        """
        if not grads:
            return flags
        first = buffer.group.start
        if scale is None and (added := self.memory.compensate_finite(ids, grads)) is not None:
            return _marked(flags, [ids[i] - first for i in added.left_out])
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
            kept = set(good)
            flags = _marked(flags, [ids[i] - first for i in range(len(ids)) if i not in kept])
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

    def _select(self, buffer: FusionBuffer, x: Tensor, step: int, early: Sequence[int]) -> Selection | None:
        segments = buffer.segments
        if segments is None or buffer.exchange.selects_itself:
            return None
        if buffer.absent and self.pool.scope == "group":
            return self.select_from(self._without(buffer, x), segments, step)
        if buffer.absent or early:
            key = ("left", *sorted(early)) if not buffer.absent else None
            segments = buffer.constants.get(key) or self._left(buffer, segments, early)
            if key is not None:
                buffer.constants[key] = segments
            if early and not segments.capacity:
                return None
        return self.select_from(x, segments, step)

    def _left(self, buffer: FusionBuffer, segments: Segments, early: Sequence[int]) -> Segments:
        skip = np.zeros(len(segments), bool)
        skip[[*buffer.absent, *early]] = True
        return segments.skipping(skip)

    def select_from(self, x: Tensor, segments: Segments, step: int) -> Selection:
        """Selects from a span of any device; safe to call on any thread.

        Args:
            x: float32 [N], residual plus gradient.
            segments: Its cut.
            step: Number of the window.
        """
        with self._selecting:
            selection = self.sparsifier.select(x, segments, step)
        if self._checks:
            check_selection(selection, segments, self.sparsifier.name)
        return selection

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
        as_it_is = not withdrawn and good is None
        message = buffer.exchange.sent_message() if buffer.sparse and as_it_is else None
        if buffer.sparse and (message is None or not self.memory.commit_message(buffer.start, buffer.stop, message)):
            indices, sent = buffer.exchange.sent()
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


def _marked(flags: Tensor, bad: list[int]) -> Tensor:
    """Flags of tensors, those at some places bad."""
    if bad:
        flags = flags.clone()
        flags[bad] |= _BAD
    return flags


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

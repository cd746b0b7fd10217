"""Buffers from gradients to means in a few kernels of a device, where the parts are those that the kernels know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.collectives.shard_tables import shard_tables
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.exchange import Verdict, all_finite
from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.fusion.gradients import Scratch
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.window import Window
from lightning_safusion.kernels.cuda import MOST_ELEMENTS, serves_buffers
from lightning_safusion.kernels.cuda.tables import KINDS, Tables
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.basic import TopK
from lightning_safusion.sparsify.memory.residual import AutoMemory, DecoupledMomentum, ResidualMemory
from lightning_safusion.sparsify.selection.select import ThresholdSparsifier
from lightning_safusion.sparsify.selection.survey import Selector
from lightning_safusion.sparsify.selection.units import SpanUnits

if TYPE_CHECKING:  # imports Triton
    from lightning_safusion.kernels.cuda.buffer import BufferKernels, Weighing
    from lightning_safusion.kernels.cuda.chosen import PlacedKernels, ThresholdKernels
    from lightning_safusion.kernels.cuda.owners import OwnerKernels
    from lightning_safusion.kernels.cuda.packer import Workspace
    from lightning_safusion.kernels.cuda.window import WindowKernels

# Bits of the status of a window, as kernels.cuda.decode has them.
DAMAGED, NOT_FINITE, IRREGULAR = 1, 2, 4
RESIDUALS = (ResidualMemory, AutoMemory, DecoupledMomentum)


class FusedShipment(Shipment):
    """One buffer in one window, in a few kernels: the same messages, means and residuals as a :class:`Shipment` has.

    What was sent leaves the residual in one launch for all buffers of a window: :meth:`FusedPath.commit`. ``scales``:
    float32 [2], the factor of the loss that gradients carry, and its reciprocal.
    """

    weighs: ClassVar[bool] = True  #: kernels write the keys by which elements are compared

    def __init__(
        self, buffer: Buffer, window: Window, memory: ResidualMemory, kernels: BufferKernels, scales: Tensor
    ) -> None:
        super().__init__(buffer, window)
        self.kernels, self._decay = kernels, memory.decay
        kernels.scales = scales
        self._left: list[int] = []  # tensors of which no mean is written
        self._marks: np.ndarray | None = None  # uint8 [T], their flags; None where all are fresh
        if not window.regular and (taken := window.taken(buffer.group)) is not None:
            self._marks, self.absent = window.flags_of(buffer.group), np.flatnonzero(~taken).tolist()
        #: Until the window ends: the streams of owners read moments too.
        self.weighing: Weighing | None = None

    def fill(self, selector: Selector, early: Sequence[int] = (), known: Tensor | None = None) -> None:
        if self.window.error is not None:
            return
        try:
            with self.range("select"):
                buffer, units = self.buffer, None
                if selector.units is not None:
                    units = selector.units.of(buffer.indices, buffer.edges, buffer.mixed)
                self.weighing = _weighing(units) if self.weighs else None
                self.kernels.locate(self.grads, self.weighing, self._marks)
                self._find(selector, units)
            self.flags = self.buffer.all_fresh  # those of the message are on the device
        except Exception as error:
            self.window.error = error

    def _find(self, selector: Selector, units: SpanUnits | None) -> None:
        self.kernels.select(self._decay, self.weighing)

    def pack(self) -> None:
        if self.flags is not None:
            try:
                self.selected = self.window.mark()
                self.kernels.pack(self.window.notices.own)
                self.sparse = self.buffer.segments is not None
                return
            except Exception as error:
                self.flags, self.window.error = None, error
        self._leave_empty()

    def decode_means(self, status: Tensor) -> None:
        """Writes the means into the gradients, and what is wrong into the status (int32 [1])."""
        if self.flags is None:
            self.kernels.locate(self.grads, None)
        self.kernels.leave(self._left)
        self.kernels.decode(self._decay, status)

    def decode(self, scratch: Scratch) -> None:
        with self.range("decode"):
            self.verdict = verdict = self.verdict or self.buffer.exchange.verdict()
            chosen = self._chosen_by(verdict)
            self._left = [] if chosen is None else np.flatnonzero(~chosen).tolist()
            self.decode_means(self.kernels.status)
        self.decoded = self.window.mark()

    def judge(self) -> None:
        """Reads what the kernels have found: which tensors are :attr:`sound` (waits for the device).

        Raises:
            RuntimeError: If a message is damaged, with the buffer's tensors.
        """
        found, bad = int(self.kernels.status), cast(Verdict, self.verdict).bad
        if found:
            self.kernels.status.zero_()
        if found & DAMAGED:
            raise self._failed(ValueError("a message is damaged"))
        if found & NOT_FINITE or bad.any():
            kept = {*self._left}  # these have their own gradients, no mean
            self.sound = ~bad & [tensor in kept or all_finite(grad) for tensor, grad in enumerate(self.grads)]

    def commit(self, good: Tensor | None = None, unused: Sequence[int] = ()) -> None:
        """Takes what was sent of some tensors out of the residual, where the kernels have taken nothing."""
        self.rounding = self.kernels.rounding(self.buffer.start)
        super().commit(good, [*unused, *self.absent])

    def sent(self) -> tuple[Tensor, Tensor]:
        exchange = self.buffer.exchange
        if not isinstance(exchange, SparseAllGather) or exchange.codec is None:
            return super().sent()
        return exchange.codec.decode(exchange.selection)

    def _selected_counts(self) -> np.ndarray | int:
        return 0 if self.buffer.segments is None else self._counts(self.sent()[0][: self.kernels.entries()])


class ThresholdShipment(FusedShipment):
    """One buffer in one window whose compressor estimates a threshold for each tensor."""

    kernels: ThresholdKernels

    def _find(self, selector: Selector, units: SpanUnits | None) -> None:
        # kernels are made for such compressors, and where something is selected
        sparsifier, segments = cast(ThresholdSparsifier, selector.sparsifier), self.buffer.cut(self.absent)
        view = self.kernels.add(self._decay, self.weighing, cast(Segments, segments))
        with selector.lock:
            thresholds = sparsifier.thresholds(view, self.window.step)
        self.kernels.find(view, thresholds)


class PlacedShipment(FusedShipment):
    """One buffer in one window from which a compressor selects by operations of PyTorch."""

    kernels: PlacedKernels
    weighs = False

    def _find(self, selector: Selector, units: SpanUnits | None) -> None:
        self.kernels.add(self._decay)
        selection = self.buffer.select(selector, self.window.step, self.absent, (), units)
        self.kernels.place(cast(Selection, selection))  # kernels are made where something is selected


class OwnerShipment(FusedShipment):
    """One buffer in one window whose shards have owners."""

    kernels: OwnerKernels

    @property
    def _exchange(self) -> ShardedExchange:
        return cast(ShardedExchange, self.buffer.exchange)

    def advance(self, wait: bool) -> bool:
        """Adds up the shard of this worker, and launches the phase that brings the sums of all owners."""
        if self.work is None or self._exchange.arrived_first:
            return True
        if not wait:
            return False
        try:
            self._exchange.await_first()
            with self.range("select"):
                if self.flags is None:
                    self.kernels.locate(self.grads, None)
                self.kernels.reduce()
            self._exchange.gather()
        except Exception as error:
            raise self._failed(error) from error
        return True

    def sent(self) -> tuple[Tensor, Tensor]:
        return self._exchange.sent_with(self.kernels.leaving())

    def _selected_counts(self) -> np.ndarray:
        pieces, edges = self._exchange.first, np.asarray(self.buffer.edges)
        tensors = edges[:-1].searchsorted(pieces.runs[:, 0], side="right") - 1
        return np.bincount(tensors, pieces.quotas, len(edges) - 1).astype(np.int64)


def _weighing(units: SpanUnits | None) -> Weighing | None:
    if units is None:
        return None
    from lightning_safusion.kernels.cuda.buffer import Weighing  # imports Triton

    moments = [None if moment is None else moment.values for moment in units.moments]
    known = [values if values is None or values.dtype in KINDS else values.float() for values in moments]
    epsilons = [0.0 if moment is None else moment.epsilon for moment in units.moments]
    return Weighing(known, epsilons, units.keys.view(torch.int32))


class FusedPath:
    """The kernels of all buffers of one device, and of the windows there.

    ``announce`` is called with a line when PyTorch's operations select from a buffer, once for each reason.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.announce: Callable[[str], None] | None = None
        self._named: set[str] = set()  # reasons that were announced
        self._scaled: tuple[Tensor, Tensor] | None = None  # a window's factor; and with its reciprocal

    @cached_property
    def serves(self) -> bool:
        """Whether there are kernels for the device at all."""
        return serves_buffers(self._device)

    @cached_property
    def workspaces(self) -> tuple[Workspace, Workspace]:
        """Of the stream on which workers select, and of that on which owners do."""
        from lightning_safusion.kernels.cuda.packer import Workspace  # imports Triton

        return Workspace(self._device), Workspace(self._device)

    @cached_property
    def windows(self) -> WindowKernels:
        """Those of the windows."""
        from lightning_safusion.kernels.cuda.window import WindowKernels  # imports Triton

        return WindowKernels(self._device)

    def shipment(self, buffer: Buffer, window: Window, selector: Selector) -> Shipment:
        """A buffer in a window, where kernels serve the device; fused where they serve all of its parts."""
        memory, fits = buffer.memory, buffer.dtypes <= {*KINDS} and 0 < buffer.edges[-1] <= MOST_ELEMENTS
        if isinstance(memory, ResidualMemory) and type(memory) in RESIDUALS and fits:
            made = buffer.constant("kernels", lambda: self._kernels(buffer, selector))
            if made is not None:
                shipment, kernels = made
                return shipment(buffer, window, memory, kernels, self._scales(window))
        if self.announce is not None and buffer.segments is not None and (what := _unknown(buffer)) not in self._named:
            self._named.add(what)
            self.announce(
                f"there are no fused kernels for {what}: PyTorch's operations, which sort all elements of a buffer, "
                f"take their place there, now for {buffer.title}"
            )
        return Shipment(buffer, window)

    def _scales(self, window: Window) -> Tensor:
        if window.scale is None:
            return self.workspaces[0].unscaled
        if self._scaled is None or self._scaled[0] is not window.scale:
            factor = window.scale.float().view(1)
            self._scaled = window.scale, torch.cat([factor, factor.reciprocal()])
        return self._scaled[1]

    def _kernels(self, buffer: Buffer, selector: Selector) -> tuple[type[FusedShipment], BufferKernels] | None:
        exchange, segments = buffer.exchange, buffer.segments
        kinds = np.array([KINDS.index(dtype) for dtype in buffer.each_dtype])
        largest = type(selector.sparsifier) is TopK
        if isinstance(exchange, ShardedExchange):
            if segments is None or buffer.fused or not largest or (shards := shard_tables(exchange, kinds)) is None:
                return None
            from lightning_safusion.kernels.cuda.owners import Mail, OwnerKernels  # imports Triton

            sums, lane = exchange.gathered_sums, exchange.lane.message
            mail = Mail(exchange.sending, exchange.arriving, exchange.sums, sums, lane, sum(exchange.out_sizes))
            return OwnerShipment, OwnerKernels(shards, buffer.span, mail, exchange.transport.rank, *self.workspaces)
        if type(exchange) is not SparseAllGather or (tables := _tables(buffer, exchange, kinds)) is None:
            return None
        from lightning_safusion.kernels.cuda.buffer import BufferKernels  # these import Triton
        from lightning_safusion.kernels.cuda.chosen import PlacedKernels, ThresholdKernels

        shipment, made = FusedShipment, BufferKernels
        if segments is not None and not largest:
            select = type(selector.sparsifier).select  # what exceeds its thresholds, and nothing else?
            estimates = select is ThresholdSparsifier.select and not segments.pool
            shipment, made = (ThresholdShipment, ThresholdKernels) if estimates else (PlacedShipment, PlacedKernels)
        return shipment, made(tables, buffer.span, *exchange.messages, self.workspaces[0])

    def commit(self, shipments: Sequence[FusedShipment], good: bool = True) -> None:
        """Takes what the fused shipments of a window have sent out of the residual, if nothing is wrong with it.

        ``good``: what the host has found, where it decides.
        """
        if not good:  # owners learn all the same what others have sent them
            self.windows.status.fill_(NOT_FINITE)
        self.windows.commit([shipment.kernels for shipment in shipments])
        for shipment in shipments:
            shipment.weighing = None

    def forget(self) -> None:
        """Forgets an open window."""
        if "windows" in vars(self):
            self.windows.forget()

    def release(self) -> None:
        """Frees the memory of selections; buffers that stay take other memory."""
        for workspace in vars(self).get("workspaces", ()):
            workspace.release()


def _tables(buffer: Buffer, exchange: SparseAllGather, kinds: np.ndarray) -> Tables | None:
    segments, edges = buffer.segments, np.asarray(buffer.edges, np.int64)
    message = exchange.message_format()
    if message is None or (segments is not None and not np.array_equal(segments.edges, edges)):
        return None
    quotas, pool = (np.zeros(len(edges) - 1, np.int64), 0) if segments is None else (segments.quotas, segments.pool)
    return Tables(edges, quotas, pool, kinds, exchange.lane_places(), message)


def _unknown(buffer: Buffer) -> str:
    exchange = buffer.exchange
    if buffer.edges[-1] > MOST_ELEMENTS:
        return f"buffers of more than {MOST_ELEMENTS} elements"
    if isinstance(exchange, SparseAllGather) and exchange.codec is not None:
        return f"messages in {exchange.codec.layout}-{exchange.codec.values.name}"
    return "dense tensors in float16, or of several types, with shards"

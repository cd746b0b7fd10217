"""One buffer in one window: filled, launched, awaited, decoded, committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import nan
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_safusion.comm.exchange import Notice, Part, Verdict, all_finite
from lightning_safusion.comm.transport.interface import (
    DamagedMessageError,
    Work,
    WorkerLostError,
    comes_of_a_loss,
    lost_workers,
)
from lightning_safusion.comm.transport.lockstep import OutOfStepError
from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.fusion.events import Mark
from lightning_safusion.fusion.gradients import Rounding, Scratch, compensate, deliver, marked
from lightning_safusion.fusion.window import Window
from lightning_safusion.sparsify.base import Selection
from lightning_safusion.sparsify.selection.survey import Selector
from lightning_safusion.sparsify.selection.units import SpanUnits
from lightning_safusion.sparsify.selection.view import device_constant


class Shipment:
    """One buffer in one window. Its methods are called in the order in which they stand here.

    A rank that fails to fill or pack still takes part in the exchange, with an empty message that carries the
    ``FAILED`` notice, so that no other rank waits for ever; the error is kept in the window. From :meth:`launch` on, an
    exchange that fails raises an error with the buffer's tensors: a WorkerLostError if a peer is lost, else a
    RuntimeError (a message is damaged).
    """

    def __init__(self, buffer: Buffer, window: Window) -> None:
        self.buffer = buffer
        self.window = window
        #: flat, T of them
        self.grads = cast(list[Tensor], window.grads[buffer.group.start : buffer.group.stop])
        self.flags: Tensor | None = None  #: uint8 [T] of TensorFlag; None if this rank failed to fill the buffer
        self.absent: list[int] = []  #: tensors of the buffer of which nothing is sent
        self.selection: Selection | None = None  #: until it is packed
        self.sparse = False  #: the message holds selected elements
        self.work: Work | None = None  #: the collective, from :meth:`launch` to :meth:`wait`
        self.verdict: Verdict | None = None  #: on the flags of all ranks, once the host has read them
        #: bool [T], once the host has read the messages: finite on all ranks, and so is the mean. None: all are.
        self.sound: np.ndarray | None = None
        self.damaged: list[int] = []  #: ranks whose messages were damaged on their way to this one, by their checksums
        self.repaired: list[int] = []  #: tensors that were averaged again, uncompressed
        self.rounding: list[Rounding] = []  #: what narrow gradients cannot hold of the means
        #: A range ``SAFusion::<part>`` in the traces of ``torch.profiler``.
        self.range: Callable[[str], AbstractContextManager[object]] = nullcontext
        if window.profiled:
            self.range = partial(_range, buffer.title)
        self.units: SpanUnits | None = None  #: in which elements are compared
        self._held: SpanUnits | None = None  #: until the window ends: a later phase reads them, in a stream of its own
        self._packed: np.ndarray | Selection | None = None
        # the moments of BufferEvents; NaN while unknown
        self.closed: Mark = window.mark()
        self.selected: Mark = nan
        self.launched: Mark = nan
        self.issued: Mark = nan
        self.finished: Mark = nan  # may be set on any thread
        self.awaited: Mark = nan
        self.arrived: Mark = nan
        self.decoded: Mark = nan

    def fill(self, selector: Selector, early: Sequence[int] = (), known: Tensor | None = None) -> None:
        """Adds the gradients to the residual and selects from the sum.

        ``early``: tensors that the offloader has added already, and selects from; ``known``: uint8 [T], their flags.
        """
        if self.window.error is not None:
            return
        try:
            with self.range("select"):
                if selector.units is not None:
                    self.units = selector.units.of(self.buffer.indices, self.buffer.edges, self.buffer.mixed)
                taken = None if self.window.regular else self.window.taken(self.buffer.group)
                if taken is not None or early or not self._fill_in_one_pass(selector):
                    self._fill(selector, taken, early)
            if self.flags is not None and known is not None:
                self.flags = self.flags | known
        except Exception as error:
            self.flags, self.window.error = None, error

    def _fill_in_one_pass(self, selector: Selector) -> bool:
        buffer, window, foresight = self.buffer, self.window, self.buffer.foresight
        if foresight is None or window.scale is not None:
            return False
        units = self.units
        if units is None:
            wanted = foresight.wanted()
        elif (weights := units.weights) is None:
            return False
        else:
            wanted = foresight.wanted(weights, None if selector.lazy else units.keys.numpy())
        if wanted is None:
            return False
        added = buffer.memory.compensate_finite(buffer.places, self.grads, wanted, foresight.cut)
        if added is None:
            return False
        self.flags = marked(buffer.all_fresh, added.left_out) if added.left_out else buffer.all_fresh
        if buffer.exchange.ability.begins_early:
            buffer.exchange.begin(buffer.span, Part(None, self.flags))
        compared, write = (buffer.span, None) if units is None else (units.keys, partial(units.weigh, buffer.span))
        with foresight.known(compared, added.found, write if selector.lazy else None) as survey:
            del added  # candidates are as large as the residual where many elements are sent: no longer than needed
            self.selection = selector.select(buffer.span, foresight.history, window.step, survey, units)
        return True

    def _fill(self, selector: Selector, taken: np.ndarray | None, early: Sequence[int]) -> None:
        """Adds, then selects; ``taken``: bool [T], the tensors of which something is sent, None for all."""
        buffer, window, grads = self.buffer, self.window, self.grads
        if taken is None and not early:
            flags = compensate(buffer, grads, range(len(grads)), buffer.all_fresh, window.scale)
        else:
            taken = np.ones(len(grads), bool) if taken is None else taken
            flags = device_constant(window.flags_of(buffer.group), buffer.device)
            self.absent = np.flatnonzero(~taken).tolist()
            present = [i for i in np.flatnonzero(taken).tolist() if i not in early]
            flags = compensate(buffer, [grads[i] for i in present], present, flags, window.scale)
        self.flags = flags
        if buffer.exchange.ability.begins_early:
            buffer.exchange.begin(buffer.span, Part(None, flags, self.absent))
        self.selection = buffer.select(selector, window.step, self.absent, early, self.units)

    def pack(self) -> None:
        """Writes the message, with the notices of this rank."""
        notices = self.window.notices.own
        if self.flags is not None:
            try:
                self.selected, selection = self.window.mark(), self.selection
                part = Part(selection, self.flags, self.absent, notices, self.units)
                self.buffer.exchange.encode(self.buffer.span, part)
                if selection is not None:
                    # on the host the message holds the rest; a device would be waited for
                    on_host = self.buffer.device.type == "cpu"
                    self._packed = self._counts(selection.positions, selection.count) if on_host else selection
                self.sparse = self.selection is not None or self.buffer.exchange.ability.selects_itself
                self._held = self.units if self.buffer.exchange.ability.phases else None
                self.selection, self.units = None, None
                return
            except Exception as error:
                self.window.error = error
        self._leave_empty()

    def _leave_empty(self) -> None:
        buffer, notices = self.buffer, self.window.notices.own | int(Notice.FAILED)
        self.selection, self.absent = None, list(range(len(buffer.places)))
        flags = torch.zeros(len(self.absent), dtype=torch.uint8, device=buffer.device)
        nothing = torch.zeros(buffer.stop - buffer.start, dtype=torch.float32, device=buffer.device)
        buffer.exchange.encode(nothing, Part(None, flags, self.absent, notices))
        self.sparse = buffer.exchange.ability.selects_itself

    def launch(self) -> None:
        """Starts the collective."""
        exchange, window = self.buffer.exchange, self.window
        self.launched = window.mark()  # before: it may have ended by the time that the call returns
        try:
            with self.range("exchange"):
                work = self.work = exchange.start()
            if work is None:  # of somebody's collective: messages would be read before they have come
                raise TypeError(f"{type(exchange).__name__}.start must return what its transport returns, not None")
        except Exception as error:
            raise self._failed(error) from error
        self.issued = window.mark()
        if window.timed and not exchange.transport.stream_ordered:
            work.on_done(self._finish)

    def _finish(self, now: float) -> None:
        self.finished = now

    def advance(self, wait: bool) -> bool:
        """See :meth:`Exchange.advance`, for those that have phases; raises as :meth:`wait` does."""
        exchange = self.buffer.exchange
        try:
            return self.work is None or exchange.advance(wait)
        except Exception as error:
            raise self._failed(error) from error
        finally:
            if exchange.transport.sealed:
                self.damaged += exchange.transport.take_damage()

    def wait(self) -> None:
        """Waits for the collective; a second call returns at once."""
        if self.work is None:
            return
        self.awaited = self.window.mark()
        exchange = self.buffer.exchange
        try:
            self.work.wait()
        except Exception as error:
            raise self._failed(error) from error
        finally:
            if exchange.transport.sealed:
                self.damaged += exchange.transport.take_damage()
        self.arrived = self.window.mark()
        if exchange.transport.stream_ordered:
            self.finished = self.arrived  # no later than this: the backend only tells when it was queued
        self.work = None

    def decode(self, scratch: Scratch) -> None:
        """Reads the flags of all ranks, and writes the means into the gradients.

        Tensors that are :attr:`repaired` keep their own gradients.
        """
        try:
            with self.range("decode"):
                if not self._decode_in_place():
                    self._decode(scratch.of(self.buffer))
        except ValueError as error:
            raise self._failed(error) from error
        self.decoded = self.window.mark()

    def _chosen_by(self, verdict: Verdict) -> np.ndarray | None:
        """bool [T], the tensors of which means are written, None for all; says which are :attr:`repaired`."""
        workers, bad = self.buffer.exchange.transport.world_size, verdict.bad & self.window.repairs
        if verdict.is_regular(workers) and not bad.any():
            return None
        again = verdict.irregular(workers) | bad
        self.repaired = np.flatnonzero(again).tolist()
        return (verdict.fresh > 0) & ~again

    def _decode_in_place(self) -> bool:
        """:meth:`decode` straight into the gradients; False, and nothing is written, where that is not possible."""
        buffer, exchange = self.buffer, self.buffer.exchange
        if not buffer.exact or self.window.scale is not None or buffer.device.type != "cpu":
            return False
        if not buffer.memory.hands_on:  # the decoded mean is not what the gradients get
            return False
        self.verdict = verdict = exchange.verdict()
        workers = exchange.transport.world_size
        if not verdict.plain and (verdict.bad.any() or not verdict.is_regular(workers)):
            return False
        finite = exchange.decode_into(self.grads)
        if finite is False:
            self.sound = np.array([all_finite(grad) for grad in self.grads])
        return finite is not None

    def _decode(self, scratch: Tensor) -> None:
        buffer, exchange = self.buffer, self.buffer.exchange
        mean = exchange.decode(scratch)
        finite = exchange.is_finite(mean)
        self.verdict = verdict = exchange.verdict() if self.verdict is None else self.verdict
        bad = verdict.bad.any()
        if bad or not finite:
            self.sound = ~verdict.bad & [all_finite(piece) for piece in mean.split(buffer.sizes)]
        chosen = self._chosen_by(verdict)
        if bad:
            exchange.poison(mean, torch.from_numpy(verdict.bad).to(mean.device))
        received = buffer.memory.received(buffer.start, buffer.stop, mean)
        self.rounding = deliver(self.window, buffer, received, chosen)
        exchange.release(scratch)

    def commit(self, good: Tensor | None = None, unused: Sequence[int] = ()) -> None:
        """Takes what was sent out of the residual, but for ``unused`` tensors of the buffer.

        ``good``: bool on the device, whether the window ended well, where the host does not know it; None if it did.
        """
        self._held = None
        buffer, memory, exchange = self.buffer, self.buffer.memory, self.buffer.exchange
        again = {*self.repaired, *unused}
        left_out = sorted({*self.absent, *again})
        # a fused segment may have sent elements of what is absent: few bits have no zero
        withdrawn = left_out if buffer.fused else sorted(again)
        if self.sparse:
            message = exchange.sent_message() if not withdrawn and good is None else None
            if message is None or not memory.commit_message(buffer.start, buffer.stop, message):
                memory.commit(buffer.start, *self._sent(withdrawn, good))
        pieces = buffer.dense_pieces
        if left_out:
            edges, kept = buffer.edges, np.setdiff1d(np.flatnonzero(buffer.dense), left_out)
            pieces = [(edges[t], edges[t + 1]) for t in kept.tolist()]
        for start, stop in pieces:
            if stop > start:
                sent = exchange.sent_dense(start, stop, buffer.span)
                sent = sent if good is None else torch.where(good, sent, 0.0)
                memory.commit_dense(buffer.start + start, buffer.start + stop, sent)
        for start, stop in self._between(withdrawn) if memory.settles or self.rounding else ():
            if memory.settles:
                memory.settle(start, stop, good)
            for begin, end, error in self.rounding:
                first, last = max(begin, start), min(end, stop)
                if first < last:
                    piece = error[first - begin : last - begin]
                    memory.add(first, last, piece if good is None else torch.where(good, piece, 0.0))
        self.rounding = []  # as large as the buffer, and the record of the window keeps this shipment

    def _between(self, tensors: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Spans of the flat space that are left of the buffer without some of its tensors, in ascending order."""
        buffer = self.buffer
        start = buffer.start
        for tensor in tensors:
            yield start, buffer.start + buffer.edges[tensor]
            start = buffer.start + buffer.edges[tensor + 1]
        yield start, buffer.stop

    def _sent(self, withdrawn: Sequence[int], good: Tensor | None) -> tuple[Tensor, Tensor]:
        indices, sent = self.sent()
        for tensor in withdrawn:
            inside = (indices >= self.buffer.edges[tensor]) & (indices < self.buffer.edges[tensor + 1])
            sent = torch.where(inside, 0.0, sent)
        return indices, sent if good is None else torch.where(good, sent, 0.0)

    def sent(self) -> tuple[Tensor, Tensor]:
        """Positions in the buffer (int64 [K]) and values (float32 [K]) that were sent of selected elements."""
        return self.buffer.exchange.sent()

    def sent_counts(self) -> np.ndarray:
        """int64 [T]: elements that each tensor sent (waits for the device)."""
        counts = np.where(self.buffer.dense, self.buffer.sizes, 0) + self._selected_counts()
        counts[self.absent] = 0
        return counts

    def _selected_counts(self) -> np.ndarray | int:
        """int64 [T], of the elements of each tensor that is not dense."""
        if isinstance(self._packed, Selection):
            return self._counts(self._packed.positions, self._packed.count)
        if self._packed is None and self.buffer.exchange.ability.selects_itself:
            return self._counts(self.buffer.exchange.chosen())
        return 0 if self._packed is None else self._packed

    def _counts(self, positions: Tensor, count: int | Tensor | None = None) -> np.ndarray:
        """int64 [T], how many of so many ascending positions, or of all, lie in each tensor (waits for the device)."""
        buffer, found = self.buffer, positions.cpu().numpy()[: None if count is None else int(count)]
        ends = found.searchsorted(buffer.edges_as[found.dtype])
        return ends[1:] - ends[:-1]

    def _failed(self, error: Exception) -> Exception:
        if isinstance(error, OutOfStepError):
            return error
        rank, step = self.buffer.exchange.transport.rank, self.window.step
        failed = f"rank {rank}: the exchange of the buffer with {self.buffer.title} failed in step {step}"
        if comes_of_a_loss(error):
            return WorkerLostError(f"{failed}: a worker was lost: {lost_workers()}. Its own output says why. ({error})")
        kind = DamagedMessageError if isinstance(error, DamagedMessageError) else RuntimeError
        return kind(f"{failed}: {error}")


def _range(title: str, part: str) -> AbstractContextManager[object]:
    return record_function(f"SAFusion::{part}", title)

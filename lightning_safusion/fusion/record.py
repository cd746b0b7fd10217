"""The record of one window: what every tensor and buffer did, for metrics, callbacks and reports."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.cost import ring_allreduce_bytes
from lightning_safusion.comm.wire.codec import spread
from lightning_safusion.fusion.events import BufferEvents, WindowEvents, host_delays
from lightning_safusion.sparsify.memory.residual import NoMemory, ResidualMemory

if TYPE_CHECKING:
    from lightning_safusion.fusion.layout import Layout
    from lightning_safusion.fusion.shipment import Shipment
    from lightning_safusion.fusion.space import GradientSpace
    from lightning_safusion.fusion.window import Window

#: The moments of a shipment, in the order of :class:`BufferEvents`.
_moments = attrgetter("closed", "selected", "launched", "issued", "finished", "awaited", "arrived", "decoded")


@dataclass(eq=False, repr=False)
class WindowRecord:
    """What one window of this rank did. Read-only; numbers are computed only when they are read.

    Arrays are by place (``[L]``, the order of ``layout``). What reads messages or the residual must be read before the
    next window begins. Nothing here changes training.
    """

    _window: Window  # has ended
    _shipments: Sequence[Shipment]  # in launch order
    _space: GradientSpace
    planned: bool  #: its buffers were those of a plan
    _timed: WindowEvents | None  # of the latest window that recorded everything

    def __post_init__(self) -> None:
        self.layout: Layout = self._space.layout  #: the tensors in ready order
        self.step = self._window.step  #: number of the window, the same on all ranks
        self.device = self._space.device  #: where gradients live
        self.surveyed = self._window.surveyed  #: all ranks recorded when collectives ended
        self.timed = self._window.timed  #: this rank recorded when collectives ended
        self._workers = self._space.transport.world_size

    @cached_property
    def events(self) -> WindowEvents:
        """When things happened (waits for the device)."""
        window, clock = self._window, self._window.clock
        seconds = float if clock.instant else clock.seconds
        buffers, free = [], -math.inf
        for shipment in self._shipments:
            buffer, exchange = shipment.buffer, shipment.buffer.exchange
            events = BufferEvents(
                buffer.places,
                buffer.group.collective,
                exchange.spec.numel,
                exchange.spec.capacity,
                exchange.bytes_sent,
                exchange.bytes_received,
                *map(seconds, _moments(shipment)),
            )
            if not clock.instant:
                # decoded beside the backward pass, one after the other: exposed is what was left after its end and
                # after the buffer before
                awaited, decoding = max(events.awaited, free), max(events.arrived, free)
                events = replace(events, awaited=awaited, arrived=max(awaited, events.arrived), decoding=decoding)
                free = events.decoded
            buffers.append(events)
        arrived = window.arrived if clock.instant else [clock.seconds(mark) for mark in window.arrived]
        ready = np.where(window.fresh, arrived, math.nan)
        delays = None
        if not clock.instant and window.in_order:
            delays = host_delays(ready, np.array(window.submitted), np.array(window.worked))
        drained = seconds(window.drained)
        return WindowEvents(
            window.step, window.density, self.layout, ready, tuple(buffers), drained, not clock.instant, delays
        )

    def drop_gradients(self) -> None:
        """Drops the references to the gradients."""
        self._window.grads = [None] * self._window.length
        for shipment in self._shipments:
            shipment.grads = []

    # Tensors

    @cached_property
    def used(self) -> np.ndarray:
        """bool [L]: what this rank had of a tensor went into its message, and the message was used.

        All False if some gradient was not finite (waits for the device).
        """
        verdicts = [shipment.verdict or shipment.buffer.exchange.verdict() for shipment in self._shipments]
        irregular = self._by_place([verdict.irregular(self._workers) for verdict in verdicts])
        good = not any(verdict.bad.any() for verdict in verdicts)
        return self._window.fresh & ~self._window.bypass & ~irregular & good

    @cached_property
    def dense(self) -> np.ndarray:
        """bool [L]: sent dense by its buffer."""
        return self._by_place([shipment.buffer.dense for shipment in self._shipments])

    @cached_property
    def sent_counts(self) -> np.ndarray:
        """int64 [L]: elements that this rank sent of each tensor (waits for the device)."""
        if self._window.plain:
            return np.where(self._window.fresh, np.diff(self.layout.edges), 0)
        return self._by_place([shipment.sent_counts() for shipment in self._shipments])

    @cached_property
    def selected_from(self) -> frozenset[int]:
        """Registration indices of the tensors whose mean is of selected elements.

        Also of those that had no gradient on some ranks: these are selected from in other windows. Not of those that
        were dense because their optimizer had not stepped.
        """
        verdicts = [(shipment.buffer.dense, shipment.verdict) for shipment in self._shipments]
        dense = self._by_place([dense if verdict is None else dense | verdict.bypass for dense, verdict in verdicts])
        return frozenset(self.layout.indices[~dense].tolist()) if verdicts else frozenset()

    def _by_place(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """[L], from [T] of every shipment: they are launched in the order of their places."""
        return np.concatenate(parts) if parts else np.zeros(len(self.layout), bool)

    # Their elements

    def accumulated(self) -> Tensor:
        """float32 [D]: what the error feedback holds of each element now, in the order of ``layout``."""
        now, held = self._space.layout, self._space.accumulated()
        if now is self.layout:
            return held
        tensors = list(held.split(np.diff(now.edges).tolist()))
        return torch.cat([held[:0], *(tensors[now.places[spec.index]] for spec in self.layout.specs)])

    def sent(self) -> tuple[Tensor, Tensor]:
        """``(int64 [K], float32 [K])``: elements that this rank sent sparse, as the receivers decoded them."""
        pieces = [(shipment.sent(), shipment.buffer.start) for shipment in self._shipments]
        if not pieces:
            empty = torch.zeros(0, dtype=torch.float32, device=self.device)
            return empty.long(), empty
        return torch.cat([at + start for (at, _), start in pieces]), torch.cat([values for (_, values), _ in pieces])

    @property
    def decay(self) -> float | None:
        """Factor on the residual before a gradient is added; None if the memory has a momentum.

        0 without error feedback: elements were then selected from :meth:`accumulated` as it is.
        """
        memory = self._space.memory
        if isinstance(memory, NoMemory):
            return 0.0
        return memory.decay if isinstance(memory, ResidualMemory) and not memory.shapes_updates else None

    def delivered(self) -> Tensor:
        """float32 [D]: the gradients that the optimizer gets, without the factor of a loss scaler."""
        scale = 1.0 if self._window.scale is None else self._window.scale.reciprocal()
        return torch.cat([grad.float() for grad in self._window.grads if grad is not None]) * scale

    def compress(self, x: Tensor) -> Tensor:
        """float32 [D]: what the compressor would select from ``x`` in the buffers of this window, 0 elsewhere.

        A copy of the compressor selects: what it learns from this is not for the next step.
        """
        sparsifier = copy.deepcopy(self._space.selector.sparsifier)
        compressed = torch.zeros_like(x)
        for shipment in self._shipments:
            segments, span = shipment.buffer.segments, slice(shipment.buffer.start, shipment.buffer.stop)
            if segments is not None:
                selection = sparsifier.select(x[span].contiguous(), segments, self.step)
                valid = torch.arange(len(selection.indices), device=x.device) < selection.count
                indices = spread(selection.indices, selection.count)
                compressed[span].index_add_(0, indices, torch.where(valid, selection.values, 0.0))
        return compressed

    def mean(self, x: Tensor) -> Tensor:
        """The mean over ranks, in place. Collective."""
        self._space.transport.all_reduce(x).wait()
        return x.div_(self._workers)

    # Figures

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank handed to the collectives."""
        return sum(s.buffer.exchange.bytes_sent for s in self._shipments) + self._averaged

    @property
    def _averaged(self) -> int:
        if not self._window.plain:
            return 0
        specs = [self.layout.specs[place] for place in np.flatnonzero(self._window.fresh)]
        return sum(spec.numel * spec.dtype.itemsize for spec in specs)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers; seconds, bytes and elements of this rank in this window.

        Keys: ``step``, ``density`` (in force), ``achieved_density`` (sent / all elements), ``bytes_sent``,
            ``bytes_received``, ``dense_bytes`` (of all gradients), ``tensors`` (with a gradient), ``tensors_missing``
            (of these, have elements and sent none), ``select_s`` (compensation, selection, packing), ``exchange_s``
            (collectives, summed; of the latest window in which it was measured), ``exposed_s`` (waiting for them),
            ``decode_s``, ``plan`` (tensors in each buffer), ``collectives`` (of each buffer).
        """
        selected, fresh = self.sent_counts, self._window.fresh
        wanted = fresh & ~self._window.bypass & (np.diff(self.layout.edges) > 0)
        buffers = [shipment.buffer for shipment in self._shipments]
        timed = self.events if self.timed or self._timed is None else self._timed
        received = sum(buffer.exchange.bytes_received for buffer in buffers)
        received += round(ring_allreduce_bytes(self._workers, self._averaged))
        return {
            "step": self.step,
            "density": self._window.density,
            "achieved_density": float(selected.sum() / max(1, self.layout.numel)),
            "bytes_sent": self.bytes_sent,
            "bytes_received": received,
            "dense_bytes": sum(spec.numel * spec.dtype.itemsize for spec in self.layout.specs),
            "tensors": int(fresh.sum()),
            "tensors_missing": int((wanted & (selected == 0)).sum()),
            **_seconds((self.events if self._window.clock.instant else timed).buffers),
            "exchange_s": _total(each.finished - each.launched for each in timed.buffers),
            "plan": [len(buffer.places) for buffer in buffers],
            "collectives": [buffer.group.collective for buffer in buffers],
        }


def _seconds(buffers: Sequence[BufferEvents]) -> dict[str, float]:
    return {
        "select_s": _total(each.launched - each.closed for each in buffers),
        "exposed_s": _total(each.exposed for each in buffers),
        "decode_s": _total(each.decoded - each.arrived for each in buffers),
    }


def _total(spans: Iterable[float]) -> float:
    """Their sum; what was not measured counts as nothing."""
    return float(sum(max(0.0, span) for span in spans if not math.isnan(span)))


def nothing_exchanged() -> dict[str, Any]:
    """The keys of :meth:`WindowRecord.as_dict` for a step in which this package exchanged nothing."""
    numbers = ("step", "bytes_sent", "bytes_received", "dense_bytes", "tensors", "tensors_missing")
    figures = ("density", "achieved_density", "exchange_s", *_seconds(()))
    return dict.fromkeys((*numbers, *figures)) | {"plan": [], "collectives": []}

"""Figures of one backward window."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_safusion.comm.cost import ring_allreduce_bytes
from lightning_safusion.fusion.clock import Clock
from lightning_safusion.fusion.events import BufferEvents, WindowEvents, resolve_events

if TYPE_CHECKING:
    from lightning_safusion.fusion.generator import Generator
    from lightning_safusion.fusion.window import Window


class WindowReport:
    """What one window sent and where its time went; made into plain numbers only when asked.

    Args:
        window: A window that has been drained.
        generator: Made its buffers.
        clock: Its marks are of this clock.
        timed: The latest window that took everything down; what this one did not measure is taken from there.
    """

    def __init__(self, window: Window, generator: Generator, clock: Clock, timed: WindowEvents | None = None) -> None:
        self.window = window
        self.layout = generator.layout
        self._world_size = generator.pool.transport.world_size
        self._clock = clock
        self._timed = timed

    @cached_property
    def events(self) -> WindowEvents:
        """When things happened (waits for the device)."""
        return resolve_events(self.window, self.layout, self._clock)

    def selected(self) -> np.ndarray:
        """int64 [L]: elements that this rank sent of each tensor, by place (waits for the device)."""
        if self.window.plain:
            return np.where(self.window.fresh, np.diff(self.layout.edges), 0)
        selected = [buffer.selected() for buffer, _ in self.window.inflight]
        return np.concatenate(selected) if selected else np.zeros(0, np.int64)

    @cached_property
    def selected_from(self) -> frozenset[int]:
        """Registration indices of the tensors whose mean is of selected elements.

        Also of those that some ranks had no gradient of: these travel whole now and then, and selected otherwise. Not
        of those that travelled whole because what was sent before was not used.
        """
        sparse = np.zeros(self.window.length, bool)
        for buffer, _ in self.window.inflight:
            sparse[buffer.group.start : buffer.group.stop] = ~buffer.dense
        sparse[self.window.unused] = False
        return frozenset(self.layout.specs[place].index for place in np.flatnonzero(sparse))

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank handed to the collectives."""
        return sum(buffer.exchange.bytes_sent for buffer, _ in self.window.inflight) + self._averaged

    @property
    def _averaged(self) -> int:
        """Bytes of gradients that were averaged in place."""
        if not self.window.plain:
            return 0
        specs = [self.layout.specs[place] for place in np.flatnonzero(self.window.fresh)]
        return sum(spec.numel * spec.dtype.itemsize for spec in specs)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers; seconds, bytes and elements of this rank in this window.

        Keys: ``step``, ``density`` (asked for), ``achieved_density`` (sent / all elements), ``bytes_sent``,
            ``bytes_received``, ``dense_bytes`` (the gradients themselves), ``tensors`` (with a gradient),
            ``tensors_missing`` (of these, have elements and sent none), ``select_s`` (compensation, selection,
            packing), ``exchange_s`` (collectives, summed; of the latest window in which it was measured), ``exposed_s``
            (blocked waiting for them), ``decode_s``, ``plan`` (tensors in each buffer), ``collectives`` (of each
            buffer). It describes the latest window only while no further one has begun.
        """
        selected, fresh = self.selected(), self.window.fresh
        wanted = fresh & ~self.window.raw & (np.diff(self.layout.edges) > 0)
        buffers = [buffer for buffer, _ in self.window.inflight]
        timed = self.events if self.window.timed or self._timed is None else self._timed
        return {
            "step": self.window.step,
            "density": self.window.density,
            "achieved_density": float(selected.sum() / max(1, self.layout.numel)),
            "bytes_sent": self.bytes_sent,
            "bytes_received": sum(buffer.exchange.bytes_received for buffer in buffers)
            + round(ring_allreduce_bytes(self._world_size, self._averaged)),
            "dense_bytes": sum(spec.numel * spec.dtype.itemsize for spec in self.layout.specs),
            "tensors": int(fresh.sum()),
            "tensors_missing": int((wanted & (selected == 0)).sum()),
            **_seconds((self.events if self._clock.instant else timed).buffers),
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
    """The keys of :meth:`WindowReport.as_dict` for a step in which this package exchanged nothing."""
    numbers = dict.fromkeys(("step", "bytes_sent", "bytes_received", "dense_bytes", "tensors", "tensors_missing"), 0)
    figures = dict.fromkeys(("density", "achieved_density", "exchange_s"), 0.0)
    return {**numbers, **figures, **_seconds(()), "plan": [], "collectives": []}

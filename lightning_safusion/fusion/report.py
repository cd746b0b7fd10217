"""Figures of one backward window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from lightning_safusion.fusion.generator import FusionBuffer, Generator
    from lightning_safusion.fusion.window import BufferTimes, Window


@dataclass(frozen=True, eq=False)
class WindowReport:
    """What one window sent and where its time went; made into plain numbers only when asked.

    Args:
        step: Number of the window.
        density: Density asked for.
        numel: Elements of all gradients.
        dense_bytes: Bytes of all gradients.
        fresh: bool [L], tensors with a gradient of this window, by place.
        buffers: The buffers, with their times.
        exchange_s: Seconds of the collectives, summed, in the latest window that took them down.
    """

    step: int
    density: float
    numel: int
    dense_bytes: int
    fresh: np.ndarray
    buffers: tuple[tuple[FusionBuffer, BufferTimes], ...]
    exchange_s: float

    @classmethod
    def of(cls, window: Window, generator: Generator, earlier: WindowReport | None) -> WindowReport:
        """Takes down a window that has been drained; what it did not measure is taken from the ``earlier`` report."""
        layout = generator.layout
        exchange_s = sum(max(0.0, times.finished - times.launched) for _, times in window.inflight)
        if not window.timed and earlier is not None:
            exchange_s = earlier.exchange_s
        return cls(
            window.step,
            window.density,
            layout.numel,
            sum(spec.numel * spec.dtype.itemsize for spec in layout.specs),
            window.fresh,
            tuple(window.inflight),
            exchange_s,
        )

    def selected(self) -> np.ndarray:
        """int64 [L]: elements that this rank sent of each tensor, by place (waits for the device)."""
        selected = [buffer.selected() for buffer, _ in self.buffers]
        return np.concatenate(selected) if selected else np.zeros(0, np.int64)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers; seconds, bytes and elements of this rank in this window.

        Keys: ``step``, ``density`` (asked for), ``achieved_density`` (sent / all elements), ``bytes_sent``,
            ``bytes_received``, ``dense_bytes`` (the gradients themselves), ``tensors`` (with a gradient),
            ``tensors_missing`` (of these, sent nothing), ``select_s`` (compensation, selection, packing),
            ``exchange_s`` (collectives, summed; of the latest window in which it was measured), ``exposed_s`` (blocked
            waiting for them), ``decode_s``, ``plan`` (tensors in each buffer), ``collectives`` (of each buffer). It
            describes the latest window only while no further one has begun.
        """
        selected = self.selected()
        times = [times for _, times in self.buffers]
        return {
            "step": self.step,
            "density": self.density,
            "achieved_density": float(selected.sum() / max(1, self.numel)),
            "bytes_sent": sum(buffer.exchange.bytes_sent for buffer, _ in self.buffers),
            "bytes_received": sum(buffer.exchange.bytes_received for buffer, _ in self.buffers),
            "dense_bytes": self.dense_bytes,
            "tensors": int(self.fresh.sum()),
            "tensors_missing": int((self.fresh & (selected == 0)).sum()),
            "select_s": sum(t.launched - t.closed for t in times),
            "exchange_s": self.exchange_s,
            "exposed_s": sum(t.waited for t in times),
            "decode_s": sum(t.decoded for t in times),
            "plan": [len(buffer.places) for buffer, _ in self.buffers],
            "collectives": [buffer.group.collective for buffer, _ in self.buffers],
        }


def nothing_exchanged() -> dict[str, Any]:
    """The keys of :meth:`WindowReport.as_dict` for a step in which this package exchanged nothing."""
    empty = WindowReport(0, 0.0, 0, 0, np.zeros(0, bool), (), 0.0)
    return empty.as_dict()

"""The one event interface: what happened to every tensor and buffer in a window, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from lightning_safusion.fusion.layout import Layout
    from lightning_safusion.fusion.plans.plan import CollectiveName


@dataclass(frozen=True)
class BufferEvents:
    """One buffer's way through a window, in seconds of ``perf_counter``.

    Args:
        places: Places of its tensors in the ready order.
        collective: ``"allgather"``, ``"allreduce"`` or ``"stream"``.
        elements: Elements of its tensors.
        capacity: Elements that it may send of those that travel sparse.
        bytes_sent: Bytes that this rank gave to the collective.
        bytes_received: Bytes that this rank received, by the closed form of the collective.
        closed: Its last gradient had arrived; selection begins.
        selected: Selection had ended; packing begins.
        launched: The message was packed, and its collective begins.
        issued: The call that began it had returned; the backward pass goes on.
        finished: The collective had ended; NaN if this window did not record that.
        awaited: The backward pass began to wait for it.
        arrived: It was waited for no longer; decoding begins.
        decoded: The means were in the gradients.
    """

    places: range
    collective: CollectiveName
    elements: int
    capacity: int
    bytes_sent: int
    bytes_received: int
    closed: float
    selected: float
    launched: float
    issued: float
    finished: float
    awaited: float
    arrived: float
    decoded: float

    @property
    def exposed(self) -> float:
        """Seconds that the backward pass stood still for this buffer."""
        return max(0.0, self.arrived - self.awaited)


@dataclass(frozen=True, eq=False)
class WindowEvents:
    """One backward window of this rank, in seconds of ``perf_counter``.

    Args:
        step: Number of the window.
        density: Density in force.
        layout: The tensors in ready order.
        ready: When each gradient was submitted [L]; NaN where it was not computed in this window.
        buffers: The buffers in launch order.
        drained: The window had ended: gradients and memory are final.
        beside: Selection and decoding ran beside the backward pass, on streams of their own.
    """

    step: int
    density: float
    layout: Layout
    ready: np.ndarray
    buffers: tuple[BufferEvents, ...]
    drained: float
    beside: bool = False


class Observer(Protocol):
    """Is told of every window once its times are known: at its end on the CPU, while the next one begins on CUDA.

    Called on the thread of the backward pass; all ranks call their observers at the same point of the program.
    """

    def observe(self, events: WindowEvents) -> None:
        """Takes in a window."""

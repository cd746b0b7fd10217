"""What observers get of a window: when its tensors were ready, and what happened to each buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from lightning_safusion.fusion.layout import Layout
    from lightning_safusion.fusion.plans.plan import CollectiveName


@dataclass(frozen=True)
class BufferEvents:
    """One buffer in one window. Moments are seconds of ``perf_counter``."""

    places: range  #: of its tensors in the ready order
    collective: CollectiveName
    elements: int  #: of its tensors
    capacity: int  #: most elements that it may send of its sparse tensors
    bytes_sent: int  #: by this rank
    bytes_received: int  #: by this rank
    closed: float  #: its last gradient has arrived; selection begins
    selected: float  #: selection has ended; packing begins
    launched: float  #: the message is packed; its collective begins
    issued: float  #: the call that began the collective has returned; the backward pass continues
    finished: float  #: the collective has ended; NaN if this window did not record that
    awaited: float  #: the backward pass begins to wait for the collective
    arrived: float  #: the backward pass has waited; decoding begins
    decoded: float  #: the means are in the gradients

    @property
    def exposed(self) -> float:
        """Seconds for which the backward pass waited for this buffer."""
        return max(0.0, self.arrived - self.awaited)


@dataclass(frozen=True, eq=False)
class WindowEvents:
    """One backward window of this rank. Moments are seconds of ``perf_counter``."""

    step: int  #: number of the window
    density: float  #: in force
    layout: Layout  #: the tensors in ready order
    ready: np.ndarray  #: [L], when each gradient was submitted; NaN where it was not computed in this window
    buffers: tuple[BufferEvents, ...]  #: in launch order
    drained: float  #: gradients and residual are final
    beside: bool = False  #: selection and decoding ran beside the backward pass, on streams of their own


class Observer(Protocol):
    """Gets the events of every window once its times are known: at its end on the CPU, while the next begins on CUDA.

    Called on the thread of the backward pass; all ranks call their observers at the same point of the program.
    """

    def observe(self, events: WindowEvents) -> None:
        """Called with the events of each window."""

"""Moments of a window: the clocks that mark them, and the events that observers get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from lightning_safusion.fusion.layout import Layout
    from lightning_safusion.fusion.plans.plan import CollectiveName

#: A moment: ``perf_counter`` seconds, or an event in the order of a stream.
Mark = Any

_ANCHOR_SECONDS = 5.0
# A device gets to work within less of its submission if it has no other.
_PACE_SECONDS = 100e-6


class Clock:
    """Marks moments, and says later when they were. This one is the CPU's: work is done when its call returns."""

    instant: ClassVar[bool] = True  #: marks are seconds

    #: The moment at which the device gets here, in the order of the current stream.
    mark: Callable[[], Mark] = staticmethod(perf_counter)

    def seconds(self, mark: Mark) -> float:
        """When it was, in seconds of ``perf_counter``; waits for a moment that has not come yet."""
        return float(mark)


@dataclass(frozen=True, eq=False)
class _Moment:
    event: torch.cuda.Event
    anchor: torch.cuda.Event
    zero: float  # perf_counter seconds of the anchor


class CudaClock(Clock):
    """Events on CUDA streams. Waits for the device once, when it is made."""

    instant = False

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._anchor = self._record()
        self._anchor.synchronize()
        self._zero = perf_counter()
        self._next: _Moment | None = None

    @staticmethod
    def _record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> _Moment:
        moment = _Moment(self._record(), self._anchor, self._zero)
        if perf_counter() - self._zero > _ANCHOR_SECONDS:
            self._move_anchor(moment)
        return moment

    def _move_anchor(self, moment: _Moment) -> None:
        """Distances between events are single precision milliseconds: long ones lose the microseconds."""
        if self._next is None:
            self._next = moment
        elif self._next.event.query():  # known without waiting
            self._anchor, self._zero, self._next = self._next.event, self.seconds(self._next), None

    def seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):  # recorded by the host
            return mark
        mark.event.synchronize()
        return float(mark.zero + 1e-3 * mark.anchor.elapsed_time(mark.event))


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else Clock()


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
    decoding: float | None = None  #: decoding begins, where it runs beside the backward pass; None: at ``arrived``

    @property
    def decode_begin(self) -> float:
        """When decoding begins."""
        return self.arrived if self.decoding is None else self.decoding

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
    delays: np.ndarray | None = None  #: see :func:`host_delays`; None where the host itself computes


def host_delays(ready: np.ndarray, submitted: np.ndarray, worked: np.ndarray) -> np.ndarray:
    """Seconds by which the engine's own calls on the host have delayed each gradient of a device [L].

    A device that keeps pace with the host waits for it: all calls before a gradient have delayed it. Where the device
    is behind, only what has delayed an earlier gradient counts. It keeps pace where a gradient is ready as soon after
    its submission as any other of the window (the two clocks drift apart, so that the distance itself says nothing).

    Args:
        ready: When the device had computed each gradient, NaN where it was not computed, in order of submission.
        submitted: When the host submitted each.
        worked: Seconds of the engine's calls before that, since the window began.
    """
    lag = ready - submitted
    known = lag[np.isfinite(lag)]
    if not len(known):
        return np.zeros(len(lag))
    paced = np.where(lag - known.min() < _PACE_SECONDS, np.arange(len(lag)), -1)
    latest = np.maximum.accumulate(paced)
    return np.where(latest >= 0, worked[latest] - worked[0], 0.0)


class Observer(Protocol):
    """Gets the events of every window once its times are known: at its end on the CPU, while the next begins on CUDA.

    Called on the thread of the backward pass; all ranks call their observers at the same point of the program.
    """

    def observe(self, events: WindowEvents) -> None:
        """Called with the events of each window."""

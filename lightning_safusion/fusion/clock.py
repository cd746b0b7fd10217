"""Clocks: when a device reached a point of its program, measured without making it or the host wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar

import torch

#: A moment: ``perf_counter`` seconds, or an event in the order of a stream.
Mark = Any

_ANCHOR_SECONDS = 5.0


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
    """Events on CUDA streams. Waits for the device once, when it is made.

    Args:
        device: The device.
    """

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

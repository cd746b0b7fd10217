"""Clocks: when the device was where, without making it or the host wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar

import torch

Mark = Any
"""A moment: ``perf_counter`` seconds, or an event in the order of a stream."""


_ANCHOR_SECONDS = 5.0


class Clock(ABC):
    """Takes moments now and says later, in seconds of ``perf_counter``, when they were.

    Attributes:
        instant: Moments are known when they are taken.
    """

    instant: ClassVar[bool]

    @abstractmethod
    def mark(self) -> Mark:
        """The moment at which the device gets here, in the order of the current stream."""

    @abstractmethod
    def seconds(self, mark: Mark) -> float:
        """When it was; waits for it if it has not come yet."""

    def all_seconds(self, marks: Sequence[Mark]) -> list[float]:
        """:meth:`seconds` of each."""
        return [self.seconds(mark) for mark in marks]


class HostClock(Clock):
    """Work is done when its call returns: the CPU."""

    instant = True

    mark = staticmethod(perf_counter)

    def seconds(self, mark: Mark) -> float:
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
        """Distances between events are single precision milliseconds: from far away they lose the microseconds."""
        if self._next is None:
            self._next = moment
        elif self._next.event.query():  # known without waiting
            self._anchor, self._zero, self._next = self._next.event, self.seconds(self._next), None

    def seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):  # taken down by the host
            return mark
        mark.event.synchronize()
        return float(mark.zero + 1e-3 * mark.anchor.elapsed_time(mark.event))


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()

"""What one rank did in one training step, and when. Plain values, that can be written as JSON and read back.

All moments are seconds of that rank's ``perf_counter``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import isnan, nan
from typing import Any, Literal

from lightning_safusion.fusion.events import BufferEvents, WindowEvents
from lightning_safusion.profiling.intervals import Interval, merge, subtract
from lightning_safusion.profiling.plain import from_row, without_nan

PhaseName = Literal["data", "forward", "backward", "optimizer"]


@dataclass(frozen=True)
class Phase:
    """A part of a step.

    Args:
        name: ``"data"`` (between batches), ``"forward"``, ``"backward"`` or ``"optimizer"``.
        begin: Its first moment.
        end: Its last.
    """

    name: PhaseName
    begin: float
    end: float


def buffer_name(tensors: Sequence[str]) -> str:
    """The first tensor's name, and how many there are besides."""
    return tensors[0] + (f" +{len(tensors) - 1}" if len(tensors) > 1 else "")


@dataclass(frozen=True)
class BufferTimeline:
    """One buffer in one step.

    Args:
        events: Its moments.
        tensors: Names of its tensors, in ready order.
        ready: When each of their gradients was ready; NaN where it was not computed in this step.
        beside: It was selected and decoded beside the backward pass (CUDA), not in it.
    """

    events: BufferEvents
    tensors: tuple[str, ...]
    ready: tuple[float, ...]
    beside: bool = False

    @property
    def name(self) -> str:
        """The first tensor's name, and how many there are besides."""
        return buffer_name(self.tensors)

    @property
    def select(self) -> Interval:
        """Compensation, selection and packing."""
        return self.events.closed, self.events.launched

    @property
    def exchange(self) -> Interval:
        """The collective, from its start to its end (the wait's end if nobody told)."""
        # a backend's thread may tell of the end later than the wait returns
        end = self.events.arrived if isnan(self.events.finished) else min(self.events.finished, self.events.arrived)
        return self.events.launched, end

    @property
    def exposed(self) -> Interval:
        """The part of the exchange for which the backward pass stood still."""
        return self.events.awaited, self.events.arrived

    @property
    def decode(self) -> Interval:
        """Reading what arrived, and writing the means into the gradients."""
        return self.events.finished if self.beside else self.events.arrived, self.events.decoded

    def to_dict(self) -> dict[str, Any]:
        """Plain values; :meth:`from_dict` reads them."""
        values = {each.name: getattr(self.events, each.name) for each in fields(BufferEvents)}
        values["places"] = [self.events.places.start, self.events.places.stop]
        own = {"tensors": self.tensors, "ready": self.ready, "beside": self.beside}
        plain: dict[str, Any] = without_nan(own | values)
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BufferTimeline:
        """Reads what :meth:`to_dict` has made."""
        events = from_row(BufferEvents, {**values, "places": range(*values["places"])})
        ready = tuple(nan if moment is None else float(moment) for moment in values["ready"])
        return cls(events, tuple(values["tensors"]), ready, bool(values["beside"]))


@dataclass(frozen=True)
class WindowTimeline:
    """One backward window.

    Args:
        buffers: In launch order.
        drained: It had ended.
        beside: Selection and decoding ran beside the backward pass (CUDA), not in it.
    """

    buffers: tuple[BufferTimeline, ...]
    drained: float
    beside: bool

    @classmethod
    def of(cls, events: WindowEvents) -> WindowTimeline:
        """From what an observer was told."""
        names, ready = [spec.name for spec in events.layout.specs], events.ready.tolist()
        buffers = []
        for buffer in events.buffers:
            part = slice(buffer.places.start, buffer.places.stop)
            buffers.append(BufferTimeline(buffer, tuple(names[part]), tuple(ready[part]), events.beside))
        return cls(tuple(buffers), events.drained, events.beside)

    @property
    def stalls(self) -> list[Interval]:
        """When the backward pass did nothing of its own."""
        if self.beside:
            return merge([(self.buffers[0].events.awaited, self.drained)] if self.buffers else [])
        return merge(each for b in self.buffers for each in (b.select, b.exposed, b.decode))


@dataclass(frozen=True)
class StepTimeline:
    """One step of the optimizer on one rank, with all batches that were accumulated for it.

    Args:
        step: Its number, as in the logs.
        begin: The step before it had ended (or, where that is not known, its first batch began).
        end: Its last batch had ended.
        phases: In the order of time; they do not overlap.
        windows: Backward windows in which this package has exchanged gradients; none with plain DDP.
    """

    step: int
    begin: float
    end: float
    phases: tuple[Phase, ...]
    windows: tuple[WindowTimeline, ...]

    @cached_property
    def buffers(self) -> tuple[BufferTimeline, ...]:
        """The buffers of all windows."""
        return tuple(buffer for window in self.windows for buffer in window.buffers)

    @property
    def exchanged(self) -> bool:
        """Whether this package has exchanged gradients in it."""
        return bool(self.windows)

    @cached_property
    def plan(self) -> tuple[tuple[str, ...], ...]:
        """The tensors of each buffer; steps with the same plan can be averaged."""
        return tuple(buffer.tensors for buffer in self.buffers)

    def spans(self, *names: PhaseName) -> list[Interval]:
        """The phases of these names."""
        return merge((phase.begin, phase.end) for phase in self.phases if phase.name in names)

    @cached_property
    def backward(self) -> list[Interval]:
        """The backward passes, without what this package did in them."""
        return subtract(self.spans("backward"), (stall for window in self.windows for stall in window.stalls))

    @cached_property
    def computing(self) -> list[Interval]:
        """When the rank computed anything: forward, backward, selection, decoding, optimizer."""
        own = (each for b in self.buffers for each in (b.select, b.decode))
        return merge([*self.spans("forward", "optimizer"), *self.backward, *own])

    def to_dict(self) -> dict[str, Any]:
        """Plain values; :meth:`from_dict` reads them."""
        return {
            "step": self.step,
            "begin": self.begin,
            "end": self.end,
            "phases": [[phase.name, phase.begin, phase.end] for phase in self.phases],
            "windows": [
                {"drained": w.drained, "beside": w.beside, "buffers": [b.to_dict() for b in w.buffers]}
                for w in self.windows
            ],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepTimeline:
        """Reads what :meth:`to_dict` has made."""
        windows: Iterable[Mapping[str, Any]] = values["windows"]
        return cls(
            int(values["step"]),
            float(values["begin"]),
            float(values["end"]),
            tuple(Phase(*phase) for phase in values["phases"]),
            tuple(
                WindowTimeline(tuple(map(BufferTimeline.from_dict, w["buffers"])), w["drained"], w["beside"])
                for w in windows
            ),
        )

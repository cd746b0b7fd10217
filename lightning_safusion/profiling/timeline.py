"""What one rank did in one training step, and when: plain values that are written as JSON and read back.

Moments are seconds of that rank's ``perf_counter``. An interval is ``(begin, end)``. Lists of intervals that functions
return are *merged*: sorted, disjoint, without empty intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import isfinite, isnan, nan
from typing import Any, Literal, NamedTuple, TypeVar

from lightning_safusion.fusion.events import BufferEvents, WindowEvents

Interval = tuple[float, float]
PhaseName = Literal["data", "forward", "backward", "optimizer"]

_T = TypeVar("_T")


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union. Intervals that end before they begin, or have no end (NaN), are left out."""
    merged: list[Interval] = []
    for begin, end in sorted(each for each in intervals if each[0] < each[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def subtract(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What is in ``intervals`` and not in ``others``."""
    rest: list[Interval] = []
    holes, first = merge(others), 0
    for begin, end in merge(intervals):
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        hole = first  # one hole may reach into the next interval
        while hole < len(holes) and holes[hole][0] < end:
            rest.append((begin, holes[hole][0]))
            begin = holes[hole][1]
            hole += 1
        rest.append((begin, end))
    return merge(rest)


def intersect(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What is in both."""
    mine = merge(intervals)
    return subtract(mine, subtract(mine, others))


def total(intervals: Iterable[Interval]) -> float:
    """Seconds covered by the union."""
    return float(sum(end - begin for begin, end in merge(intervals)))


class Phase(NamedTuple):
    """A part of a step.

    Args:
        name: ``"data"`` (between batches), ``"forward"``, ``"backward"`` or ``"optimizer"``.
        begin: Its first moment.
        end: Its last.
    """

    name: PhaseName
    begin: float
    end: float


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
    def select(self) -> Interval:
        """Compensation, selection and packing."""
        return self.events.closed, self.events.launched

    @property
    def exchange(self) -> Interval:
        """The collective; its end is that of the wait if it was not recorded."""
        # a backend's thread may record the end later than the wait returns
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
        """The buffer that :meth:`to_dict` wrote."""
        events = from_row(BufferEvents, {**values, "places": range(*values["places"])})
        ready = tuple(nan if moment is None else float(moment) for moment in values["ready"])
        return cls(events, tuple(values["tensors"]), ready, bool(values["beside"]))


@dataclass(frozen=True)
class WindowTimeline:
    """One window.

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
        """The window of which an observer got these events."""
        names, ready = [spec.name for spec in events.layout.specs], events.ready.tolist()
        buffers = []
        for buffer in events.buffers:
            part = slice(buffer.places.start, buffer.places.stop)
            buffers.append(BufferTimeline(buffer, tuple(names[part]), tuple(ready[part]), events.beside))
        return cls(tuple(buffers), events.drained, events.beside)

    @property
    def stalls(self) -> list[Interval]:
        """When the backward pass itself computed nothing."""
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
        windows: Windows in which this package has exchanged gradients; none with plain DDP.
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
        """The backward passes, without the work of this package in them."""
        return subtract(self.spans("backward"), (stall for window in self.windows for stall in window.stalls))

    @cached_property
    def computing(self) -> list[Interval]:
        """When the rank computed anything: forward, backward, selection, decoding, optimizer."""
        own = (each for b in self.buffers for each in (b.select, b.decode))
        return merge([*self.spans("forward", "optimizer"), *self.backward, *own])

    def to_dict(self) -> dict[str, Any]:
        """Plain values; :meth:`from_dict` reads them."""
        windows = [
            {"drained": w.drained, "beside": w.beside, "buffers": [b.to_dict() for b in w.buffers]}
            for w in self.windows
        ]
        own = {"step": self.step, "begin": self.begin, "end": self.end}
        return own | {"phases": [list(phase) for phase in self.phases], "windows": windows}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepTimeline:
        """The step that :meth:`to_dict` wrote."""
        phases = tuple(Phase(*phase) for phase in values["phases"])
        windows = tuple(
            WindowTimeline(tuple(map(BufferTimeline.from_dict, w["buffers"])), w["drained"], w["beside"])
            for w in values["windows"]
        )
        return cls(int(values["step"]), float(values["begin"]), float(values["end"]), phases, windows)


def buffer_name(tensors: Sequence[str]) -> str:
    """The first tensor's name, and how many there are besides."""
    return tensors[0] + (f" +{len(tensors) - 1}" if len(tensors) > 1 else "")


def from_row(cls: type[_T], row: Mapping[str, Any], gaps: bool = False) -> _T:
    """A dataclass from JSON's values of its fields: lists become tuples, null becomes NaN in fields that are floats.

    Args:
        cls: The dataclass, of plain values.
        row: Values by field name.
        gaps: Fields may be left out, and are null then.
    """
    values: dict[str, Any] = {}
    for each in fields(cls):  # type: ignore[arg-type]  # there is no type of dataclasses
        value = row.get(each.name) if gaps else row[each.name]
        if each.type == "float":
            value = nan if value is None else float(value)
        values[each.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def without_nan(value: Any) -> Any:
    """Lists and dictionaries for JSON: null for numbers that do not exist."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value

"""What one rank did in one training step, and when: its recorder, and plain values that are written as JSON.

Moments are seconds of that rank's ``perf_counter``. An interval is ``(begin, end)``. Lists of intervals that functions
return are *merged*: sorted, disjoint, without empty intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from math import isfinite, isnan, nan
from typing import Any, Literal, NamedTuple, TypeVar

from lightning_safusion.fusion.events import BufferEvents, Clock, Mark, WindowEvents

Interval = tuple[float, float]
PhaseName = Literal["data", "forward", "backward", "optimizer"]
Moment = Literal["batch", "backward", "backward_end", "optimizer", "optimizer_end", "batch_end", "pause"]

#: The phase between two moments; there is none between others.
_PHASES: dict[tuple[Moment, Moment], PhaseName] = {
    ("batch_end", "batch"): "data",
    ("batch", "backward"): "forward",
    ("backward_end", "backward"): "forward",  # optimizers that take turns
    ("optimizer_end", "backward"): "forward",
    ("optimizer", "backward"): "forward",  # an optimizer that runs forward and backward passes itself (LBFGS)
    ("backward", "backward_end"): "backward",
    ("optimizer", "optimizer_end"): "optimizer",
    ("optimizer_end", "optimizer_end"): "optimizer",  # its step has called the step of another optimizer
    ("optimizer", "batch_end"): "optimizer",  # it has no hook after its step
}

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


def total(intervals: Iterable[Interval]) -> float:
    """Seconds covered by the union."""
    return float(sum(end - begin for begin, end in merge(intervals)))


class Phase(NamedTuple):
    """A part of a step; ``"data"`` lies between batches."""

    name: PhaseName
    begin: float
    end: float


@dataclass(frozen=True)
class BufferTimeline:
    """One buffer in one step."""

    events: BufferEvents
    tensors: tuple[str, ...]  # names, in ready order
    ready: tuple[float, ...]  # when each of their gradients was ready; NaN where it was not computed in this step
    beside: bool = False  # selected and decoded beside the backward pass (CUDA), not in it

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
        return self.events.decode_begin, self.events.decoded

    def to_dict(self) -> dict[str, Any]:
        """Plain values; :meth:`from_dict` reads them."""
        places = [self.events.places.start, self.events.places.stop]
        own = {"tensors": self.tensors, "ready": self.ready, "beside": self.beside}
        return without_nan(own | asdict(self.events) | {"places": places})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BufferTimeline:
        """The buffer that :meth:`to_dict` wrote."""
        events = from_row(BufferEvents, {**values, "places": range(*values["places"])})
        ready = tuple(nan if moment is None else float(moment) for moment in values["ready"])
        return cls(events, tuple(values["tensors"]), ready, bool(values["beside"]))


@dataclass(frozen=True)
class WindowTimeline:
    """One window."""

    buffers: tuple[BufferTimeline, ...]  # in launch order
    drained: float  # it had ended
    beside: bool  # selection and decoding ran beside the backward pass (CUDA), not in it

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
    """One step of the optimizer on one rank, with all batches that were accumulated for it."""

    step: int  # its number, as in the logs
    begin: float  # the step before it had ended (or, where that is not known, its first batch began)
    end: float  # its last batch had ended
    phases: tuple[Phase, ...]  # in the order of time; they do not overlap
    windows: tuple[WindowTimeline, ...]  # in which this package has exchanged gradients; none with plain DDP

    @cached_property
    def buffers(self) -> tuple[BufferTimeline, ...]:
        """The buffers of all windows."""
        return tuple(buffer for window in self.windows for buffer in window.buffers)

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


class StepRecorder:
    """Records the moments of a training loop, and as an ``Observer`` the events of every window.

    Marks are of one clock; nothing waits for the device before :meth:`take`.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self._moments: list[tuple[Moment, Mark]] = []  # of the step under way, from the end of the step before it
        self._done: list[tuple[int, list[tuple[Moment, Mark]]]] = []
        self._windows: list[WindowEvents] = []

    def observe(self, events: WindowEvents) -> None:
        """Adds a window."""
        self._windows.append(events)

    def mark(self, moment: Moment, mark: Mark) -> None:
        """Adds a moment: a batch, a backward pass or an optimizer's step begins, or has ended."""
        self._moments.append((moment, mark))

    def end_step(self, number: int) -> None:
        """The batch that has just ended was the last of the step with this number."""
        self._done.append((number, self._moments))
        self._moments = self._moments[-1:]

    def skip(self, mark: Mark) -> None:
        """A batch of a step that is not recorded has ended; the next one may be."""
        self._moments = [("batch_end", mark)]

    def pause(self) -> None:
        """Validation or a report comes between this batch and the next one: the time between is not loading."""
        self._moments = [*self._moments[:-1], ("pause", self._moments[-1][1])] if len(self._moments) > 1 else []

    def take(self, clock: Clock, before: int) -> list[StepTimeline]:
        """Returns the recorded steps with a smaller number than ``before``, and forgets them.

        Waits for the device where their moments have not come yet.
        """
        ready = [moments for moments in self._done if moments[0] < before]
        self._done = [moments for moments in self._done if moments[0] >= before]
        timelines = []
        for number, moments in ready:
            timed = [(moment, clock.seconds(mark)) for moment, mark in moments]
            begin, end = timed[0][1], timed[-1][1]
            parts = [(_PHASES.get((first, last)), a, b) for (first, a), (last, b) in pairwise(timed)]
            phases = tuple(Phase(name, a, b) for name, a, b in parts if name is not None)
            inside = [events for events in self._windows if begin < events.drained <= end]
            timelines.append(StepTimeline(number, begin, end, phases, tuple(map(WindowTimeline.of, inside))))
        if timelines:
            self._windows = [events for events in self._windows if events.drained > timelines[-1].end]
        return timelines


def buffer_name(tensors: Sequence[str]) -> str:
    """The first tensor's name, and how many there are besides."""
    return tensors[0] + (f" +{len(tensors) - 1}" if len(tensors) > 1 else "")


def from_row(cls: type[_T], row: Mapping[str, Any], gaps: bool = False) -> _T:
    """A dataclass of plain values from JSON: lists become tuples, null becomes NaN in fields that are floats.

    Args:
        cls: The dataclass.
        row: Values by field name.
        gaps: Fields may be left out, and are null then.
    """
    values: dict[str, Any] = {}
    value: Any
    for each in fields(cls):  # type: ignore[arg-type]  # there is no type of dataclasses
        value = row.get(each.name) if gaps else row[each.name]
        if each.type == "float":
            value = nan if value is None else float(value)
        elif each.type == "int":
            value = int(value)
        values[each.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def without_nan(value: Any) -> Any:
    """Lists and dictionaries for JSON: null for numbers that do not exist."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value

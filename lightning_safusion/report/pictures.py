"""The report's pictures as inline SVG; classes give the colours, so that they follow the page into the dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from lightning_safusion.profiling.figures import StepFigures
from lightning_safusion.profiling.intervals import Interval
from lightning_safusion.profiling.timeline import BufferTimeline, StepTimeline
from lightning_safusion.report.markup import Markup, element, join

WIDTH = 960.0
_LEFT = 190.0  # room for labels
_RIGHT = 18.0
_ROW = 22.0
_TALL = 1400.0  # many rows become thinner rather than taller than this together
_LABELLED = 10.0  # height from which a row has room for its label
_SHADES = 10
_WORTH_NAMING = 0.01  # share of the step
RANKS = 32
#: Ranks that :func:`breakdown` draws.

PARTS = ("data", "forward", "backward", "select", "exposed", "decode", "optimizer", "other")
#: Parts of a step that add up to it: classes of the style sheet, and ``<part>_s`` of :class:`StepFigures`.


def picture(title: str, height: float, *content: str) -> Markup:
    """A drawing :data:`WIDTH` wide; the title is what a screen reader says."""
    size = {"viewBox": f"0 0 {WIDTH:g} {height:g}", "width": f"{WIDTH:g}", "height": f"{height:g}"}
    return element("svg", element("title", title), *content, role="img", **size)


def rectangle(class_: str, x: float, y: float, width: float, height: float, *tip: str) -> Markup:
    """A bar; ``tip`` is shown when the mouse rests on it."""
    tips = [element("title", *tip)] if tip else []
    place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{width:.2f}", "height": f"{height:.2f}"}
    return element("rect", *tips, class_=class_, **place)


def text(x: float, y: float, content: str, class_: str = "label", anchor: str = "start") -> Markup:
    """A line of text that stands on ``y``."""
    return element("text", content, class_=class_, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def line(class_: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    """A straight line."""
    ends = {"x1": f"{x1:.2f}", "y1": f"{y1:.2f}", "x2": f"{x2:.2f}", "y2": f"{y2:.2f}"}
    return element("line", class_=class_, **ends)


def nice_ticks(end: float, count: int = 8) -> list[float]:
    """Round numbers from 0 to ``end``, at most ``count`` steps."""
    if not end > 0:
        return [0.0]
    raw = end / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [number * step for number in range(int(end / step + 1e-9) + 1)]


def shorten(name: str, length: int = 28) -> str:
    """The end of a long name, which tells tensors apart."""
    return name if len(name) <= length else "…" + name[1 - length :]


class _Axis:
    """Seconds from left to right, with a grid in milliseconds."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin = begin
        self.scale = (WIDTH - _LEFT - _RIGHT) / max(1e-9, end - begin)
        self.end = end

    def x(self, moment: float) -> float:
        return _LEFT + (min(max(moment, self.begin), self.end) - self.begin) * self.scale

    def bar(self, part: str, interval: Interval, y: float, height: float, what: str) -> Markup:
        """An interval; nothing if it is empty or unknown."""
        begin, end = interval
        if not begin < end:
            return Markup("")
        tip = f"{what}: {(end - begin) * 1e3:.2f} ms, from {(begin - self.begin) * 1e3:.2f} ms"
        return rectangle(part, self.x(begin), y, max(0.4, self.x(end) - self.x(begin)), height, tip)

    def grid(self, top: float, bottom: float) -> Markup:
        marks = []
        for tick in nice_ticks((self.end - self.begin) * 1e3):
            x = self.x(self.begin + tick * 1e-3)
            marks += [line("grid", x, top, x, bottom), text(x, bottom + 15, f"{tick:g}", "tick", "middle")]
        return join([*marks, text(_LEFT - 10, bottom + 15, "ms", "tick", "end")])


def timeline(step: StepTimeline) -> Markup:
    """One step: a row for the training loop and one for each buffer, in launch order.

    A buffer's row shows when its gradients were ready (ticks), selection, exchange, the exposed part of it and
    decoding; the label of the buffer with the longest exposed part stands out.
    """
    begin = min((phase.begin for phase in step.phases if phase.name != "data"), default=step.begin)
    axis = _Axis(begin, step.end)
    pitch = min(_ROW, _TALL / max(1, len(step.buffers)))
    top = _ROW + 12.0
    rows = [text(_LEFT - 10, 17, "training", anchor="end"), _loop_row(step, axis, 3.0, _ROW - 4)]
    latest, seconds = longest_wait(step)
    for number, buffer in enumerate(step.buffers):
        label = "label late" if number == latest else "label"
        rows.append(_buffer_row(buffer, axis, top + number * pitch, pitch, label))
    bottom = top + len(step.buffers) * pitch + 4
    title = f"step {step.step}, {len(step.buffers)} buffers"
    title += f", {seconds * 1e3:.1f} ms of exchange exposed in buffer {latest + 1}" if latest >= 0 else ""
    return picture(title, bottom + 24, axis.grid(0, bottom), *rows)


def longest_wait(step: StepTimeline) -> tuple[int, float]:
    """Number of the buffer with the longest exposed exchange, and its seconds; -1 and 0 if none is worth a word."""
    exposed = [buffer.exposed[1] - buffer.exposed[0] for buffer in step.buffers]
    worst = max(range(len(exposed)), key=exposed.__getitem__, default=-1)
    if worst < 0 or exposed[worst] < _WORTH_NAMING * (step.end - step.begin):
        return -1, 0.0
    return worst, exposed[worst]


def _loop_row(step: StepTimeline, axis: _Axis, y: float, height: float) -> Markup:
    bars = [
        axis.bar(phase.name, (phase.begin, phase.end), y, height, phase.name)
        for phase in step.phases
        if phase.name in ("forward", "optimizer")
    ]
    bars += [axis.bar("backward", interval, y, height, "backward") for interval in step.backward]
    for buffer in step.buffers:
        if not buffer.beside:  # in the backward pass, which stops for it
            bars.append(axis.bar("select", buffer.select, y, height, f"select {buffer.name}"))
            bars.append(axis.bar("decode", buffer.decode, y, height, f"decode {buffer.name}"))
        bars.append(axis.bar("exposed", buffer.exposed, y, height, f"exposed exchange of {buffer.name}"))
    return join(bars)


def _buffer_row(buffer: BufferTimeline, axis: _Axis, y: float, pitch: float, label: str) -> Markup:
    height = pitch * 0.72
    marks = []
    if pitch >= _LABELLED:
        count = len(buffer.tensors)
        content = f"{count} tensor{'s' if count > 1 else ''}, {buffer.events.bytes_sent / 1e3:,.1f} kB"
        marks.append(text(_LEFT - 10, y + height - pitch * 0.14, content, label, "end"))
    parts = {"select": buffer.select, "exchange": buffer.exchange, "decode": buffer.decode}
    marks += [axis.bar(part, interval, y, height, f"{part} {buffer.name}") for part, interval in parts.items()]
    # below the exchange that it is a part of
    marks.append(axis.bar("exposed", buffer.exposed, y + height * 0.6, height * 0.4, f"exposed {buffer.name}"))
    ready = [axis.x(moment) for moment in buffer.ready if not math.isnan(moment)]
    path = "".join(f"M{x:.1f} {y:.1f}v{height:.1f}" for x in sorted({round(x, 1) for x in ready}))
    if path:
        marks.append(element("path", element("title", f"gradients ready: {buffer.name}"), class_="ready", d=path))
    return join(marks)


def breakdown(ranks: Sequence[StepFigures]) -> Markup:
    """One stacked bar for each of the first ranks: what a step's time went into."""
    shown = ranks[:RANKS]
    longest = max((each.step_s for each in shown if not math.isnan(each.step_s)), default=0.0)
    axis = _Axis(0.0, longest)
    bars = []
    for rank, figures in enumerate(shown):
        y, at = 3.0 + rank * (_ROW + 6), 0.0
        bars.append(text(_LEFT - 10, y + 16, f"rank {rank}", anchor="end"))
        for part in PARTS:
            seconds = getattr(figures, f"{part}_s")
            if seconds > 0:  # not NaN
                share = f" ({seconds / figures.step_s:.1%})" if figures.step_s > 0 else ""
                tip = f"rank {rank}, {part}: {seconds * 1e3:.2f} ms{share}"
                bars.append(rectangle(part, axis.x(at), y, (axis.x(at + seconds) - axis.x(at)), _ROW, tip))
                at += seconds
    bottom = 6.0 + len(shown) * (_ROW + 6)
    return picture("Where the time of a step goes, by rank", bottom + 24, axis.grid(0, bottom), *bars)


def history(steps: dict[int, StepFigures]) -> Markup:
    """Step time and exposed exchange of the recorded steps, over the run."""
    numbers = sorted(steps)
    height, bottom = 170.0, 180.0
    highest = max(steps[number].step_s for number in numbers)
    first, span = numbers[0], max(1, numbers[-1] - numbers[0])

    def x(number: int) -> float:
        return _LEFT + (number - first) / span * (WIDTH - _LEFT - _RIGHT)

    def y(seconds: float) -> float:
        return bottom - seconds / max(1e-12, highest) * height

    marks = []
    for tick in nice_ticks(highest * 1e3, 4):
        marks += [line("grid", _LEFT, y(tick * 1e-3), WIDTH - _RIGHT, y(tick * 1e-3))]
        marks += [text(_LEFT - 10, y(tick * 1e-3) + 4, f"{tick:g} ms", "tick", "end")]
    for number in sorted({first + int(tick) for tick in nice_ticks(span)}):
        marks.append(text(x(number), bottom + 16, str(number), "tick", "middle"))
    for part in ("step", "exposed"):
        known = [(number, getattr(steps[number], f"{part}_s")) for number in numbers]
        # lines of no length with round caps: a dot each, in one element
        dots = "".join(f"M{x(n):.1f} {y(seconds):.1f}h0" for n, seconds in known if not math.isnan(seconds))
        if dots:
            marks.append(element("path", class_=f"dots {part}", d=dots))
    return picture("Step time and exposed exchange by step", bottom + 24, *marks)


def heat_map(names: Sequence[str], steps: Sequence[int], rates: Sequence[Sequence[float | None]]) -> Markup:
    """The missing rate by tensor (rows) and step (columns); grey where a tensor had no gradient."""
    left = 260.0
    pitch = min(16.0, _TALL / max(1, len(names)))
    cell = (WIDTH - left - _RIGHT) / max(1, len(steps))
    marks = []
    for row, (name, values) in enumerate(zip(names, rates, strict=True)):
        y = 2.0 + row * pitch
        if pitch >= _LABELLED:
            marks.append(text(left - 8, y + pitch * 0.75, shorten(name, 38), anchor="end"))
        at = 0
        for rate, run in groupby(values):  # equal neighbours are one rectangle
            length = len(list(run))
            tip = f"{name}, from step {steps[at]}: " + ("no gradient" if rate is None else f"{rate:.0%} missing")
            marks.append(rectangle(_shade(rate), left + at * cell, y, length * cell, pitch - 1, tip))
            at += length
    bottom = 2.0 + len(names) * pitch
    for column in range(0, len(steps), -(-len(steps) // 8)):
        marks.append(text(left + column * cell, bottom + 14, str(steps[column]), "tick"))
    marks.append(text(left - 8, bottom + 14, "step", "tick", "end"))
    return picture("Missing rate by tensor and step", bottom + 22, *marks)


def _shade(rate: float | None) -> str:
    return "absent" if rate is None else f"shade shade{math.ceil(rate * _SHADES)}"

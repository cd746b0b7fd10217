"""Pictures: a step by buffer, and missing rates over steps.

Matplotlib is optional: it is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_safusion.literal import first_of, plural
from lightning_safusion.lookup import need
from lightning_safusion.profiling.timeline import BufferTimeline, Interval, StepTimeline

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

COLORS = {
    "data": "#c9ced6",
    "forward": "#9db8d9",
    "backward": "#4878b0",
    "optimizer": "#8d7fb8",
    "select": "#e8a33d",
    "exchange": "#9fcfb4",
    "decode": "#5b9e77",
    "exposed": "#d03a2b",
    "other": "#a9a294",
}
"""Of the parts of a step."""

_DRAWN = ("forward", "backward", "optimizer", "select", "exchange", "decode", "exposed")
_LABELLED_ROWS = 40
_NAMED = 0.002  # share of the step from which an exposed part is named
_HEIGHT = 0.62
_TICKS = 32
_WIDTH = 11.0  # inches
_LEAST_ROOM = 0.2  # share of the axes, for a text beside a row


def new_axes(height: float, width: float = _WIDTH) -> Axes:
    """Empty axes in a figure of their own, whose height and width are given in inches.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    need("matplotlib", what="a picture")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def plot_step(step: StepTimeline, ax: Axes | None = None) -> Figure | SubFigure:
    """Draws a step: a row for the training loop, and one for each buffer.

    A buffer's row shows when each of its gradients was ready (ticks), its selection, its exchange, the exposed part of
    it (hatched red: the backward pass stood still), and decoding. A late buffer is one whose exchange reaches beyond
    the backward pass; the reason is to its left: late gradients, a long selection, a long exchange, or exchanges before
    it. The buffer with the longest exposed part is named.

    Args:
        step: What to draw.
        ax: Where to draw; a new figure if there is none.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    own = ax is None
    if ax is None:
        ax = new_axes(1.8 + 0.32 * (min(len(step.buffers), _LABELLED_ROWS) + 1))
    # waiting for data says nothing about buffers: the picture begins with the first forward pass
    begin = min((phase.begin for phase in step.phases if phase.name != "data"), default=step.begin)
    ax.set_xlim(0.0, max(1e-6, (step.end - begin) * 1e3))
    _draw_bars(ax, step, begin)
    if len(step.buffers) <= _LABELLED_ROWS:
        each = [f"{plural(len(b.tensors), 'tensor')}, {b.events.bytes_sent / 1e3:,.1f} kB" for b in step.buffers]
        labels = ["training", *each]
        ax.set_yticks(range(len(labels)), labels, fontsize="small")
    else:
        ax.set_ylabel("buffers in launch order")
        ax.locator_params(axis="y", integer=True)
    ax.set_ylim(len(step.buffers) + 0.6, -0.6)
    ax.set_xlabel("ms since the step began")
    ax.set_title(f"step {step.step}: {_summary(step)}", fontsize="medium", loc="left")
    ax.grid(axis="x", alpha=0.3)
    ax.set_axisbelow(True)
    if own:
        ax.figure.legend(handles=_legend(), loc="outside lower center", ncols=9, fontsize="small", frameon=False)
    else:
        ax.legend(handles=_legend(), loc="lower left", ncols=3, fontsize="small")
    exposed = longest_wait(step, _NAMED)
    if exposed is not None:
        _name(ax, step.buffers[exposed], exposed + 1, begin)
    return ax.figure


def longest_wait(step: StepTimeline, least: float) -> int | None:
    """Number of the buffer with the longest exposed exchange; None if that is below a share ``least`` of the step."""
    exposed = [buffer.events.exposed for buffer in step.buffers]
    longest = max(exposed, default=0.0)
    return exposed.index(longest) if longest > least * (step.end - step.begin) else None


def _summary(step: StepTimeline) -> str:
    seconds = step.end - step.begin
    if not step.windows:
        return f"{seconds * 1e3:.1f} ms, nothing exchanged by this package"
    exposed = sum(buffer.events.exposed for buffer in step.buffers)
    return f"{exposed * 1e3:.1f} ms of exchange exposed, {exposed / seconds:.0%} of {seconds * 1e3:.1f} ms"


def _style(part: str) -> dict[str, Any]:
    if part == "exposed":
        # no outline: it would make a wait of microseconds look like one of milliseconds
        return {"facecolor": "none", "hatch": "//////", "edgecolor": COLORS[part], "linewidth": 0}
    return {"facecolor": COLORS[part], "linewidth": 0}


def _legend() -> list[Artist]:
    from matplotlib import rcParams
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    color = rcParams["text.color"]
    tick = Line2D([], [], color=color, linewidth=0.8, marker="|", linestyle="none", label="gradient ready")
    return [tick, *(Patch(label=part, **_style(part)) for part in _DRAWN)]


def _bars(step: StepTimeline) -> dict[str, list[tuple[int, Interval]]]:
    """The bars of each part: their row, of which 0 is the training loop, and their time."""
    bars: dict[str, list[tuple[int, Interval]]] = {part: [] for part in _DRAWN}
    bars["forward"] = [(0, span) for span in step.spans("forward")]
    bars["backward"] = [(0, span) for span in step.backward]
    bars["optimizer"] = [(0, span) for span in step.spans("optimizer")]
    for row, buffer in enumerate(step.buffers, start=1):
        parts = {"select": buffer.select, "decode": buffer.decode, "exposed": buffer.exposed}
        for part, span in parts.items():
            bars[part].append((row, span))
            if part == "exposed" or not buffer.beside:  # the backward pass stops for it
                bars[part].append((0, span))
        bars["exchange"].append((row, buffer.exchange))
    return bars


def _draw_bars(ax: Axes, step: StepTimeline, begin: float) -> None:
    from matplotlib.collections import PolyCollection

    low, high = -_HEIGHT / 2, _HEIGHT / 2
    for part, bars in _bars(step).items():
        corners = []
        for row, (a, b) in bars:
            if a < b:
                first, last = (a - begin) * 1e3, (b - begin) * 1e3
                corners.append([(first, row + low), (first, row + high), (last, row + high), (last, row + low)])
        ax.add_collection(PolyCollection(corners, **_style(part)), autolim=False)
    _draw_ready(ax, step, begin)


def _draw_ready(ax: Axes, step: StepTimeline, begin: float) -> None:
    from matplotlib import rcParams

    ready = [
        (row, (moment - begin) * 1e3)
        for row, buffer in enumerate(step.buffers, start=1)
        for moment in buffer.ready
        if not np.isnan(moment)
    ]
    if ready:
        rows, moments = zip(*ready, strict=True)
        bottoms, tops = (np.array(rows) + side for side in (-_HEIGHT / 2, _HEIGHT / 2))
        ax.vlines(moments, bottoms, tops, colors=rcParams["text.color"], linewidth=0.8)


def _name(ax: Axes, buffer: BufferTimeline, row: int, begin: float) -> None:
    """Writes beside a row, on the side with more room, as much as fits there; above the row if that is little."""
    text = f"{buffer.events.exposed * 1e3:.1f} ms exposed: {first_of(buffer.tensors, 3)}"
    first = float(np.nanmin([buffer.events.closed, *buffer.ready]))
    start, end = ((moment - begin) * 1e3 for moment in (first, buffer.events.decoded))
    before = start > ax.get_xlim()[1] - end
    note = ax.annotate(
        text,
        (start if before else end, row),
        xytext=(-8 if before else 8, 0),
        textcoords="offset points",
        ha="right" if before else "left",
        va="center",
        fontsize="small",
        color=COLORS["exposed"],
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
    )
    figure = ax.figure.canvas.figure
    figure.draw_without_rendering()  # or widths are not known
    width, gap = ax.get_window_extent().width, 12 * figure.dpi / 72
    length = note.get_window_extent().width
    room = max(start, ax.get_xlim()[1] - end) / ax.get_xlim()[1] * width - gap
    if room < min(length, _LEAST_ROOM * width):
        room = width - gap
        note.xy = (0.0, row - 0.5)
        note.set(x=8, ha="left")
    if room < length:
        note.set_text(f"{text[: int(len(text) * room / length) - 1]}…")


def plot_rates(names: Sequence[str], steps: Sequence[int], rates: Any, ax: Axes | None = None) -> Figure | SubFigure:
    """Draws the missing rate by tensor (rows) and step (columns), grey where a tensor had no gradient.

    Args:
        names: Parameter names [T].
        steps: First step of each column [C].
        rates: [T, C]; NaN or None where there was no gradient.
        ax: Where to draw; a new figure if there is none.
    """
    if ax is None:
        ax = new_axes(min(12.0, 1.8 + 0.18 * len(names)))
    values = np.array(rates, np.float64)  # None becomes NaN
    image = ax.imshow(values, aspect="auto", interpolation="nearest", vmin=0, vmax=1, cmap="magma_r")
    ax.set_facecolor("lightgrey")
    rows = range(0, len(names), -(-len(names) // _TICKS))
    ax.set_yticks(list(rows), [names[row] for row in rows], fontsize="x-small")
    columns = range(0, len(steps), -(-len(steps) // 8))
    ax.set_xticks(list(columns), [str(steps[column]) for column in columns])
    ax.set(xlabel="step", title="share of ranks and steps in which no element of the tensor was sent")
    ax.figure.colorbar(image, ax=ax, label="missing rate")
    return ax.figure

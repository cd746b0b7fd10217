"""A picture of one step: which buffer was late, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_safusion.profiling.intervals import Interval
from lightning_safusion.profiling.timeline import BufferTimeline, StepTimeline

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_COLORS = {
    "forward": "#9db8d9",
    "backward": "#4878b0",
    "optimizer": "#8d7fb8",
    "select": "#e8a33d",
    "exchange": "#9fcfb4",
    "decode": "#5b9e77",
    "exposed": "#d03a2b",
}
_TICK = "0.25"
_LABELLED_ROWS = 40
_NAMED = 0.002  # share of the step from which an exposed part is worth a name
_HEIGHT = 0.62


def plot_step(step: StepTimeline, ax: Axes | None = None) -> Figure | SubFigure:
    """Draws a step: a row for the training loop, and one for each buffer.

    A buffer's row shows when each of its gradients was ready (ticks), its selection, its exchange, the part of it that
    was exposed (hatched red: the backward pass stood still), and decoding. A late buffer is one whose exchange reaches
    beyond the backward pass; the reason is to its left: gradients that came late, a long selection, a long exchange, or
    exchanges before it. The buffer with the longest exposed part is named.

    Args:
        step: What to draw.
        ax: Where to draw; a new figure if there is none.

    Returns:
        The figure.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('pictures need matplotlib: pip install "lightning-safusion[plot]"') from error
    own = ax is None
    if ax is None:
        rows = min(len(step.buffers), _LABELLED_ROWS) + 1
        ax = Figure(figsize=(11, 1.8 + 0.32 * rows), layout="constrained").add_subplot()
    begin = _first(step)
    ax.set_xlim(0.0, max(1e-6, (step.end - begin) * 1e3))
    _draw_loop(ax, step, begin)
    for row, buffer in enumerate(step.buffers, start=1):
        _draw_buffer(ax, buffer, row, begin)
    exposed = max(step.buffers, key=_exposed, default=None)
    if exposed is not None and _exposed(exposed) > _NAMED * (step.end - step.begin):
        _name(ax, exposed, step.buffers.index(exposed) + 1, begin)
    if len(step.buffers) <= _LABELLED_ROWS:
        ax.set_yticks(range(len(step.buffers) + 1), ["training", *map(_label, step.buffers)], fontsize="small")
    else:
        ax.set_ylabel("buffers in launch order")
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(len(step.buffers) + 0.6, -0.6)
    ax.set_xlabel("ms since the step began")
    ax.set_title(f"step {step.step}: {_summary(step)}", fontsize="medium", loc="left")
    ax.grid(axis="x", alpha=0.3)
    ax.set_axisbelow(True)
    if own:
        ax.figure.legend(handles=_legend(), loc="outside lower center", ncols=9, fontsize="small", frameon=False)
    else:
        ax.legend(handles=_legend(), loc="lower left", ncols=3, fontsize="small")
    return ax.figure


def _first(step: StepTimeline) -> float:
    """Waiting for data says nothing about buffers: the picture begins with the first forward pass."""
    return min((phase.begin for phase in step.phases if phase.name != "data"), default=step.begin)


def _exposed(buffer: BufferTimeline) -> float:
    return buffer.exposed[1] - buffer.exposed[0]


def _summary(step: StepTimeline) -> str:
    if not step.exchanged:
        return f"{(step.end - step.begin) * 1e3:.1f} ms, nothing exchanged by this package"
    exposed = sum(max(0.0, _exposed(buffer)) for buffer in step.buffers)
    share = exposed / (step.end - step.begin)
    return f"{exposed * 1e3:.1f} ms of exchange exposed, {share:.0%} of {(step.end - step.begin) * 1e3:.1f} ms"


def _label(buffer: BufferTimeline) -> str:
    count = len(buffer.tensors)
    return f"{count} tensor{'s' if count > 1 else ''}, {buffer.events.bytes_sent / 1e3:,.1f} kB"


def _style(part: str) -> dict[str, Any]:
    if part == "exposed":
        # no outline: it would make a wait of microseconds look like one of milliseconds
        return {"facecolor": "none", "hatch": "//////", "edgecolor": _COLORS[part], "linewidth": 0}
    return {"facecolor": _COLORS[part], "linewidth": 0}


def _legend() -> list[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    tick = Line2D([], [], color=_TICK, linewidth=0.8, marker="|", linestyle="none", label="gradient ready")
    return [tick, *(Patch(label=part, **_style(part)) for part in _COLORS)]


def _bar(ax: Axes, row: int, interval: Interval, begin: float, part: str) -> None:
    start, end = interval
    if start < end:
        place = (row - _HEIGHT / 2, _HEIGHT)
        ax.broken_barh([((start - begin) * 1e3, (end - start) * 1e3)], place, **_style(part))


def _draw_loop(ax: Axes, step: StepTimeline, begin: float) -> None:
    for phase in step.phases:
        if phase.name in ("forward", "optimizer"):
            _bar(ax, 0, (phase.begin, phase.end), begin, phase.name)
    for interval in step.backward:
        _bar(ax, 0, interval, begin, "backward")
    for buffer in step.buffers:
        if not buffer.beside:  # in the backward pass, which stops for it
            _bar(ax, 0, buffer.select, begin, "select")
            _bar(ax, 0, buffer.decode, begin, "decode")
        _bar(ax, 0, buffer.exposed, begin, "exposed")


def _draw_buffer(ax: Axes, buffer: BufferTimeline, row: int, begin: float) -> None:
    ready = (np.array(buffer.ready) - begin) * 1e3
    ready = ready[~np.isnan(ready)]
    ax.vlines(ready, row - _HEIGHT / 2, row + _HEIGHT / 2, colors=_TICK, linewidth=0.8)
    _bar(ax, row, buffer.select, begin, "select")
    _bar(ax, row, buffer.exchange, begin, "exchange")
    _bar(ax, row, buffer.exposed, begin, "exposed")
    _bar(ax, row, buffer.decode, begin, "decode")


def _name(ax: Axes, buffer: BufferTimeline, row: int, begin: float) -> None:
    names = ", ".join(buffer.tensors[:3]) + (f" and {len(buffer.tensors) - 3} more" if len(buffer.tensors) > 3 else "")
    first = float(np.nanmin([buffer.events.closed, *buffer.ready]))
    start, end = ((moment - begin) * 1e3 for moment in (first, buffer.events.decoded))
    before = start > ax.get_xlim()[1] - end  # where there is more room
    ax.annotate(
        f"{_exposed(buffer) * 1e3:.1f} ms exposed: {names}",
        (start if before else end, row),
        xytext=(-8 if before else 8, 0),
        textcoords="offset points",
        ha="right" if before else "left",
        va="center",
        fontsize="small",
        color=_COLORS["exposed"],
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
    )

"""Pictures: of one step (which buffer was late, and why), and of the tensors that went missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_safusion.profiling.intervals import Interval
from lightning_safusion.profiling.timeline import BufferTimeline, StepTimeline

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
_NAMED = 0.002  # share of the step from which an exposed part is worth a name
_HEIGHT = 0.62
_TICKS = 32


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('pictures need matplotlib: pip install "lightning-safusion[plot]"') from error
    return Figure(figsize=(width, height), layout="constrained")


def plot_step(step: StepTimeline, ax: Axes | None = None) -> Figure | SubFigure:
    """Draws a step: a row for the training loop, and one for each buffer.

    A buffer's row shows when each of its gradients was ready (ticks), its selection, its exchange, the exposed part of
    it (hatched red: the backward pass stood still), and decoding. A late buffer is one whose exchange reaches beyond
    the backward pass; the reason is to its left: late gradients, a long selection, a long exchange, or exchanges before
    it. The buffer with the longest exposed part is named.

    Args:
        step: What to draw.
        ax: Where to draw; a new figure if there is none.

    Returns:
        The figure.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    own = ax is None
    if ax is None:
        ax = new_figure(11, 1.8 + 0.32 * (min(len(step.buffers), _LABELLED_ROWS) + 1)).add_subplot()
    # waiting for data says nothing about buffers: the picture begins with the first forward pass
    begin = min((phase.begin for phase in step.phases if phase.name != "data"), default=step.begin)
    ax.set_xlim(0.0, max(1e-6, (step.end - begin) * 1e3))
    _draw_bars(ax, step, begin)
    exposed = longest_wait(step, _NAMED)
    if exposed is not None:
        _name(ax, step.buffers[exposed], exposed + 1, begin)
    if len(step.buffers) <= _LABELLED_ROWS:
        ax.set_yticks(range(len(step.buffers) + 1), ["training", *map(_label, step.buffers)], fontsize="small")
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
    return ax.figure


def longest_wait(step: StepTimeline, least: float) -> int | None:
    """Number of the buffer with the longest exposed exchange; None if that is below a share ``least`` of the step."""
    exposed = [end - begin for begin, end in (buffer.exposed for buffer in step.buffers)]
    latest = max(range(len(exposed)), key=exposed.__getitem__, default=None)
    return None if latest is None or exposed[latest] <= least * (step.end - step.begin) else latest


def _summary(step: StepTimeline) -> str:
    seconds = step.end - step.begin
    if not step.exchanged:
        return f"{seconds * 1e3:.1f} ms, nothing exchanged by this package"
    exposed = sum(max(0.0, end - begin) for begin, end in (buffer.exposed for buffer in step.buffers))
    return f"{exposed * 1e3:.1f} ms of exchange exposed, {exposed / seconds:.0%} of {seconds * 1e3:.1f} ms"


def _label(buffer: BufferTimeline) -> str:
    count = len(buffer.tensors)
    return f"{count} tensor{'s' if count > 1 else ''}, {buffer.events.bytes_sent / 1e3:,.1f} kB"


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


def _rows(step: StepTimeline) -> dict[str, list[tuple[int, Interval]]]:
    """The intervals of each part with their rows; row 0 is the training loop."""
    rows: dict[str, list[tuple[int, Interval]]] = {part: [] for part in _DRAWN}
    rows["forward"] = [(0, span) for span in step.spans("forward")]
    rows["backward"] = [(0, span) for span in step.backward]
    rows["optimizer"] = [(0, span) for span in step.spans("optimizer")]
    for row, buffer in enumerate(step.buffers, start=1):
        parts = {"select": buffer.select, "decode": buffer.decode, "exposed": buffer.exposed}
        for part, span in parts.items():
            rows[part].append((row, span))
            if part == "exposed" or not buffer.beside:  # the backward pass stops for it
                rows[part].append((0, span))
        rows["exchange"].append((row, buffer.exchange))
    return rows


def _draw_bars(ax: Axes, step: StepTimeline, begin: float) -> None:
    from matplotlib import rcParams
    from matplotlib.collections import PolyCollection

    low, high = -_HEIGHT / 2, _HEIGHT / 2
    for part, rows in _rows(step).items():
        corners = [
            [((moment - begin) * 1e3, row + side) for moment, side in ((a, low), (a, high), (b, high), (b, low))]
            for row, (a, b) in rows
            if a < b
        ]
        ax.add_collection(PolyCollection(corners, **_style(part)), autolim=False)
    ready = np.array([(row, moment) for row, b in enumerate(step.buffers, start=1) for moment in b.ready])
    if ready.size:
        row, moment = ready[~np.isnan(ready[:, 1])].T
        ax.vlines((moment - begin) * 1e3, row + low, row + high, colors=rcParams["text.color"], linewidth=0.8)


def _name(ax: Axes, buffer: BufferTimeline, row: int, begin: float) -> None:
    names = ", ".join(buffer.tensors[:3]) + (f" and {len(buffer.tensors) - 3} more" if len(buffer.tensors) > 3 else "")
    first = float(np.nanmin([buffer.events.closed, *buffer.ready]))
    start, end = ((moment - begin) * 1e3 for moment in (first, buffer.events.decoded))
    before = start > ax.get_xlim()[1] - end  # where there is more room
    waited, arrived = buffer.exposed
    ax.annotate(
        f"{(arrived - waited) * 1e3:.1f} ms exposed: {names}",
        (start if before else end, row),
        xytext=(-8 if before else 8, 0),
        textcoords="offset points",
        ha="right" if before else "left",
        va="center",
        fontsize="small",
        color=COLORS["exposed"],
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
    )


def plot_rates(names: Sequence[str], steps: Sequence[int], rates: Any, ax: Axes | None = None) -> Figure | SubFigure:
    """Draws the missing rate by tensor (rows) and step (columns), grey where a tensor had no gradient.

    Args:
        names: Parameter names [T].
        steps: First step of each column [C].
        rates: [T, C]; NaN where there was no gradient.
        ax: Where to draw; a new figure if there is none.

    Returns:
        The figure.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    if ax is None:
        ax = new_figure(9.0, min(12.0, 2.0 + 0.2 * len(names))).add_subplot()
    image = ax.imshow(rates, aspect="auto", interpolation="nearest", vmin=0, vmax=1, cmap="magma_r")
    ax.set_facecolor("lightgrey")
    rows = range(0, len(names), -(-len(names) // _TICKS))
    ax.set_yticks(list(rows), [names[row] for row in rows], fontsize="x-small")
    columns = range(0, len(steps), -(-len(steps) // 8))
    ax.set_xticks(list(columns), [str(steps[column]) for column in columns])
    ax.set(xlabel="step", title="share of ranks and steps in which nothing of the tensor was sent")
    ax.figure.colorbar(image, ax=ax, label="missing rate")
    return ax.figure

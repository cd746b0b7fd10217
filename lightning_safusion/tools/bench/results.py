"""The figures of a run: one row for each system, and their picture."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_safusion.__about__ import __version__
from lightning_safusion.kernels import cpu as native
from lightning_safusion.systems import DEFAULT, EngineSystem, resolve_system
from lightning_safusion.tools.bench.rows import FLOOR, IN_STEP, row_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {FLOOR: "#4878b0", IN_STEP: "#86a8cf", "ddp": "#8a8a8a"}


@dataclass
class Turned:
    """What one worker has measured in a turn: plain values."""

    # seconds of each step that counts, and of the one before them: without loading, until the device is done
    steps: list[float] = field(default_factory=list)
    loading: list[float] = field(default_factory=list)  # seconds of loading before each of them
    samples: int | None = None  # of this worker in the latest step; None where Lightning does not find it
    # most memory: allocated by torch on a CUDA device, else resident; None where the system does not say
    peak_bytes: int | None = None
    figures: dict[str, Any] = field(default_factory=dict)  # of the last step, from the strategy's report, if it has one
    plan: list[list[Any]] | None = None  # buffers in use, as Plan.to_list has them; None where DDP exchanges
    density: float | None = None  # share that the strategy sends in the long run; None where there is none
    optimizers: list[str] = field(default_factory=list)  # names of their classes
    cautions: list[str] = field(default_factory=list)  # what the strategy knows to cost accuracy
    wire_bytes: float | None = None  # that its device has sent per step, with headers; None where that is not counted


#: Of each row the turns of each round, by rank.
Rounds = Mapping[str, Sequence[Sequence[Turned]]]


@dataclass(frozen=True)
class SystemFigures:
    """One system under the conditions of one table; times in seconds. None for DDP is what only an engine measures."""

    system: str
    step_s: float  # median
    low_s: float  # lower quartile
    high_s: float  # upper quartile
    over_floor: float  # median step over that of the floor
    over_ddp: float  # median step over DDP's
    # what the step takes longer than the floor, less selection and decoding: waiting for the exchange, and what the
    # exchange takes away from the computation
    exposed_s: float
    awaited_s: float | None  # for which the backward pass waited for exchanges, by the engine's own clock
    select_s: float | None  # compensation, selection and packing
    decode_s: float | None
    bytes_sent: float | None  # that a worker hands to its collectives in a step
    wire_bytes: float | None  # that its device sent per step, headers and acknowledgements too; None on the loopback
    density: float | None  # share of the elements that was sent
    buffers: float | None  # collectives of a step
    peak_bytes: float  # largest resident set of a worker, torch itself and this package included
    plain_ddp: str | None  # why plain DDP took the engine's place; None if it did not

    @property
    def by_ddp(self) -> bool:
        """Whether plain DDP has taken the place of a system that sends less: a step is one of DDP."""
        return bool(self.plain_ddp) and self.bytes_sent is None


def steps_of(ranks: Sequence[Turned]) -> list[float]:
    """Steps of a turn, each the mean over its workers; without the first one, which meets the caches and the network as
    another system left them."""
    return [fmean(step) for step in zip(*(each.steps for each in ranks), strict=True)][1:]


def summarize(turns: Rounds) -> list[SystemFigures]:
    """Figures of all systems of one run; the floor and DDP are among them."""
    steps = {system: [step for ranks in rounds for step in steps_of(ranks)] for system, rounds in turns.items()}
    ddp = median(steps["ddp"])
    floor = median(steps[FLOOR]) if FLOOR in steps else ddp
    return [_row(system, steps[system], rounds, floor, ddp) for system, rounds in turns.items()]


def _row(
    system: str, steps: Sequence[float], rounds: Sequence[Sequence[Turned]], floor: float, ddp: float
) -> SystemFigures:
    flat = [turned for ranks in rounds for turned in ranks]
    step, (low, high) = median(steps), np.quantile(steps, (0.25, 0.75)).tolist()
    reports = [turned.figures for turned in flat if turned.figures.get("plan")]
    engine = {
        key: median(report[key] for report in reports) if reports else None
        for key in ("exposed_s", "select_s", "decode_s", "bytes_sent", "achieved_density")
    }
    own = (engine["select_s"] or 0.0) + (engine["decode_s"] or 0.0)
    left = flat[-1].figures
    has_engine = isinstance(resolve_system(row_of(left.get("system", DEFAULT))), EngineSystem)
    wire = [turned.wire_bytes for turned in flat if turned.wire_bytes is not None]
    return SystemFigures(
        system=system,
        step_s=step,
        low_s=low,
        high_s=high,
        over_floor=step / floor,
        over_ddp=step / ddp,
        exposed_s=max(0.0, step - floor - own),
        awaited_s=engine["exposed_s"],
        select_s=engine["select_s"],
        decode_s=engine["decode_s"],
        bytes_sent=engine["bytes_sent"],
        wire_bytes=median(wire) if wire else None,
        density=engine["achieved_density"],
        buffers=median(len(report["plan"]) for report in reports) if reports else None,
        peak_bytes=max(turned.peak_bytes or 0 for turned in flat),
        plain_ddp=left.get("plain_ddp") if has_engine else None,
    )


def machine() -> dict[str, str]:
    """What the figures of a run depend on besides its settings."""
    kernels = "compiled" if native.usable() else "NumPy"
    versions = {"torch": torch.__version__, "lightning_safusion": __version__}
    return {"processor": platform.machine(), "cpu_kernels": kernels, **versions}


def plot_tables(tables: Sequence[tuple[str, Sequence[SystemFigures]]]) -> Figure:
    """Bars of the median steps, quartiles on them, a panel for each table with its title."""
    from matplotlib.figure import Figure  # an extra: only where something is drawn

    count = max(len(rows) for _, rows in tables)
    figure = Figure(figsize=(8, len(tables) * (1.1 + 0.32 * count)), layout="constrained")
    for axes, (title, rows) in zip(figure.subplots(len(tables), squeeze=False)[:, 0], tables, strict=True):
        ordered = list(reversed(rows))
        medians, lows, highs = (np.array([[row.step_s, row.low_s, row.high_s] for row in ordered]) * 1e3).T
        spread = [medians - lows, highs - medians]
        colors = [_COLORS.get(row.system, "#5b9e77") for row in ordered]
        axes.barh([row.system for row in ordered], medians, xerr=spread, color=colors, ecolor="#303030", capsize=2)
        for place, row in enumerate(ordered):
            axes.annotate(f"  {row.over_floor:.2f}x", (row.high_s * 1e3, place), va="center", fontsize="small")
        floor = next((row.step_s for row in rows if row.system == FLOOR), 0.0)
        axes.axvline(floor * 1e3, color=_COLORS[FLOOR], linestyle=":")
        axes.set_title(title, fontsize="small")
        axes.margins(x=0.12)
        axes.set_xlabel("ms per step (and times the floor)")
    return figure

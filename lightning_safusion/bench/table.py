"""A run as a table, as JSON, and as a picture."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.markup import escape
from rich.table import Table

from lightning_safusion.__about__ import __version__
from lightning_safusion.bench.medians import SystemFigures
from lightning_safusion.bench.workers import FLOOR, IN_STEP
from lightning_safusion.kernels import cpu as native

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {FLOOR: "#4878b0", IN_STEP: "#86a8cf", "ddp": "#8a8a8a"}


@dataclass(frozen=True)
class Conditions:
    """What a table was measured under.

    Args:
        job: What was trained, in words.
        workers: Workers, one thread each.
        bandwidth: Of the link of each; None for the loopback.
        density: Of sparse systems.
        parameters: Elements of the model.
        paced: The job's computation was slept through.
        scale: Sizes, and the link's rate in proportion, are this share of the job's.
    """

    job: str
    workers: int
    bandwidth: str | None
    density: float
    parameters: int
    paced: bool = False
    scale: float = 1.0

    @property
    def title(self) -> str:
        """All of it in a line."""
        paced = "paced: " if self.paced else ""
        scaled = f" (sizes and rate x {self.scale:g})" if self.scale != 1 else ""
        link = f"links of {self.bandwidth}{scaled}" if self.bandwidth else f"loopback{scaled}"
        size = f"{self.parameters / 1e6:.1f} M parameters"
        return f"{paced}{self.job}, {size}; {self.workers} workers, {link}, density {self.density:g}"


def build_table(rows: Sequence[SystemFigures], conditions: Conditions) -> Table:
    """One row per system, in the order given."""
    paced = "Paced: workers sleep through the computation. " if conditions.paced else ""
    table = Table(
        title=conditions.title,
        caption=f"{paced}Medians over the steps of all rounds; systems take turns in one run. quartiles: of the step. "
        "exposed: step less floor, selection and decoding. wire: sent by a worker's device, headers included.",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("system", no_wrap=True)
    headings = ("step\nms", "quartiles\nms", "over\nfloor", "exposed\nms", "select\nms", "decode\nms")
    for heading in (*headings, "sent\nkB", "wire\nkB", "density", "peak\nMB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        aside = " (ddp)" if row.plain_ddp and row.bytes_sent is None and "another hook" not in row.plain_ddp else ""
        table.add_row(
            escape(row.system) + aside,
            _ms(row.step_s),
            f"{_ms(row.low_s)} - {_ms(row.high_s)}",
            f"{row.over_floor:.2f}",
            _ms(row.exposed_s),
            _ms(row.select_s),
            _ms(row.decode_s),
            _number(row.bytes_sent, 1e3),
            _number(row.wire_bytes, 1e3),
            "" if row.density is None else f"{row.density:.2%}",
            _number(row.peak_bytes, 2**20),
        )
    return table


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _number(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:,.0f}"


def as_record(rows: Sequence[SystemFigures], conditions: Conditions) -> dict[str, Any]:
    """Conditions, machine and rows as plain values."""
    systems = [asdict(row) for row in rows]
    return {"title": conditions.title, **asdict(conditions), "machine": machine(), "systems": systems}


def machine() -> dict[str, str]:
    """What the figures of a run depend on besides its settings."""
    kernels = "compiled" if native.usable() else "NumPy"
    versions = {"torch": torch.__version__, "lightning_safusion": __version__}
    return {"processor": platform.machine(), "cpu_kernels": kernels, **versions}


def write_json(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the records of a run."""
    path.write_text(json.dumps(list(records), indent=1), encoding="utf-8")


def plot_tables(tables: Sequence[tuple[Conditions, Sequence[SystemFigures]]]) -> Figure:
    """Bars of the median steps, quartiles on them, a panel for each table."""
    from matplotlib.figure import Figure  # an extra: only where something is drawn

    count = max(len(rows) for _, rows in tables)
    figure = Figure(figsize=(8, len(tables) * (1.1 + 0.32 * count)), layout="constrained")
    for axes, (conditions, rows) in zip(figure.subplots(len(tables), squeeze=False)[:, 0], tables, strict=True):
        ordered = list(reversed(rows))
        medians = [row.step_s * 1e3 for row in ordered]
        spread = [
            [(row.step_s - row.low_s) * 1e3 for row in ordered],
            [(row.high_s - row.step_s) * 1e3 for row in ordered],
        ]
        colors = [_COLORS.get(row.system, "#5b9e77") for row in ordered]
        axes.barh([row.system for row in ordered], medians, xerr=spread, color=colors, ecolor="#303030", capsize=2)
        for place, row in enumerate(ordered):
            axes.annotate(f"  {row.over_floor:.2f}x", (row.high_s * 1e3, place), va="center", fontsize="small")
        floor = next(row.step_s for row in rows if row.system == FLOOR)
        axes.axvline(floor * 1e3, color=_COLORS[FLOOR], linestyle=":")
        axes.set_title(conditions.title, fontsize="small")
        axes.margins(x=0.12)
        axes.set_xlabel("ms per step (and times the floor)")
    return figure

"""The figures of a run over links, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from lightning_safusion.literal import plural
from lightning_safusion.tools.bench.results import SystemFigures, machine
from lightning_safusion.tools.tables import RowName, plain_table


@dataclass(frozen=True)
class Conditions:
    """What a table was measured under.

    Args:
        job: What was trained, in words.
        workers: Workers, one thread each.
        bandwidth: Of the link of each; None for the loopback.
        density: Of sparse systems.
        parameters: Elements of the model.
        paced: Workers slept through the job's computation.
        scale: Sizes, and the link's rate in proportion, are this share of the job's.
        slow_motion: Computation and links take so many times as long as the job's.
    """

    job: str
    workers: int
    bandwidth: str | None
    density: float
    parameters: int
    paced: bool = False
    scale: float = 1.0
    slow_motion: float = 1.0

    @property
    def title(self) -> str:
        """All of it in a line."""
        paced = "paced: " if self.paced else ""
        scaled = f" (sizes and rate x {self.scale:g})" if self.scale != 1 else ""
        scaled += f", in slow motion x {self.slow_motion:g}" if self.slow_motion != 1 else ""
        link = f"links of {self.bandwidth}{scaled}" if self.bandwidth else f"loopback{scaled}"
        size = f"{self.parameters / 1e6:.1f} M parameters"
        return f"{paced}{self.job}, {size}; {plural(self.workers, 'worker')}, {link}, density {self.density:g}"


def build_table(rows: Sequence[SystemFigures], conditions: Conditions) -> Table:
    """One row per system, in the order given."""
    paced = "Paced: workers sleep through the computation. " if conditions.paced else ""
    table = plain_table(
        conditions.title,
        f"{paced}Medians over the steps of all rounds; systems take turns in one run. quartiles: of the step. "
        "exposed: step less floor, selection and decoding. wire: sent by a worker's device, headers included.",
        "system",
        ("step\nms", "quartiles\nms", "over\nfloor", "exposed\nms", "select\nms", "decode\nms")
        + ("sent\nkB", "wire\nkB", "density", "peak\nMB"),
    )
    for row in rows:
        table.add_row(
            RowName(row.system, after=" (ddp)" * row.by_ddp),
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

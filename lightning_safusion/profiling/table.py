"""The figures of a round of steps as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from lightning_safusion.literal import literal
from lightning_safusion.profiling.figures import PARTS, BufferRow, RankFigures

_VISIBLE = 5e-6  # seconds that the table does not round to nothing


def build_table(title: str, figures: RankFigures, buffers: Sequence[BufferRow], worst: int = 5) -> RenderableType:
    """Where a step's time went, and the buffers that were exposed longest.

    Args:
        title: Heading.
        figures: Of all ranks.
        buffers: Of :func:`~lightning_safusion.profiling.figures.buffer_means`.
        worst: Buffers to show.
    """
    mean = figures.mean
    table = _table(title)
    for column in ("", "ms, mean\nof ranks", "ms, longest\nof ranks", "share of\nthe step"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for part, label in {**PARTS, "step": "step", "exchange": "exchange under way"}.items():
        value = getattr(mean, f"{part}_s")
        if value == value:
            share = f"{value / mean.step_s:.1%}" if mean.step_s > 0 else ""
            table.add_row(label, f"{value * 1e3:.2f}", f"{figures.longest(f'{part}_s') * 1e3:.2f}", share)
        if part in ("other", "step"):
            table.add_section()
    late = sorted((row for row in buffers if row.exposed_s >= _VISIBLE), key=lambda row: -row.exposed_s)[:worst]
    parts: list[RenderableType] = [table, _remarks(figures)]
    return Group(*parts, _buffer_table(late, len(buffers))) if late else Group(*parts)


def _table(title: str) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)


def _remarks(figures: RankFigures) -> str:
    rank, behind = figures.slowest
    parts = []
    if figures.mean.overlap_ratio == figures.mean.overlap_ratio:
        parts.append(f"{figures.mean.overlap_ratio:.1%} of the exchange overlaps with computation.")
    if len(figures.ranks) > 1:
        parts.append(f"Rank {rank} works longest, {behind * 1e3:.2f} ms longer than the median rank.")
    return " ".join(parts)


def _buffer_table(rows: Sequence[BufferRow], count: int) -> Table:
    table = _table(f"Longest exposed of {count} buffers (rank 0, ms)")
    table.add_column("tensors", overflow="ellipsis", no_wrap=True, ratio=1)
    for column in ("kB sent", "selection", "exchange", "exposed", "decoding"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        times = [f"{each * 1e3:.2f}" for each in (row.select_s, row.exchange_s, row.exposed_s, row.decode_s)]
        table.add_row(literal(row.name), f"{row.bytes_sent / 1e3:,.1f}", *times)
    return table

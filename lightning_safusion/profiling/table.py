"""The figures of a round of steps as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from lightning_safusion.literal import literal
from lightning_safusion.profiling.figures import RankFigures

_VISIBLE = 5e-6  # seconds that the table does not round to nothing

PARTS = {
    "data_s": "data",
    "forward_s": "forward",
    "backward_s": "backward",
    "select_s": "selection",
    "exposed_s": "exposed exchange",
    "decode_s": "decoding",
    "optimizer_s": "optimizer",
    "other_s": "other",
    "step_s": "step",
    "exchange_s": "exchange under way",
}


def build_table(
    title: str, figures: RankFigures, buffers: Sequence[Mapping[str, Any]], worst: int = 5
) -> RenderableType:
    """Where a step's time went, and the buffers that were exposed longest.

    Args:
        title: Heading.
        figures: Of all ranks.
        buffers: Rows of :func:`buffer_means`.
        worst: Buffers to show.
    """
    mean = figures.mean
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column in ("", "ms, mean\nof ranks", "ms, longest\nof ranks", "share of\nthe step"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for key, label in PARTS.items():
        value = getattr(mean, key)
        if value == value:
            share = f"{value / mean.step_s:.1%}" if mean.step_s > 0 else ""
            table.add_row(label, f"{value * 1e3:.2f}", f"{figures.longest(key) * 1e3:.2f}", share)
        if key in ("other_s", "step_s"):
            table.add_section()
    late = sorted((row for row in buffers if row["exposed_s"] >= _VISIBLE), key=lambda row: -row["exposed_s"])[:worst]
    parts: list[RenderableType] = [table, _remarks(figures)]
    return Group(*parts, _buffer_table(late, len(buffers))) if late else Group(*parts)


def _remarks(figures: RankFigures) -> str:
    rank, behind = figures.slowest
    parts = []
    if figures.mean.overlap_ratio == figures.mean.overlap_ratio:
        parts.append(f"{figures.mean.overlap_ratio:.1%} of the exchange overlaps with computation.")
    if len(figures.ranks) > 1:
        parts.append(f"Rank {rank} works longest, {behind * 1e3:.2f} ms longer than the median rank.")
    return " ".join(parts)


def _buffer_table(rows: Sequence[Mapping[str, Any]], count: int) -> Table:
    table = Table(
        title=f"Longest exposed of {count} buffers (rank 0, ms)",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
    )
    table.add_column("tensors", overflow="ellipsis", no_wrap=True, ratio=1)
    for column in ("kB sent", "selection", "exchange", "exposed", "decoding"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        more = f" +{len(row['tensors']) - 1}" if len(row["tensors"]) > 1 else ""
        times = [f"{row[key] * 1e3:.2f}" for key in ("select_s", "exchange_s", "exposed_s", "decode_s")]
        table.add_row(literal(row["tensors"][0] + more), f"{row['bytes_sent'] / 1e3:,.1f}", *times)
    return table

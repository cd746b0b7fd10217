"""Where the time of steps went, in numbers: of a step, of a rank, of all ranks; and as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from math import isnan, nan

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from lightning_safusion.literal import literal, plural
from lightning_safusion.profiling.timeline import Interval, StepTimeline, buffer_name, merge, subtract, total

PARTS = {
    "data": "data loading",
    "forward": "forward",
    "backward": "backward",
    "select": "selection and packing",
    "exposed": "exposed exchange",
    "decode": "decoding",
    "optimizer": "optimizer",
    "other": "everything else",
}
"""Labels of the parts of a step, ``<part>_s`` of :class:`StepFigures`. On the CPU they add up to the step."""

_VISIBLE = 5e-6  # seconds that the table does not round to 0
_SHOWN = 5  # buffers of the table


@dataclass(frozen=True)
class StepFigures:
    """Seconds of one step on one rank, or means of such.

    Those of the exchange are NaN in steps in which this package exchanged nothing, as with plain DDP. On the CPU,
    ``step = data + forward + backward + select + exposed + decode + optimizer + other``. On CUDA selection and decoding
    run beside the backward pass.

    Args:
        step_s: The whole step, from the end of the one before it.
        data_s: Between batches: loading, other callbacks, and Lightning's own messages between workers.
        forward_s: From the beginning of a batch, or the last backward pass, to the next backward pass.
        backward_s: Backward passes, without selection, exposed exchange and decoding.
        select_s: Compensation, selection and packing of all buffers.
        exchange_s: At least one collective was under way; a worker that others wait for makes it longer.
        exposed_s: The backward pass stood still for an exchange (non-overlapped communication time, NOCT).
        decode_s: Reading what arrived.
        optimizer_s: Gradient clipping and the optimizer's step.
        other_s: Everything else.
        work_s: Forward, backward, selection, decoding and optimizer, counted once where they overlap.
        overlap_ratio: Share of ``exchange_s`` during which the rank computed.
        bytes_sent: Bytes that this rank handed to its collectives.
    """

    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    select_s: float
    exchange_s: float
    exposed_s: float
    decode_s: float
    optimizer_s: float
    other_s: float
    work_s: float
    overlap_ratio: float
    bytes_sent: float

    @classmethod
    def of(cls, step: StepTimeline) -> StepFigures:
        """The figures of a step; ``overlap_ratio`` is that of HolisticTraceAnalysis, ``get_comm_comp_overlap``."""
        backward = total(step.spans("backward"))
        outside = total(step.spans("data", "forward", "optimizer"))
        exchange = merge(buffer.exchange for buffer in step.buffers)
        communication = total(exchange)

        def exchanged(intervals: Sequence[Interval]) -> float:
            return total(intervals) if step.windows else nan

        return cls(
            step_s=step.end - step.begin,
            data_s=total(step.spans("data")),
            forward_s=total(step.spans("forward")),
            backward_s=total(step.backward),
            select_s=exchanged([b.select for b in step.buffers]),
            exchange_s=exchanged(exchange),
            exposed_s=exchanged([b.exposed for b in step.buffers]),
            decode_s=exchanged([b.decode for b in step.buffers]),
            optimizer_s=total(step.spans("optimizer")),
            other_s=max(0.0, step.end - step.begin - backward - outside),
            work_s=total(step.computing),
            overlap_ratio=1 - total(subtract(exchange, step.computing)) / communication if communication > 0 else nan,
            bytes_sent=float(sum(b.events.bytes_sent for b in step.buffers)) if step.windows else nan,
        )

    @classmethod
    def mean(cls, figures: Sequence[StepFigures]) -> StepFigures:
        """The mean of each number; NaN if it is NaN in all of them."""
        return cls(*_nanmean(np.array([astuple(each) for each in figures]).reshape(-1, len(fields(cls)))).tolist())

    def as_dict(self) -> dict[str, float]:
        """The numbers by name, without those that are NaN."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) == value}


def _nanmean(values: np.ndarray) -> np.ndarray:
    """float64, means over the first dimension without NaN; NaN where nothing is left (numpy's own warns there)."""
    counts = (~np.isnan(values)).sum(axis=0)
    return np.where(counts > 0, np.nansum(values, axis=0) / np.maximum(counts, 1), nan)


@dataclass(frozen=True)
class RankFigures:
    """The means of every rank over the same steps."""

    ranks: tuple[StepFigures, ...]

    @property
    def mean(self) -> StepFigures:
        """The mean over ranks."""
        return StepFigures.mean(self.ranks)

    @property
    def slowest(self) -> tuple[int, float]:
        """The rank with the longest ``work_s``, and seconds by which it exceeds the (lower) median rank's."""
        seconds = [each.work_s for each in self.ranks]
        rank = max(range(len(seconds)), key=seconds.__getitem__)
        return rank, seconds[rank] - sorted(seconds)[(len(seconds) - 1) // 2]

    def as_dict(self) -> dict[str, float]:
        """The means by name, ``slowest_rank`` and ``skew_s``; without what was not measured."""
        rank, skew = self.slowest
        return self.mean.as_dict() | ({} if isnan(skew) else {"slowest_rank": rank, "skew_s": skew})


@dataclass(frozen=True)
class BufferRow:
    """Means of one buffer over the steps that had the same plan; seconds that were not measured are NaN."""

    tensors: tuple[str, ...]  # names, in ready order
    collective: str  # ``"allgather"``, ``"allreduce"`` or ``"stream"``
    elements: int  # elements of its tensors
    capacity: int  # elements that its message has room for
    bytes_sent: int  # bytes that this rank gave to the collective
    bytes_received: int  # bytes that it received
    steps: int  # steps that the means are over
    ready_s: float  # seconds from the beginning of the first backward pass to its last gradient
    select_s: float  # seconds of compensation, selection and packing
    exchange_s: float  # seconds of the collective
    exposed_s: float  # seconds of it for which the backward pass stood still
    decode_s: float  # seconds of decoding


def buffer_means(steps: Sequence[StepTimeline]) -> list[BufferRow]:
    """One row per buffer of the last step's plan, in launch order: means over the steps that had the same plan."""
    if not steps or not steps[-1].buffers:
        return []
    plans = [[buffer.tensors for buffer in step.buffers] for step in steps]
    alike = [step for step, plan in zip(steps, plans, strict=True) if plan == plans[-1]]
    means = _nanmean(np.array([_buffer_times(step) for step in alike])).tolist()
    rows = []
    for last, times in zip(steps[-1].buffers, means, strict=True):
        events = last.events
        counts = (events.elements, events.capacity, events.bytes_sent, events.bytes_received, len(alike))
        rows.append(BufferRow(last.tensors, events.collective, *counts, *times))
    return rows


def _buffer_times(step: StepTimeline) -> np.ndarray:
    """float64 [B, 5]: the seconds of :class:`BufferRow` in one step."""
    spans = step.spans("backward")
    begin = spans[0][0] if spans else step.begin
    moments = np.array([[*b.select, *b.exchange, *b.exposed, *b.decode] for b in step.buffers])
    lengths = np.maximum(0.0, moments[:, 1::2] - moments[:, ::2])
    return np.column_stack([moments[:, 0] - begin, lengths])


def build_table(title: str, figures: RankFigures, buffers: Sequence[BufferRow]) -> RenderableType:
    """Where a step's time went, and the buffers that were exposed longest."""
    mean, (rank, skew) = figures.mean, figures.slowest
    table = _table(title)
    for column in ("", "ms, mean\nof ranks", "ms, longest\nof ranks", "share of\nthe step"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for part, label in {**PARTS, "step": "step", "exchange": "exchange under way"}.items():
        value = getattr(mean, f"{part}_s")
        if value == value:
            longest = np.fmax.reduce([getattr(each, f"{part}_s") for each in figures.ranks])
            share = f"{value / mean.step_s:.1%}" if mean.step_s > 0 else ""
            table.add_row(label, f"{value * 1e3:.2f}", f"{longest * 1e3:.2f}", share)
        if part in ("other", "step"):
            table.add_section()
    remarks = []
    if mean.overlap_ratio == mean.overlap_ratio:
        remarks.append(f"{mean.overlap_ratio:.1%} of the exchange overlaps with computation.")
    if len(figures.ranks) > 1:
        remarks.append(f"Rank {rank} works longest, {skew * 1e3:.2f} ms longer than the median rank.")
    late = sorted((row for row in buffers if row.exposed_s >= _VISIBLE), key=lambda row: -row.exposed_s)[:_SHOWN]
    parts: list[RenderableType] = [table, " ".join(remarks)]
    return Group(*parts, _buffer_table(late, len(buffers))) if late else Group(*parts)


def _buffer_table(rows: Sequence[BufferRow], count: int) -> Table:
    table = _table(f"Longest exposed of {plural(count, 'buffer')} (rank 0, ms)")
    table.add_column("tensors", overflow="ellipsis", no_wrap=True, ratio=1)
    for column in ("kB sent", "selection", "exchange", "exposed", "decoding"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        times = [f"{each * 1e3:.2f}" for each in (row.select_s, row.exchange_s, row.exposed_s, row.decode_s)]
        table.add_row(literal(buffer_name(row.tensors)), f"{row.bytes_sent / 1e3:,.1f}", *times)
    return table


def _table(title: str) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)

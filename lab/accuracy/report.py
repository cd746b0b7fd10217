"""Times to accuracy as a table, as JSON, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich.table import Table

from lab.accuracy.reached import ACCURACY_BELOW, LOSS_ABOVE, Reached
from lab.tasks import Task
from lightning_safusion.tools.bench.results import machine
from lightning_safusion.tools.tables import RowName, plain_table


@dataclass(frozen=True)
class Setting:
    """What rows were compared under.

    Args:
        task: What was trained.
        workers: Workers, one thread each.
        bandwidth: Of the link of each; None for the loopback.
        density: Of rows that have none of their own.
        seeds: Of weights and batches.
    """

    task: Task
    workers: int
    bandwidth: str | None
    density: float
    seeds: tuple[int, ...]

    @property
    def title(self) -> str:
        """All of it in a line."""
        link = f"links of {self.bandwidth}" if self.bandwidth else "loopback"
        seeds = f"seeds {', '.join(map(str, self.seeds))}"
        return f"{self.task.name}: {self.workers} workers, {link}, density {self.density:g}, {seeds}"

    @property
    def target(self) -> str:
        """The metric that rows must reach, in words."""
        if self.task.higher_is_better:
            return f"DDP's accuracy at its end, seed by seed, less {ACCURACY_BELOW * 100:g} points"
        return f"DDP's loss at its end, seed by seed, plus {LOSS_ABOVE:.0%}"


def build_table(rows: Sequence[Reached], setting: Setting, floor_s: float) -> Table:
    """One row per system, in the order given.

    Args:
        rows: When each reached the target.
        setting: Under what.
        floor_s: Seconds of a step without any exchange.
    """
    table = plain_table(
        f"Time to accuracy, {setting.title}",
        f"Target: {setting.target}. Seconds: steps to the target (virtual workers) times the median step (real ones on "
        "the link, in turns); mean over the seeds that reach it, lowest to highest. PowerSGD's ten dense steps count "
        f"as DDP's. A step without any exchange takes {floor_s * 1e3:.1f} ms.",
        "row",
        ("seconds to\ntarget", "lowest to\nhighest", "steps to\ntarget", "step\nms", "wire\nkB")
        + (f"{setting.task.metric}\nat the end", "reached"),
    )
    for row in rows:
        known = [value for value in row.seconds.values() if value is not None]
        table.add_row(
            RowName(row.name),
            "never" if row.mean_seconds is None else f"{row.mean_seconds:.1f}",
            f"{min(known):.1f} - {max(known):.1f}" if known else "",
            "" if row.mean_steps is None else f"{row.mean_steps:.0f}",
            f"{row.times.step_s * 1e3:.1f}",
            "" if row.times.wire_bytes is None else f"{row.times.wire_bytes / 1e3:,.0f}",
            _end(row, setting.task),
            f"{row.reached} of {len(row.steps)}",
        )
    return table


def _end(row: Reached, task: Task) -> str:
    known = [end for end in row.ends.values() if end is not None]
    if len(known) < len(row.ends):
        return f"{len(row.ends) - len(known)} diverged"
    mean = sum(known) / len(known)
    return f"{mean:.2%}" if task.higher_is_better else f"{mean:.4f}"


def as_record(rows: Sequence[Reached], setting: Setting, floor_s: float) -> dict[str, Any]:
    """Setting, machine and rows as plain values."""
    return {
        "title": setting.title,
        "task": setting.task.name,
        "recipe": setting.task.recipe(),
        "workers": setting.workers,
        "bandwidth": setting.bandwidth,
        "density": setting.density,
        "seeds": list(setting.seeds),
        "target": setting.target,
        "floor_s": floor_s,
        "machine": machine(),
        "rows": [
            asdict(row) | {"reached": row.reached, "mean_steps": row.mean_steps, "mean_seconds": row.mean_seconds}
            for row in rows
        ],
    }


def plot_rows(tables: Sequence[tuple[Setting, Sequence[Reached]]]) -> Figure:
    """The metric over seconds on the link: a line for each row, a panel for each link; dotted: the target is met."""
    figure = Figure(figsize=(8, 4.5 * len(tables)), layout="constrained")
    colors = colormaps["tab20"].colors  # type: ignore[attr-defined]  # of listed colormaps only
    for axes, (setting, rows) in zip(figure.subplots(len(tables), squeeze=False)[:, 0], tables, strict=True):
        for place, row in enumerate(rows):
            if not row.curve:
                continue
            color = "black" if row.name == "ddp" else colors[place % len(colors)]
            label = row.name if row.mean_seconds is None else f"{row.name}: {row.mean_seconds:.1f} s"
            axes.plot(*zip(*row.curve, strict=True), color=color, label=label, linewidth=1.5)
            if row.mean_seconds is not None:
                axes.axvline(row.mean_seconds, color=color, linestyle=":", linewidth=0.8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
        axes.set_title(setting.title, fontsize="small")
        axes.set_xlabel("seconds on the link (dotted, and in the legend: the target is reached, mean over the seeds)")
        axes.set_ylabel(f"held-out {setting.task.metric}, mean over the seeds")
        axes.legend(fontsize="x-small")
        axes.grid(alpha=0.3)
    return figure

"""``safusion plan``: what each system would do on a cluster, which settings to take, and whether it is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_safusion.literal import literal
from lightning_safusion.simulate.calibration import Calibration
from lightning_safusion.simulate.cluster import Cluster, resolve_link
from lightning_safusion.simulate.comparison import (
    PlanRow,
    accuracy_note,
    plan_table,
    settings_yaml,
    sweep_table,
    verdict,
    write_records,
)
from lightning_safusion.simulate.job import Job
from lightning_safusion.simulate.pictures import plot_sweep, plot_table
from lightning_safusion.simulate.trace import resolve_trace
from lightning_safusion.systems import SYSTEMS

#: Values of a sweep that names none.
SWEEPS: dict[str, tuple[str, ...]] = {
    "bandwidth": ("1gbit", "10gbit", "25gbit", "50gbit", "100gbit", "200gbit", "400gbit"),
    "density": ("0.001", "0.002", "0.005", "0.01", "0.02", "0.05", "0.1"),
    "nodes": ("2", "4", "8", "16", "32"),
}
_AXES = {"bandwidth": "gbit", "density": "density", "nodes": "workers"}


def run_plan(
    trace: str = "bert-large",
    nodes: int = 8,
    gpus_per_node: int = 8,
    bandwidth: str = "25gbit",
    density: float = 0.01,
    entry_bytes: float = 6.0,
    selection: str = "threshold",
    jitter: float | None = None,
    seed: int = 0,
    calibration: str | None = None,
    systems: str | list[str] | None = None,
    sweep: str | None = None,
    output: str | None = None,
) -> None:
    """Predicts what each system would do on a cluster, and which settings to take.

    Args:
        trace: Name of a trace that comes with the package, or the path of a JSON file.
        nodes: Nodes of the cluster.
        gpus_per_node: Workers in each node; they share its network card.
        bandwidth: Of one node's network card, such as 25gbit.
        density: Share of the gradient that sparse systems send.
        entry_bytes: Bytes of a sent entry with its position: 8, 6 or 4.
        selection: "exact" (top-k) or "threshold".
        jitter: Relative standard deviation of computing times between workers; by default that of the calibration, or
            none.
        seed: Of the jitter.
        calibration: JSON file of "safusion bench --calibrate": its costs replace bandwidth, entry_bytes and those of
            selection.
        systems: Systems to compare, separated by commas; all by default.
        sweep: Also vary something: "bandwidth", "density" or "nodes", or with values, as in "bandwidth=10gbit,25gbit";
            several are separated by spaces.
        output: Folder for tables (CSV, JSON), settings (YAML) and pictures (PNG).

    Raises:
        ValueError: If a name is unknown or a number makes no sense.
    """
    job_trace = resolve_trace(trace)
    costs = Calibration.load(calibration) if calibration is not None else None
    if costs is not None:
        cluster = costs.cluster(nodes, gpus_per_node, jitter, seed)
        entry_bytes, bandwidth = costs.entry_bytes, f"the rate of {calibration}"
    else:
        cluster = Cluster(nodes, gpus_per_node, resolve_link(bandwidth), jitter=jitter or 0.0, seed=seed)
    options: dict[str, Any] = {"entry_bytes": entry_bytes, "selection": selection}
    over = parse_sweep(sweep) if sweep else {}
    if isinstance(systems, str):
        systems = [name.strip() for name in systems.split(",")]
    rows = plan_table(job_trace, cluster, density, systems, **options)
    job = Job(job_trace, cluster, density, **options)
    console = Console()
    console.print(build_table(rows, job, bandwidth))
    console.print(literal(f"Times of the trace: {job_trace.source or 'not stated'}. Predictions, not measurements."))
    if costs is not None:
        console.print(literal(f"Costs: {costs.source}."))
    console.print(verdict(rows))
    if (note := accuracy_note(rows, density)) is not None:
        console.print(note)
    settings = settings_yaml(rows, density)
    console.print(settings, markup=False, highlight=False)
    records = sweep_table(job_trace, cluster, density, systems, over=over, **options) if over else []
    if records:
        _print_sweep(console, records, list(over))
    if output is not None:
        _write(Path(output), rows, settings, records, list(over))
        console.print(literal(f"written to {output}"))


def parse_sweep(text: str) -> dict[str, list[str]]:
    """Reads ``"bandwidth=10gbit,25gbit density"``: names with values, or with the default ones."""
    over = {}
    for word in text.split():
        name, _, values = word.partition("=")
        if name not in SWEEPS:
            raise ValueError(f"cannot sweep over {name!r}: choose among {list(SWEEPS)}")
        chosen = [value for value in values.split(",") if value] if "=" in word else list(SWEEPS[name])
        if not chosen:
            raise ValueError(f"sweep over {name!r} has no values: give some, as in {name}={','.join(SWEEPS[name][:2])}")
        over[name] = chosen
    return over


def build_table(rows: Sequence[PlanRow], job: Job, bandwidth: str) -> Table:
    """The table that is printed, fastest first."""
    trace, cluster = job.trace, job.cluster
    title = (
        f"{trace.name}: {sum(trace.numels) / 1e6:.1f} M parameters in {len(trace.tensors)} tensors, "
        f"{trace.seconds * 1e3:.0f} ms alone; {cluster.nodes} x {cluster.gpus_per_node} workers at {bandwidth}; "
        f"density {job.density:g}"
    )
    caption = (
        "MB that a worker and a node receive; collectives started; speed-up over DDP in bf16; "
        "*: simulated only, not a system of the strategy"
    )
    if not all(row.comparable for row in rows):
        caption += (
            "; †: predicted without the work on the processors that the calibration has measured, so too fast beside "
            "the others, and never recommended"
        )
    table = Table(title=literal(title, "table.title"), caption=caption)
    table.add_column("system", no_wrap=True)
    for heading in ("ms", "exposed", "select", "MB", "node MB", "calls", "speed-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: row.iteration_s):
        table.add_row(
            "† " * (not row.comparable) + row.system + " *" * (row.system not in SYSTEMS),
            f"{row.iteration_s * 1e3:.1f}",
            f"{row.exposed_s * 1e3:.1f}",
            f"{row.select_s * 1e3:.1f}",
            f"{row.bytes_received / 1e6:.1f}",
            f"{row.node_bytes / 1e6:.1f}",
            str(row.collectives),
            f"{row.speedup:.2f}",
        )
    return table


def _print_sweep(console: Console, records: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """The fastest system of every combination, and DDP in bf16 beside it where it was asked for."""
    points: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        points.setdefault(tuple(record[_AXES[name]] for name in names), []).append(record)
    table = Table(title="fastest system")
    for name in names:
        table.add_column("effective Gbit/s" if name == "bandwidth" else _AXES[name], justify="right")
    for heading in ("system", "ms", "over bf16 DDP"):
        table.add_column(heading)
    for point, group in points.items():
        best = min(group, key=lambda record: (not record["comparable"], record["iteration_s"]))
        figures = [best["system"], f"{best['iteration_s'] * 1e3:.1f}", f"{best['speedup']:.2f}"]
        table.add_row(*(f"{value:g}" for value in point), *figures)
    console.print(table)


def _write(
    folder: Path, rows: Sequence[PlanRow], settings: str, records: Sequence[dict[str, Any]], names: Sequence[str]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    flat = [asdict(row) for row in rows]
    (folder / "settings.yaml").write_text(settings, encoding="utf-8")
    for suffix in ("csv", "json"):
        write_records(flat, folder / f"plan.{suffix}")
        if records:
            write_records(records, folder / f"sweep.{suffix}")
    pictures: dict[str, Any] = {"plan": plot_table(rows)}
    if len(names) == 1:
        pictures["sweep"] = plot_sweep(records, _AXES[names[0]])
    for name, figure in pictures.items():
        figure.savefig(folder / f"{name}.png", dpi=120)

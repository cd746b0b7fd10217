"""``safusion plan``: predictions for each system on a cluster, and the recommended settings, printed and as files."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from lightning_safusion.literal import literal
from lightning_safusion.lookup import check_name
from lightning_safusion.notation import split
from lightning_safusion.profiling.trace import Trace
from lightning_safusion.tools.accuracy import default_density
from lightning_safusion.tools.plan.calibration import Calibration
from lightning_safusion.tools.plan.cluster import Cluster, resolve_link
from lightning_safusion.tools.plan.comparison import (
    PlanRow,
    best_sparse,
    plan_table,
    recommend,
    sparse_rows,
    sweep_table,
    swept,
    when_to_compress,
)
from lightning_safusion.tools.plan.device import resolve_device
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.models import SHARDED, WHOLE, Models, models_of, sharded_job
from lightning_safusion.tools.plan.pictures import AXES, plot_sweep, plot_table
from lightning_safusion.tools.plan.traces import resolve_trace
from lightning_safusion.tools.tables import FigureTable, RowName, plain_table

#: Values of a sweep that names none.
SWEEPS: dict[str, tuple[str, ...]] = {
    "bandwidth": ("1gbit", "10gbit", "25gbit", "50gbit", "100gbit", "200gbit", "400gbit"),
    "density": ("0.001", "0.002", "0.005", "0.01", "0.02", "0.05", "0.1"),
    "nodes": ("2", "4", "8", "16", "32"),
}
FORMATS = ("table", "json", "yaml")
# The cluster where nothing says another one.
_NODES, _PER_NODE, _DEVICE = 8, 8, "a100"


def run_plan(
    trace: str = "bert-large",
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    sharded: bool = False,
    bandwidth: str = "25gbit",
    optimizer: str = "AdamW",
    density: float | None = None,
    entry_bytes: float = 6.0,
    device: str | None = None,
    jitter: float | None = None,
    seed: int = 0,
    calibration: str | None = None,
    systems: str | list[str] | None = None,
    sweep: str | None = None,
    format: str = "table",
    output: str | None = None,
) -> None:
    """Predicts the iteration of each system on a cluster, and recommends settings.

    Args:
        trace: Name of a trace that comes with the package, or the path of a JSON file.
        nodes: Nodes of the cluster; by default those of the calibration, or 8.
        gpus_per_node: Workers in each node, which share its network card; by default those of the calibration, or 8.
        sharded: The workers of a node have a shard of the model each, by FSDP2, and nodes have replicas
            (SAFusionModelParallelStrategy): rows are "hsdp" and "hsdp-bf16", FSDP2's own exchange between nodes;
            "saf-hsdp", the default system; and systems of the engine. What FSDP2 exchanges inside of a node counts as
            part of the times of the trace.
        bandwidth: Of one node's network card, such as 25gbit.
        optimizer: Class of the job's optimizer, such as AdamW or SGD ("schedule-free" for those of schedulefree):
            decides the density, and what is said about accuracy.
        density: Share of the gradient that sparse systems send; by default what SAFusionStrategy() takes with
            that optimizer.
        entry_bytes: Bytes of a sent entry with its position, of systems with lossless values: 8, 6 or 4. The default
            system has its own.
        device: "a100", "h100", or the JSON file that "python -m lab gpu" has written on one: the speeds by which the
            counted work of selecting, packing and decoding becomes seconds. By default that of the calibration, or
            "a100".
        jitter: Relative standard deviation of computing times between workers (between nodes, with sharded); by default
            that of the calibration, or none.
        seed: Of the jitter.
        calibration: JSON file of "safusion bench": its costs replace bandwidth, entry_bytes, and device where it was
            made on CPUs. With sharded it must be of two machines or more.
        systems: Systems to compare, separated by commas, with options as in "ddp,saf-pooled[wire=q2,density=0.1]"; all
            by default. Options are the arguments of SAFusionStrategy that change a prediction: density, compressor,
            fusion, scope, quota, collective, wire, dense_below, offload, select_by.
        sweep: Also vary something: "bandwidth", "density" or "nodes", or with values, as in "bandwidth=10gbit,25gbit";
            several are separated by spaces.
        format: What is printed: "table", for people; "json", all figures, sentences and settings; "yaml", the
            settings alone, a file for LightningCLI with the sentences as comments.
        output: Folder for tables (CSV, JSON), settings (YAML) and, with matplotlib, pictures (PNG).

    Raises:
        ValueError: If a name or an option is unknown, the strategy would refuse a row, a number makes no sense, or the
            calibration does not say on how many nodes its workers were and no option does; with sharded, if a row
            cannot exchange shards, or the calibration is of one machine.
    """
    check_name("format", format, FORMATS)
    models = SHARDED if sharded else WHOLE
    names = _names(systems, models)
    job_trace = resolve_trace(trace)
    density = default_density(optimizer) if density is None else density
    costs = Calibration.load(calibration) if calibration is not None else None
    nodes, gpus_per_node, origin = _placed(nodes, gpus_per_node, costs, calibration, sharded)
    found = resolve_device(device or (costs.device if costs is not None else None) or _DEVICE)
    if costs is not None:
        cluster = Cluster.calibrated(costs, nodes, gpus_per_node, jitter, seed, found)
        entry_bytes, bandwidth = costs.entry_bytes, f"the rate of {calibration}"
    else:
        cluster = Cluster(nodes, gpus_per_node, resolve_link(bandwidth), device=found, jitter=jitter or 0.0, seed=seed)
    job = Job(job_trace, cluster, density, entry_bytes)
    job = sharded_job(job, costs) if sharded else job
    over = parse_sweep(sweep) if sweep else {}
    swept(job, over)  # what is wrong ends the command before the simulation, which may be long
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)
    answer = _simulated(job, names, over, optimizer, calibrated=costs is not None)
    if format == "json":
        job_of = {"trace": trace, "nodes": nodes, "gpus_per_node": gpus_per_node, "bandwidth": bandwidth}
        print(json.dumps({**job_of, "density": density, "optimizer": optimizer, **asdict(answer)}, indent=1))
    elif format == "yaml":
        print(*(f"# {sentence}" for sentence in answer.sentences), _yaml(answer.settings), sep="\n", end="")
    else:
        title = _title(job, job_trace, f"{nodes} x {gpus_per_node} workers{origin} at {bandwidth}")
        _print(answer, models, title, _sources(job, job_trace, device, costs))
    if output is not None:
        _write(answer, models, Path(output), Console(stderr=format != "table"))


@dataclass(frozen=True)
class _Answer:
    """What was found, as JSON has it."""

    systems: list[PlanRow]
    swept: list[str]
    sweep: list[dict[str, Any]]
    sentences: list[str]
    settings: dict[str, Any]


def _simulated(
    job: Job, names: Sequence[str], over: Mapping[str, Sequence[str]], optimizer: str, calibrated: bool
) -> _Answer:
    models, console = models_of(job), Console(stderr=True)
    points = 1 + (prod(map(len, over.values())) if over else 0)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=points * len({models.baseline, *names}))

        def begin(name: str) -> None:
            progress.update(task, advance=1, description=escape(f"simulating {name}"))

        rows = plan_table(job, names, begin)
        records = sweep_table(job, names, over, begin) if over else []
        sentences, settings = recommend(rows, job.density, optimizer, job.cluster.workers, models)
        if not calibrated and sparse_rows(rows):
            sentences.insert(1, when_to_compress(rows, job))
    return _Answer(rows, list(over), records, sentences, settings)


def _yaml(settings: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(settings, sort_keys=False)) if settings else ""


def _print(answer: _Answer, models: Models, title: str, sources: Sequence[str]) -> None:
    console = Console()
    console.print(_plan_table(answer.systems, models, title))
    for sentence in (*sources, *answer.sentences):
        console.print(literal(sentence))
    console.print(_yaml(answer.settings), end="", markup=False, highlight=False)
    if answer.sweep:
        console.print(_sweep_table(answer.sweep, answer.swept, models))


def _sources(job: Job, trace: Trace, device: str | None, costs: Calibration | None) -> list[str]:
    """``device``: as it was given."""
    sharded, processors = models_of(job) is SHARDED, costs is not None and costs.select is not None
    inside = " What FSDP2 exchanges inside of nodes counts as part of them." if sharded else ""
    said = [f"Times of the trace: {trace.source or 'not stated'}.{inside} Predictions, not measurements."]
    if costs is not None:
        each = " Each worker counts as a node: these are costs between two workers." * (processors and not sharded)
        said.append(f"Costs: {costs.source}.{each}")
    if not processors:
        guessed = ""
        if device is None and costs is not None:
            unknown = " The calibration names none that is known: give --device."
            guessed = " It is the calibration's." if costs.device else unknown
        said.append(f"Device: {job.cluster.device.described}; its work is counted.{guessed}")
    return said


def _write(answer: _Answer, models: Models, folder: Path, console: Console) -> None:
    if answer.settings:
        (folder / "settings.yaml").write_text(_yaml(answer.settings), encoding="utf-8")
    _write_records([asdict(row) for row in answer.systems], folder / "plan")
    if answer.sweep:
        _write_records(answer.sweep, folder / "sweep")
    try:
        plot_table(answer.systems, models.dense).figure.savefig(folder / "plan.png", dpi=120)
        if len(answer.swept) == 1:
            plot_sweep(answer.sweep, *answer.swept).figure.savefig(folder / "sweep.png", dpi=120)
    except ModuleNotFoundError as error:
        console.print(literal(f"no pictures: {error}"))
    console.print(literal(f"written to {folder}"))


def _names(systems: str | list[str] | None, models: Models) -> list[str]:
    names = split(systems) if isinstance(systems, str) else list(models.compared if systems is None else systems)
    for name in names:
        models.row(name)
    return names


def _placed(
    nodes: int | None, gpus_per_node: int | None, costs: Calibration | None, file: str | None, sharded: bool
) -> tuple[int, int, str]:
    """Nodes and workers on each, as given or else those of the calibration; and which are the calibration's."""
    known: tuple[int, int] | None = (_NODES, _PER_NODE)
    if costs is not None:
        known = costs.machines if sharded else costs.placed
    if known is None and costs is not None and None in (nodes, gpus_per_node):
        where = f"{file} does not say on how many nodes its {costs.workers} workers were"
        raise ValueError(f"{where}: give --nodes and --gpus-per-node")
    taken = ["nodes"] * (nodes is None) + ["workers of a node"] * (gpus_per_node is None)
    origin = f" ({' and '.join(taken)} as in {file})" if taken and costs is not None else ""
    all_nodes, in_each = known or (0, 0)
    return all_nodes if nodes is None else nodes, in_each if gpus_per_node is None else gpus_per_node, origin


def parse_sweep(text: str) -> dict[str, list[str]]:
    """Reads ``"bandwidth=10gbit,25gbit density"``: names with values, or with the default ones.

    Raises:
        ValueError: If a name is unknown, or has no values after ``=``.
    """
    over = {}
    for word in text.split():
        name, _, values = word.partition("=")
        check_name("sweep", name, SWEEPS)
        chosen = [value for value in values.split(",") if value] if "=" in word else list(SWEEPS[name])
        if not chosen:
            raise ValueError(f"sweep over {name!r} has no values: give some, as in {name}={','.join(SWEEPS[name][:2])}")
        over[name] = chosen
    return over


def _title(job: Job, trace: Trace, hardware: str) -> str:
    """The job in a line; ``trace``: of the whole model; ``hardware``: workers and links."""
    sharded = "sharded inside of nodes; " if models_of(job) is SHARDED else ""
    return (
        f"{trace.name}: {sum(trace.numels) / 1e6:.1f} M parameters in {len(trace.tensors)} tensors, "
        f"{trace.seconds * 1e3:.0f} ms alone; {hardware}; {sharded}density {job.density:g}"
    )


def _plan_table(rows: Sequence[PlanRow], models: Models, title: str) -> Table:
    caption = (
        "device: ms that selecting, packing and decoding take of a worker, ~ as an order of magnitude; MB that a "
        "worker and a node receive; collectives started; over bf16: times as fast as "
        f"{models.dense} in bf16"
    )
    headings = ("ms", "exposed", "device", "MB", "node\nMB", "calls", "over\nbf16")
    table = plain_table(literal(title, "table.title"), caption, "system", headings)
    for row in sorted(rows, key=lambda row: row.iteration_s):
        table.add_row(
            RowName(row.system),
            *(f"{seconds * 1e3:.1f}" for seconds in (row.iteration_s, row.exposed_s)),
            "~" * (not row.counted) + f"{row.device_s * 1e3:.1f}",
            *(f"{nbytes / 1e6:.1f}" for nbytes in (row.bytes_received, row.node_bytes)),
            str(row.collectives),
            f"{row.speedup:.2f}",
        )
    return table


def _sweep_table(records: Sequence[dict[str, Any]], names: Sequence[str], models: Models) -> Table:
    points: dict[tuple[float, ...], list[dict[str, Any]]] = {}
    for record in records:
        points.setdefault(tuple(record[AXES[name][0]] for name in names), []).append(record)
    table = FigureTable("recommended system")
    for name in names:
        table.add_column(AXES[name][1].replace(" ", "\n", 1), no_wrap=True)
    table.add_column("system", overflow="fold")
    for heading in ("ms", f"over bf16\n{models.dense}"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point, group in points.items():
        rows = [PlanRow(**{each.name: record[each.name] for each in fields(PlanRow)}) for record in group]
        best = best_sparse(rows)
        name, speedup = (models.baseline, 1.0) if best is None else (best.system, best.speedup)
        seconds = rows[0].iteration_s * rows[0].speedup / speedup
        table.add_row(*(f"{value:g}" for value in point), RowName(name), f"{seconds * 1e3:.1f}", f"{speedup:.2f}")
    return table


def _write_records(records: Sequence[Mapping[str, Any]], stem: Path) -> None:
    stem.with_suffix(".json").write_text(json.dumps(records, indent=1), encoding="utf-8")
    with stem.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)

"""All systems on one cluster, as rows of figures, and sweeps over clusters and densities."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from lightning_safusion.simulate.cluster import Cluster, resolve_link
from lightning_safusion.simulate.engine import mean_iteration
from lightning_safusion.simulate.job import Job
from lightning_safusion.simulate.schedule import Iteration
from lightning_safusion.simulate.systems import SIMULATED, resolve_simulated
from lightning_safusion.simulate.trace import Trace, resolve_trace
from lightning_safusion.systems import SYSTEMS

#: What all systems are compared with: the dense exchange that is there for the taking.
BASELINE = "ddp-bf16"
# A gain below this share is not worth another gradient than DDP's.
_WORTH = 0.02
# Down to this density short trainings with AdamW end level with dense ones.
_SAFE_DENSITY = 0.05


@dataclass(frozen=True)
class PlanRow:
    """One system on one cluster.

    Args:
        system: Its name.
        iteration_s: Seconds of an iteration.
        exposed_s: Seconds by which it is longer than the trace alone: exchange, selection and jitter.
        select_s: Seconds of selection on the compute stream.
        bytes_received: Bytes that one worker receives.
        node_bytes: Bytes that enter one node.
        collectives: Collectives.
        waited_s: Seconds that the mean worker waits for others before collectives, summed over them.
        speedup: Over DDP in bf16.
        comparable: Whether it was predicted as the others were; see
            :class:`~lightning_safusion.simulate.schedule.Iteration`.
    """

    system: str
    iteration_s: float
    exposed_s: float
    select_s: float
    bytes_received: float
    node_bytes: float
    collectives: int
    waited_s: float
    speedup: float
    comparable: bool = True


def run_system(name: str, job: Job, iterations: int = 20) -> Iteration:
    """The mean iteration of one system."""
    return mean_iteration(job.trace, job.cluster, resolve_simulated(name).build(job), iterations)


def plan_table(
    trace: Trace | str,
    cluster: Cluster,
    density: float = 0.01,
    systems: Sequence[str] | None = None,
    **options: Any,
) -> list[PlanRow]:
    """What each system would do, in the order of ``systems``; all of them by default. ``options`` are those of
    :class:`Job`.

    Raises:
        ValueError: If a name is unknown or a number makes no sense.
    """
    job = Job(resolve_trace(trace), cluster, density, **options)
    names = list(SIMULATED) if systems is None else list(systems)
    results = {name: run_system(name, job) for name in dict.fromkeys([BASELINE, *names])}
    baseline = results[BASELINE].seconds
    rows = []
    for name in names:
        run = results[name]
        sent = (run.nbytes, run.node_bytes, run.collectives, run.waited)
        rows.append(PlanRow(name, run.seconds, run.exposed, run.select, *sent, baseline / run.seconds, run.comparable))
    return rows


def best_sparse(rows: Sequence[PlanRow]) -> PlanRow | None:
    """The fastest sparse system that can be run and loses nothing, if it is worth the change from DDP in bf16."""
    able = [row for row in rows if row.system in SYSTEMS and row.comparable]
    sparse = [row for row in able if SYSTEMS[row.system].sparse and SYSTEMS[row.system].conserves]
    best = min(sparse, key=lambda row: row.iteration_s, default=None)
    return best if best is not None and best.speedup > 1 + _WORTH else None


def verdict(rows: Sequence[PlanRow]) -> str:
    """What to take, in a sentence."""
    best = best_sparse(rows)
    if best is None:
        return "Dense DDP is the better choice here: no sparse system is faster than DDP in bf16 by more than 2 %."
    return (
        f"{best.system!r} takes {best.iteration_s * 1e3:.1f} ms per iteration, "
        f"{best.speedup:.2f} times as fast as DDP in bf16; {best.exposed_s * 1e3:.1f} ms are exposed."
    )


def accuracy_note(rows: Sequence[PlanRow], density: float) -> str | None:
    """What the recommendation says nothing of: whether the job learns as much. None where dense DDP is recommended."""
    if best_sparse(rows) is None:
        return None
    note = (
        f"Times say nothing about accuracy, which depends on the density ({density:g} here) and on the optimizer. In "
        "short trainings with the default system (docs/convergence.md), a small transformer with AdamW ended level "
        "with dense training at density 0.05, and with a loss 5.7 % above it at 0.01; vision models with SGD stayed "
        "within half a point at both."
    )
    if density < _SAFE_DENSITY:
        note += f" With Adam or AdamW begin at density {_SAFE_DENSITY:g} or more, and compare with a dense run."
    return note


def settings_yaml(rows: Sequence[PlanRow], density: float) -> str:
    """The best settings for LightningCLI: the fastest sparse system that loses nothing, or DDP in bf16."""
    best = best_sparse(rows)
    settings: dict[str, Any] = {"system": BASELINE}
    if best is not None:
        settings = {"system": best.system, "density": density}
    lines = ["trainer:", "  strategy:", "    class_path: lightning_safusion.SAFusionStrategy", "    init_args:"]
    return "\n".join([*lines, *(f"      {key}: {value}" for key, value in settings.items())]) + "\n"


def sweep_table(
    trace: Trace | str,
    cluster: Cluster,
    density: float = 0.01,
    systems: Sequence[str] | None = None,
    *,
    over: Mapping[str, Sequence[Any]],
    **options: Any,
) -> list[dict[str, Any]]:
    """The table for every combination of the values given.

    Args:
        trace: As of :func:`plan_table`.
        cluster: Likewise, as far as ``over`` does not say otherwise.
        density: Likewise.
        systems: Likewise.
        over: ``"bandwidth"`` (such as ``"25gbit"``), ``"density"``, ``"nodes"``: values to try.
        **options: Of :class:`Job`.

    Returns:
        One flat record per combination and system: nodes, workers, bandwidth, density, and the fields of
        :class:`PlanRow`.

    Raises:
        ValueError: If something else is to be varied.
    """
    unknown = set(over) - {"bandwidth", "density", "nodes"}
    if unknown:
        raise ValueError(f"cannot sweep over {sorted(unknown)}: choose among 'bandwidth', 'density' and 'nodes'")
    trace, records = resolve_trace(trace), []
    for values in product(*over.values()):
        point = dict(zip(over, values, strict=True))
        # what was measured holds for one number of workers and one link
        there = replace(cluster, measured={}) if {"nodes", "bandwidth"} & set(point) else cluster
        if "nodes" in point:
            there = replace(there, nodes=int(point["nodes"]))
        if "bandwidth" in point:
            there = replace(there, inter=resolve_link(str(point["bandwidth"])))
        sent = float(point.get("density", density))
        head = {
            "nodes": there.nodes,
            "workers": there.workers,
            "gbit": 8e-9 / there.inter.beta,
            "density": sent,
            **({"bandwidth": point["bandwidth"]} if "bandwidth" in point else {}),
        }
        records += [{**head, **asdict(row)} for row in plan_table(trace, there, sent, systems, **options)]
    return records


def write_records(records: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Writes flat records as CSV or JSON, by the suffix of the path."""
    path = Path(path)
    if path.suffix == ".json":
        path.write_text(json.dumps([dict(record) for record in records], indent=1), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(records[0]) if records else [])
            writer.writeheader()
            writer.writerows(records)
    else:
        raise ValueError(f"cannot write {path.name!r}: give a name that ends in .csv or .json")

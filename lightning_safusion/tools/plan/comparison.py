"""All systems on one cluster, as rows of figures; the recommendation; sweeps over clusters and densities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import inf
from typing import Any

from lightning_safusion.lookup import read_value
from lightning_safusion.systems import SHARDED_ROWS
from lightning_safusion.tools.accuracy import faster_row, known_accuracy
from lightning_safusion.tools.plan.cluster import resolve_link
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.models import WHOLE, Models, models_of
from lightning_safusion.tools.plan.rows import simulated_row
from lightning_safusion.tools.plan.systems import is_counted, run_system

#: Gbit/s between which the end of compression's gain is looked for.
RATES = (0.1, 1600.0)
_HALVINGS = 8
# A gain below this share is not worth another gradient than DDP's.
_WORTH = 0.02


@dataclass(frozen=True)
class PlanRow:
    """One row on one cluster, as files have it: the system as it is written, with its options; seconds and bytes of its
    :class:`~lightning_safusion.tools.plan.schedule.Iteration`, the speed-up over the dense exchange in bf16, and
    whether the work of the device was counted (or measured, on processors); else its time is an order of magnitude."""

    system: str
    iteration_s: float
    exposed_s: float
    select_s: float
    device_s: float
    bytes_received: float
    node_bytes: float
    collectives: int
    waited_s: float
    speedup: float
    counted: bool = True


def plan_table(job: Job, systems: Sequence[str], begin: Callable[[str], object] = str) -> list[PlanRow]:
    """The prediction for each row, in the order of ``systems``; ``begin`` is told which one is about to be simulated.

    Raises:
        ValueError: If there is no such row, or none of such a job; nothing was simulated then.
    """
    models = models_of(job)
    names = [models.row(name).name for name in systems]
    results = {}
    for name in dict.fromkeys([models.baseline, *names]):
        begin(name)
        results[name] = run_system(name, job)

    def row(name: str) -> PlanRow:
        run = results[name]
        times, sent = (run.seconds, run.exposed, run.select, run.device), (run.nbytes, run.node_bytes, run.collectives)
        counted = job.cluster.device.processors or is_counted(name)
        return PlanRow(name, *times, *sent, run.waited, results[models.baseline].seconds / run.seconds, counted)

    return [row(name) for name in names]


def sparse_rows(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Those that send less than all of every gradient."""
    return [row for row in rows if simulated_row(row.system).sparse]


def best_sparse(rows: Sequence[PlanRow]) -> PlanRow | None:
    """The fastest sparse row that loses no gradients, if it is worth the change from the dense exchange in bf16."""
    able = [row for row in sparse_rows(rows) if simulated_row(row.system).conserves]
    best = min(able, key=lambda row: row.iteration_s, default=None)
    return best if best is not None and best.speedup > 1 + _WORTH else None


def break_even(job: Job, system: str, baseline: str = WHOLE.baseline) -> float:
    """Gbit/s of a node's network card from which a system is no faster than another one: 0 or infinity where that holds
    at every rate that there is, or at none."""
    low, high = RATES

    def pays(rate: float) -> bool:
        there = replace(job, cluster=replace(job.cluster, inter=resolve_link(f"{rate}gbit"), measured={}))
        return run_system(baseline, there).seconds > (1 + _WORTH) * run_system(system, there).seconds

    if not pays(low):
        return 0.0
    if pays(high):
        return inf
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return high


def when_to_compress(rows: Sequence[PlanRow], job: Job) -> str:
    """Up to which bandwidth it pays to compress, and what that costs the device; a sparse row is among them."""
    best = best_sparse(rows) or min(sparse_rows(rows), key=lambda row: row.iteration_s)
    models = models_of(job)
    rate, dense = break_even(job, best.system, models.baseline), f"{models.dense} in bf16"
    system, work = repr(best.system), f"selection and decoding take {best.device_s * 1e3:.1f} ms of every step"
    if rate == 0:
        return f"Do not compress this job: at no bandwidth is {system}, whose {work}, faster than {dense}."
    if rate == inf:
        return f"Compression pays at every bandwidth up to {RATES[1]:g} Gbit/s, with {system}, whose {work}."
    shown = f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
    return f"From about {shown} Gbit/s on, {dense} is as fast as {system}, whose {work}: do not compress there."


def recommend(
    rows: Sequence[PlanRow], density: float, optimizer: str, workers: int = 2, models: Models = WHOLE
) -> tuple[list[str], dict[str, Any]]:
    """Sentences that recommend a system, and say which are faster; its settings for LightningCLI, empty where there was
    nothing to compare. ``density``: of rows without one of their own."""
    best, dense = best_sparse(rows), models.dense
    if not sparse_rows(rows):
        return [f"No sparse system was compared: add {models.default!r} to the systems."], {}
    if best is None:
        better = f"Dense {dense} is the better choice here"
        verdict = f"{better}: no sparse system is faster than {dense} in bf16 by more than 2 %."
        return [verdict], _settings(models, {"system": models.baseline})
    verdict = (
        f"{best.system!r} takes {best.iteration_s * 1e3:.1f} ms per iteration, "
        f"{best.speedup:.2f} times as fast as {dense} in bf16; {best.exposed_s * 1e3:.1f} ms are exposed."
    )
    row = simulated_row(best.system)
    arguments: dict[str, Any] = {"system": row.parts.system.name, "density": density, **row.options}
    accuracy = known_accuracy(row.known_as, arguments["density"], [optimizer], models.cautions, workers)
    others = [
        faster_row(each.system, f"{each.iteration_s * 1e3:.1f} ms", SHARDED_ROWS.get(each.system), dense)
        for each in rows
        if each.iteration_s * (1 + _WORTH) < best.iteration_s
    ]
    return [verdict, accuracy, *others], _settings(models, arguments)


def _settings(models: Models, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"trainer": {"strategy": {"class_path": models.strategy, "init_args": arguments}}}


def sweep_table(
    job: Job, systems: Sequence[str], over: Mapping[str, Sequence[Any]], begin: Callable[[str], object] = str
) -> list[dict[str, Any]]:
    """:func:`plan_table` for every combination of values: a flat record for each combination and system, of both.
    ``over``: values of ``"bandwidth"``, ``"density"`` (of rows that have none of their own) and ``"nodes"``."""
    records = []
    for head, point in swept(job, over):
        records += [{**head, **asdict(row)} for row in plan_table(point, systems, begin)]
    return records


def swept(job: Job, over: Mapping[str, Sequence[Any]]) -> list[tuple[dict[str, Any], Job]]:
    """The combinations of :func:`sweep_table`: what begins its records, and the job.

    Raises:
        ValueError: If a value makes no sense.
    """
    jobs = []
    for values in product(*over.values()):
        point = dict(zip(over, values, strict=True))
        cluster, density = job.cluster, read_value("density", str(point.get("density", job.density)), float)
        if {"nodes", "bandwidth"} & set(point):  # measured times hold for one number of workers and one link
            nodes = read_value("nodes", str(point.get("nodes", cluster.nodes)), int)
            cluster = replace(cluster, nodes=nodes, measured={})
        if "bandwidth" in point:
            cluster = replace(cluster, inter=resolve_link(str(point["bandwidth"])))
        head = {
            "nodes": cluster.nodes,
            "workers": cluster.workers * cluster.sharing,
            "gbit": cluster.inter.card_gbit,
            "density": density,
            **({"bandwidth": point["bandwidth"]} if "bandwidth" in point else {}),
        }
        jobs.append((head, replace(job, cluster=cluster, density=density)))
    return jobs

"""Jobs whose models are whole on every worker, or sharded inside of nodes: their rows, and their words.

FSDP2 shards a model among the workers of a node, and adds up gradients there as part of the backward pass. What is left
is an exchange between the workers that have the same shard, one of each node; all groups of them share the cards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_safusion.comm.catalogue import find_collective
from lightning_safusion.profiling.trace import Trace, TraceTensor
from lightning_safusion.systems import DEFAULT, SHARDED_ROWS, SYSTEMS, HookSystem
from lightning_safusion.tools.plan.calibration import Calibration
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.rows import SimulatedRow, simulated_row


@dataclass(frozen=True)
class Models:
    """What predictions say of a job, by where its model is."""

    dense: str  # what exchanges all of every gradient, in words
    baseline: str  # all rows are compared with this dense exchange in bf16, which needs no other package
    default: str  # the row of the default system
    strategy: str  # class that trains with the recommended settings
    compared: tuple[str, ...]  # rows that are compared where none are named
    cautions: tuple[str, ...] = ()  # what is to be said before what is known of accuracy

    def row(self, name: str) -> SimulatedRow:
        """Reads one row; a ValueError names one that there is not, or not of these models."""
        row = simulated_row(name)
        if reason := _unlike_sharded(row) if self is SHARDED else _unlike_whole(row):
            raise ValueError(f"row {name!r} {reason}")
        return row


def _unlike_whole(row: SimulatedRow) -> str | None:
    if row.head not in SHARDED_ROWS:
        return None
    return (
        f"is of models that are sharded inside of nodes: add --sharded true, or name {SHARDED_ROWS[row.head]!r} for "
        "models that are whole"
    )


def _unlike_sharded(row: SimulatedRow) -> str | None:
    if isinstance(row.parts.system, HookSystem) and row.head not in SHARDED_ROWS:
        return "works in DDP, and FSDP2 shards this model: its own exchange is 'hsdp' in fp32, 'hsdp-bf16' in bf16"
    collective = row.parts.settings.collective
    if find_collective(collective).levels:
        return f"adds up inside of nodes first, which FSDP2 has done already: leave out collective={collective!r}"
    return None


#: All systems, and exchanges that no system has of its own.
WHOLE = Models(
    dense="DDP",
    baseline="ddp-bf16",
    default=DEFAULT,
    strategy="lightning_safusion.SAFusionStrategy",
    compared=(
        *SYSTEMS,
        "safusion[collective=hierarchical]",
        "saf-pooled[collective=sharded]",
        "saf-pooled[collective=hierarchical-sharded]",
    ),
)
#: Those of the engine that exchange between nodes alone.
SHARDED = Models(
    dense="HSDP",
    baseline="hsdp-bf16",
    default="saf-hsdp",
    strategy="lightning_safusion.SAFusionModelParallelStrategy",
    compared=(
        *SHARDED_ROWS,
        *(name for name in SYSTEMS if name != DEFAULT and not _unlike_sharded(simulated_row(name))),
        "saf-hsdp[collective=sharded]",
    ),
    cautions=("Accuracy was measured with models that are whole on every worker",),
)


def models_of(job: Job) -> Models:
    return WHOLE if job.cluster.shards is None else SHARDED


def sharded_trace(trace: Trace, shards: int) -> Trace:
    """The same times, with the rows of the fullest shard: ``fully_shard`` cuts the first dimension, rounded up."""

    def cut(tensor: TraceTensor) -> TraceTensor:
        rows, *others = tensor.shape or (1,)
        return replace(tensor, shape=(-(-rows // shards), *others))

    return replace(trace, tensors=tuple(map(cut, trace.tensors)))


def sharded_job(job: Job, costs: Calibration | None = None) -> Job:
    """What a worker exchanges where those of a node have a shard each.

    Args:
        job: The same model whole on each worker.
        costs: Those of its cluster, if it has measured ones. A group of all workers does not show how long several
            take at once: only its link counts, unless each worker had a machine of its own.

    Raises:
        ValueError: If the costs are not those of a link between machines.
    """
    cluster, shards = job.cluster, job.cluster.gpus_per_node
    if costs is not None:
        alone = costs.machines[1] == shards == 1
        cluster = replace(cluster, inter=costs.card, measured=cluster.measured if alone else {})
    cluster = replace(cluster, gpus_per_node=1, shards=shards)
    return replace(job, trace=sharded_trace(job.trace, shards), cluster=cluster)

"""What the engine and its collectives take of shared processors: costs, and the simulator's job with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion.plans.costs import GroupCosts, SelectionCost
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.tools.plan.calibration import Calibration, CollectiveSample, CollectiveTimes
from lightning_safusion.tools.plan.cluster import Cluster, CollectiveCost
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.schedule import Message, Schedule


@dataclass(frozen=True)
class QueuedSample(CollectiveSample):
    """Collectives of one size, alone (``seconds``) and in a queue.

    Args:
        queued: Seconds between the ends of two that were launched at once: the latency of one hides behind the other.
        processor: Seconds of a core that one alone takes on each worker.
        processor_queued: The same of one in a queue.
    """

    queued: float = 0.0
    processor: float = 0.0
    processor_queued: float = 0.0


@dataclass(frozen=True)
class QueuedTimes(CollectiveTimes):
    """One kind of collective, see :class:`CollectiveTimes`."""

    samples: tuple[QueuedSample, ...]

    @override
    def at(self, nbytes: float) -> QueuedSample:
        found = super().at(nbytes)
        assert isinstance(found, QueuedSample)
        return found


@dataclass(frozen=True)
class StageCost:
    """Seconds of a core that one stage takes for a buffer.

    Args:
        fixed: For each buffer.
        per_tensor: For each tensor in it.
        per_element: For each element in it, or for each entry that is decoded.
    """

    fixed: float = 0.0
    per_tensor: float = 0.0
    per_element: float = 0.0

    def __call__(self, tensors: int, elements: float) -> float:
        """Seconds for a buffer."""
        return self.fixed + self.per_tensor * tensors + self.per_element * elements


@dataclass(frozen=True)
class Host:
    """Processors that do all the work of a worker, and that all workers of a machine may share.

    Args:
        cores: For each worker.
        forward: Share of the trace's forward pass in which the worker has a core.
        backward: The same of the backward pass.
        optimizer: The same of the optimizer's step.
        asleep: Share of the rest in which the worker sleeps (a paced job); in the other part it waited for a core.
        hook: Seconds that the engine takes for each gradient, besides the stages below.
        ahead: Selection before fusion, packing and the launch of the collective.
        behind: The same after fusion.
        decode: Decoding, by the entries of all workers.
        drain: Seconds that the end of a window takes besides, by the number of buffers.
    """

    cores: float
    forward: float = 1.0
    backward: float = 1.0
    optimizer: float = 1.0
    asleep: float = 1.0
    hook: float = 0.0
    ahead: StageCost = StageCost()
    behind: StageCost = StageCost()
    decode: StageCost = StageCost()
    drain: LinearCost = LinearCost(0.0, 0.0)


@dataclass(frozen=True)
class HostCosts:
    """All costs of a group on processors.

    Args:
        calibration: What ``safusion plan`` takes of them; its collectives have :class:`QueuedTimes`.
        host: Costs of a step on the processors of a worker.
    """

    calibration: Calibration
    host: Host

    def save(self, path: Path) -> None:
        """Writes what ``safusion plan`` reads: its collectives have no queue."""

        def alone(times: CollectiveTimes) -> CollectiveTimes:
            return CollectiveTimes(tuple(CollectiveSample(each.nbytes, each.seconds) for each in times.samples))

        known = self.calibration
        replace(known, allgather=alone(known.allgather), allreduce=alone(known.allreduce)).save(path)


@dataclass(frozen=True)
class HostCost(CollectiveCost):
    """The cost of one collective, with what it takes of the processors.

    Args:
        hidden: Seconds of it that hide behind the one before it in a queue: latency.
        processor: Seconds of a core that it takes on each worker, beside the thread that launches it.
        processor_hidden: Seconds of these that a queue saves.
    """

    hidden: float = 0.0
    processor: float = 0.0
    processor_hidden: float = 0.0

    @classmethod
    def of(cls, cost: CollectiveCost) -> HostCost:
        """The cost itself, or one that takes nothing of the processors."""
        return cost if isinstance(cost, HostCost) else cls(*astuple(cost))

    @override
    def __add__(self, other: CollectiveCost) -> HostCost:
        """One after the other."""
        pairs = zip(astuple(self), astuple(HostCost.of(other)), strict=True)
        return HostCost(*(mine + theirs for mine, theirs in pairs))

    __radd__ = __add__


@dataclass(frozen=True, kw_only=True)
class HostCluster(Cluster):
    """Workers that compute, select and do the network's work on processors.

    Args:
        host: Theirs.
    """

    host: Host

    @classmethod
    def of(cls, costs: HostCosts, nodes: int, **options: Any) -> HostCluster:
        """A cluster with measured costs, see :meth:`Cluster.calibrated`, and as many cores for each worker as there
        were."""
        plain = Cluster.calibrated(costs.calibration, nodes, **options)
        return cls(**{each.name: getattr(plain, each.name) for each in fields(plain)}, host=costs.host)

    @override
    def _timed(self, collective: str, nbytes: float, formula: CollectiveCost) -> CollectiveCost:
        if collective not in self.measured:
            return formula
        sample = self.measured[collective].at(nbytes)
        assert isinstance(sample, QueuedSample)
        return HostCost(
            sample.seconds,
            formula.nbytes,
            formula.node_bytes,
            max(0.0, sample.seconds - sample.queued),
            sample.processor,
            max(0.0, sample.processor - sample.processor_queued),
        )


@dataclass(frozen=True)
class HostJob(Job):
    """A trace on such a cluster.

    Args:
        fused_first: Elements are selected after fusion.
    """

    fused_first: bool = False

    @property
    def host(self) -> Host:
        """The processors of a worker."""
        assert isinstance(self.cluster, HostCluster)
        return self.cluster.host

    @override
    def schedule(self, plan: Plan, *, behind: bool = False) -> Schedule:
        return super(HostJob, replace(self, fused_first=behind)).schedule(plan, behind=behind)

    @override
    def group_costs(self, *, sparse: bool = True, dense: bool = False) -> GroupCosts:
        costs = super().group_costs(sparse=sparse, dense=dense)
        if not sparse:
            return costs
        each = self.host.ahead.per_tensor + self.host.decode.per_tensor
        ready = tuple(seconds + each * place for place, seconds in enumerate(costs.ready, 1))
        return replace(costs, ready=ready)

    @override
    def sparse_message(self, places: Sequence[int], *, select: bool) -> Message:
        message = super().sparse_message(places, select=select)
        entries = self.cluster.workers * float(self.sparse_bytes[list(places)].sum()) / self.entry_bytes
        return replace(message, decode=self.host.decode(len(places), entries))

    @override
    def select_seconds(self, places: Sequence[int]) -> float:
        stage = self.host.behind if self.fused_first else self.host.ahead
        return stage(len(places), self.span_of(places).elements)


def planned_costs(host: Host) -> dict[str, Any]:
    """``select`` and ``decode`` of a :class:`Calibration`: what of these costs ``safusion plan`` knows."""
    select = SelectionCost(host.ahead.fixed + host.decode.fixed, host.ahead.per_element)
    return {"select": select, "decode": host.decode.per_element}

"""Steps of the experiments on the simulator: shipped traces (modelled times), links by their rate, a jitter of workers.

Every system is as the papers describe it: 8 bytes per entry, selection in one call per tensor. This package's
``safusion`` has exact buffer sizes, small tensors dense, 6 bytes per entry, one selection call per buffer. All are
charged the times of selection and decoding that were published for GPUs: what this package's own kernels and operations
cost a device is counted in ``safusion plan``.
"""

from __future__ import annotations

from dataclasses import replace

from lab.papers.claims import HERE, Condition, Step
from lightning_safusion.fusion.plans.costs import SelectionCost
from lightning_safusion.tools.plan.cluster import Cluster, resolve_link
from lightning_safusion.tools.plan.device import DEVICES
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.systems import run_system
from lightning_safusion.tools.plan.traces import resolve_trace

# A published comparison of planners: an exact selection, a sampled threshold, and the decoding of an entry.
_TIMES = {"exact": SelectionCost(40e-6, 0.10e-9), "threshold": SelectionCost(25e-6, 0.012e-9)}
#: GPUs by the kind of selection, in place of counted work.
PUBLISHED = {
    kind: replace(DEVICES["a100"], selection=cost, decode=0.06e-9, published=True) for kind, cost in _TIMES.items()
}
# Seconds relative to a sampled threshold (DGC), as `python -m lab selection` measures them on a CPU.
_SPARSIFIERS = {"dgc": 1.0, "gaussiank": 1.5, "redsync": 2.7, "sidco": 4.1}
_JITTER = 0.1  # between workers, relative standard deviation


def simulate(model: str, condition: Condition, system: str) -> Step:
    """The mean step of one system.

    Raises:
        ValueError: If there is no such trace or link.
    """
    factor, base = _SPARSIFIERS[condition.compressor], _TIMES["threshold"]
    cost = SelectionCost(base.fixed * factor, base.per_element * factor)
    device = replace(PUBLISHED["threshold"], selection=cost)
    link = resolve_link(condition.rate or "100gbit")
    cluster = Cluster(condition.nodes, condition.per_node, link, jitter=_JITTER, device=device)
    job = Job(resolve_trace(model), cluster, condition.density, 8.0, segmented=False)
    if system == HERE:
        job = replace(job, entry_bytes=6.0, segmented=True)
    run = run_system(system, job)
    return Step(model, condition.name, system, run.seconds, run.select, run.exposed - run.select)

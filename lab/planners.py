"""How far published planners are from the best plan, on random instances and on the traces; and what alignment gains.

    $ python -m lab planners

Random instances have up to 8 tensors, so that all plans can be tried. On the traces the best plan is that of the exact
programme. The last table is the papers' ablation on the simulator: buffers that every worker fills at its own pace,
aligned buffers of 8 tensors, and sizes by measured times, under a jitter of 10 %. Selection and decoding take the times
that were published for GPUs. Nothing here is a measurement.
"""

from __future__ import annotations

import numpy as np

from lab.markdown import markdown
from lab.papers.simulated import PUBLISHED
from lab.planner_loss import losses, plan_pareto, predict_behind, random_behind, random_dense
from lightning_safusion.fusion.plans.adaptive import plan_optimal
from lightning_safusion.fusion.plans.merging import MGWFBP, OMGS
from lightning_safusion.fusion.plans.pricing import predict_finish
from lightning_safusion.tools.plan.cluster import Cluster, resolve_link
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.systems import run_system
from lightning_safusion.tools.plan.traces import TRACE_NAMES, resolve_trace

_ABLATION = ("saf-naive", "saf-inter", "safusion-paper", "safusion")


def random_losses(instances: int, seed: int) -> str:
    """Share of instances in which a rule misses the optimum, mean and largest loss."""
    rows = []
    for name, make, planner in (
        ("MG-WFBP", random_dense, MGWFBP().plan),
        ("OMGS", random_behind, OMGS().plan),
        ("Pareto programme", random_behind, plan_pareto),
    ):
        lost = losses(make, planner, instances, seed=seed)
        missed = float((lost > 1e-9).mean())
        rows.append((name, f"{missed:.0%}", f"{lost.mean():.2%}", f"{np.abs(lost).max():.1%}"))
    return f"{instances} random instances\n\n{markdown(('planner', 'missed', 'mean loss', 'worst loss'), rows)}"


def trace_losses(workers: int, bandwidth: str) -> str:
    """Loss of the rules on the traces, against the exact programmes."""
    rows = []
    for name in TRACE_NAMES:
        job = Job(resolve_trace(name), Cluster(workers, 1, resolve_link(bandwidth), device=PUBLISHED["exact"]), 0.01, 8)
        dense, behind = job.group_costs(sparse=False, dense=True), job.group_costs()
        best_dense = predict_finish(plan_optimal(dense, max_last_share=1.0), dense)
        best_behind = predict_behind(plan_pareto(behind), behind)
        mgwfbp = predict_finish(MGWFBP().plan(dense), dense) / best_dense - 1
        omgs = predict_behind(OMGS().plan(behind), behind) / best_behind - 1
        rows.append((name, f"{mgwfbp:.2%}", f"{omgs:.2%}"))
    title = f"Loss on {workers} workers at {bandwidth}, density 1 %"
    return f"{title}\n\n{markdown(('trace', 'MG-WFBP', 'OMGS'), rows)}"


def ablation(bandwidth: str, jitter: float) -> str:
    """Milliseconds per iteration of the papers' three steps, by number of workers."""
    rows = []
    for name in ("resnet-152", "vit-large", "gpt2-large", "bert-large"):
        for workers in (2, 4, 8, 16, 32, 64):
            cluster = Cluster(workers, 1, resolve_link(bandwidth), device=PUBLISHED["threshold"], jitter=jitter)
            job = Job(resolve_trace(name), cluster, 0.01, 8, segmented=False)
            runs = [run_system(system, job, 10) for system in _ABLATION]
            naive, inter, _, adaptive = (run.seconds for run in runs)
            times = [f"{run.seconds * 1e3:.1f}" for run in runs]
            rows.append((name, workers, *times, f"{naive / inter - 1:+.1%}", f"{inter / adaptive - 1:+.1%}"))
    title = f"Milliseconds per iteration at {bandwidth}, density 1 %, jitter {jitter:.0%}"
    return f"{title}\n\n{markdown(('trace', 'workers', *_ABLATION, 'naive to inter', 'inter to adaptive'), rows)}"


def planners(
    instances: int = 400, seed: int = 0, workers: int = 16, bandwidth: str = "10gbit", jitter: float = 0.1
) -> None:
    """How far published planners are from the best plan, and what alignment gains; nothing here is a measurement.

    Args:
        instances: Random ones, of up to 8 tensors.
        seed: Of these.
        workers: On which the traces are planned.
        bandwidth: Of their links.
        jitter: Between workers, relative standard deviation.
    """
    for table in (random_losses(instances, seed), trace_losses(workers, bandwidth), ablation(bandwidth, jitter)):
        print(f"{table}\n", flush=True)

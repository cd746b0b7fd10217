"""The predictions of a published comparison of fusion planners, made again from the same inputs.

The comparison: BERT-large (50 + 100 ms) and ResNet-50 (20 + 40 ms) at a density of 1 %; "exact" selection takes 40 us
and 0.10 ns per element, "threshold" 25 us and 0.012 ns; optimal groups in every column. What is assumed here because it
was not stated, and what remains different:

- decoding takes 0.06 ns per entry, in series with the exchange: the constant 14 ms between the published times and
  forward plus exchange, at 214 M entries;
- on 10 Gbit/s a message takes 25 us between 8 workers, and 50 us in the table of 64;
- dense all-reduces are charged as halving and doubling: a double binary tree would be 1.6 % slower at 64 workers;
- Ok-Topk is charged with two point-to-point phases per worker of a node, one gathered result, and the refresh of its
  threshold: 3 to 6 % above the published times at 25 and 50 Gbit/s, where the latency of 140 messages per buffer
  decides; at the other rates the two agree;
- segmented messages of 4 bytes per entry come out 1 to 2 % faster: the published ones pay about 7 ms more at low
  bandwidth, which may be a pass of the codec;
- backward times per tensor are modelled from the work of the layers; the published ones are not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from lab.papers.simulated import PUBLISHED
from lab.planner_loss import plan_pareto
from lightning_safusion.comm.cost import LINKS, Link
from lightning_safusion.fusion.plans.adaptive import optimal_cuts, plan_optimal
from lightning_safusion.fusion.plans.merging import OMGS
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.policy import WFBP, Aligned, Cupcake, Single
from lightning_safusion.profiling.trace import Trace
from lightning_safusion.tools.plan.cluster import Cluster
from lightning_safusion.tools.plan.engine import simulate
from lightning_safusion.tools.plan.job import Job, line
from lightning_safusion.tools.plan.schedule import Message, Schedule, Timer
from lightning_safusion.tools.plan.systems import build_schedule
from lightning_safusion.tools.plan.traces import resolve_trace

load = cache(resolve_trace)


def milliseconds(job: Job, schedule: Schedule) -> float:
    return simulate(job.trace, job.cluster, schedule).seconds * 1e3


def network(gbit: float) -> Link:
    alpha, launch = {100: (10e-6, 15e-6), 200: (8e-6, 15e-6), 400: (8e-6, 15e-6)}.get(int(gbit), (50e-6, 30e-6))
    return Link(alpha, 8e-9 / (gbit * 0.85), launch)


def dense(trace: Trace, cluster: Cluster, width: int) -> float:
    job = Job(trace, cluster)
    elements = np.concatenate([[0], np.cumsum(job.numels)])

    def seconds(starts: np.ndarray, stop: int) -> np.ndarray:
        sizes = (elements[stop] - elements[starts]) * float(width)
        return np.array([cluster.allreduce(float(size)).seconds for size in sizes])

    stops = optimal_cuts(np.cumsum(job.backward), seconds)
    messages = [job.dense_message(range(start, stop), width) for start, stop in pairwise([0, *stops])]
    return milliseconds(job, Schedule(messages))


def per_tensor(trace: Trace, cluster: Cluster, selection: str) -> float:
    job = Job(trace, replace(cluster, device=PUBLISHED[selection]), 0.01, 8, segmented=False)
    return milliseconds(job, job.schedule(plan_optimal(job.group_costs(), max_last_share=1.0)))


def oktopk(job: Job) -> float:
    def decode(nbytes: float) -> float:
        return 3 * nbytes / job.entry_bytes * PUBLISHED["threshold"].decode

    cost = line(lambda nbytes: job.cluster.oktopk(nbytes).seconds + decode(nbytes))
    messages = []
    for group in plan_optimal(replace(job.group_costs(), sparse=(cost.fixed, cost.per_byte))).groups:
        places = range(group.start, group.stop)
        nbytes = float(job.sparse_bytes[places].sum())
        messages.append(Message(places, job.cluster.oktopk(nbytes), job.select_seconds(places), decode(nbytes)))
    return milliseconds(job, Schedule(messages))


def columns(trace: Trace, gbit: float) -> list[float]:
    cluster = Cluster(8, 8, network(gbit), device=PUBLISHED["threshold"])
    job = Job(trace, cluster, 0.01, 4)
    return [
        dense(trace, cluster, 4),
        dense(trace, cluster, 2),
        per_tensor(trace, cluster, "exact"),
        per_tensor(trace, cluster, "threshold"),
        milliseconds(job, job.schedule(plan_pareto(job.group_costs()))),
        oktopk(job),
        milliseconds(job, build_schedule("safusion[collective=hierarchical]", job)),
    ]


@pytest.mark.parametrize(
    ("gbit", "published"),
    [
        pytest.param(10, (2535, 1293, 1477, 1477, 777, 275, 163), marks=pytest.mark.slow),
        pytest.param(50, (548, 301, 348, 347, 212, 164, 154), marks=pytest.mark.slow),
        pytest.param(100, (300, 177, 214, 207, 164, 158, 153), marks=pytest.mark.slow),
        pytest.param(400, (156, 153, 204, 168, 158, 156, 152), marks=pytest.mark.slow),
    ],
)
def test_bert_large_on_64_workers(gbit: float, published: Sequence[float]) -> None:
    found = columns(load("bert-large"), gbit)
    tolerance = [0.01, 0.01, 0.01, 0.01, 0.02, 0.06, 0.015]
    for mine, theirs, share in zip(found, published, tolerance, strict=True):
        assert mine == pytest.approx(theirs, rel=share), found


def test_resnet_50_on_64_workers() -> None:
    trace = load("resnet-50")
    slow, fast = Cluster(8, 8, network(25)), Cluster(8, 8, network(50))
    # the bound is 60 ms: fp32 reaches it at 50 Gbit/s, bf16 at 25 Gbit/s
    assert dense(trace, slow, 4) > 90
    assert dense(trace, fast, 4) == pytest.approx(60, rel=0.025)
    assert dense(trace, slow, 2) == pytest.approx(60, rel=0.025)
    for selection in ("exact", "threshold"):
        assert 64 < per_tensor(trace, fast, selection) < 70


@pytest.mark.parametrize(
    ("model", "cluster", "published"),
    [
        pytest.param(
            "bert-large",
            Cluster(8, 1, replace(LINKS["10gbit"], alpha=25e-6)),
            (270, 362, 294, 288, 235, 231, 232, 236),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "bert-large",
            Cluster(64, 1, LINKS["25gbit"]),
            (829, 833, 765, 725, 703, 701, 701, 712),
            marks=pytest.mark.slow,
        ),
        ("resnet-50", Cluster(64, 1, LINKS["25gbit"]), (123, 112, 93, 80, 71.7, 71.5, 71.5, 77.5)),
    ],
)
def test_grouping_policies(model: str, cluster: Cluster, published: Sequence[float]) -> None:
    job = Job(load(model), replace(cluster, device=PUBLISHED["exact"]), 0.01, 8, segmented=False)
    total, costs = len(job.numels), job.group_costs()

    def merged(stops: Sequence[int]) -> float:
        return milliseconds(job, job.schedule(Plan.from_stops(stops), behind=True))

    found = [
        milliseconds(job, job.schedule(WFBP().plan(costs))),
        milliseconds(job, job.schedule(Single().plan(costs), behind=True)),
        milliseconds(job, job.schedule(Cupcake(2).plan(costs), behind=True)),
        min(merged([cut, total]) for cut in range(1, total)),
        milliseconds(job, job.schedule(OMGS().plan(costs), behind=True)),
        milliseconds(job, job.schedule(plan_pareto(costs), behind=True)),
        milliseconds(job, job.schedule(plan_optimal(costs, max_last_share=1.0))),
        milliseconds(job, job.schedule(Aligned(16).plan(costs))),
    ]
    # two halves of ResNet-50 by count differ by 4 %, since its backward times are modelled differently
    tolerance = [0.01, 0.01, 0.04, 0.015, 0.01, 0.01, 0.01, 0.01]
    for mine, theirs, share in zip(found, published, tolerance, strict=True):
        assert mine == pytest.approx(theirs, rel=share), found


@pytest.mark.parametrize(
    ("model", "cluster", "published"),
    [
        ("bert-large", Cluster(8, 1, replace(LINKS["10gbit"], alpha=25e-6)), 233),
        ("bert-large", Cluster(64, 1, LINKS["25gbit"]), 705),
        ("resnet-50", Cluster(64, 1, LINKS["25gbit"]), 72.1),
    ],
)
def test_grouping_by_a_timer(model: str, cluster: Cluster, published: float) -> None:
    job = Job(load(model), replace(cluster, device=PUBLISHED["exact"]), 0.01, 8, segmented=False)
    schedule = build_schedule("horovod", job)
    assert isinstance(schedule.launch, Timer)
    free = replace(schedule, launch=replace(schedule.launch, negotiate=0.0, launch=0.0))
    assert milliseconds(job, free) == pytest.approx(published, rel=0.01)
    # agreements cost 0.3 ms each here, none in the published times
    assert milliseconds(job, schedule) > milliseconds(job, free)


def test_launches_cost_more_than_merging_saves_on_a_fast_network() -> None:
    cluster = Cluster(8, 8, LINKS["200gbit-rdma"], device=PUBLISHED["exact"])
    job = Job(load("bert-large"), cluster, 0.01, 8, segmented=False)
    found = [
        milliseconds(job, job.schedule(OMGS().plan(job.group_costs()), behind=True)),
        milliseconds(job, job.schedule(plan_pareto(job.group_costs()), behind=True)),
        milliseconds(job, job.schedule(plan_optimal(job.group_costs(), max_last_share=1.0))),
    ]
    assert found == pytest.approx([196, 192, 207], rel=0.02)

"""Remarks on a run.

Covers: hidden and exposed exchange; DDP slower, faster and alike; a lower and a higher density; regrouping; missing
    tensors; a straggler, and batches that suit it; plain DDP; predictions agree with the cost model.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import nan

import pytest

from lightning_safusion.fusion.plans.adaptive import plan_optimal
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.fusion.plans.pricing import predict_finish
from lightning_safusion.fusion.slowest import SlowWorker, WorkerTimes
from lightning_safusion.profiling.figures import RankFigures, StepFigures
from lightning_safusion.profiling.overlap_file import Overlap
from lightning_safusion.tools.report.advice import Prediction, advise, ddp_plan, scaled
from tests.tools.report.runs import overlap

NUMELS = (4_000_000,) * 20


def costs(bytes_per_second: float, density: float = 0.05, world_size: int = 8) -> GroupCosts:
    """Twenty tensors, ready every 5 ms, on a link of this speed."""
    return GroupCosts(
        NUMELS,
        tuple(0.005 * (i + 1) for i in range(20)),
        tuple(6.0 * density * n for n in NUMELS),
        tuple(4.0 * n for n in NUMELS),
        world_size,
        sparse=(1e-4, (world_size - 1) / bytes_per_second),
        dense=(2e-4, 2 * (world_size - 1) / world_size / bytes_per_second),
    )


def run(
    step_s: float, exposed_s: float, plan: Plan | None, job: GroupCosts | None, density: float = 0.05, late: float = 0.0
) -> Overlap:
    """A run of four ranks, of which the last works ``late`` seconds longer."""
    nbytes = 0.0 if job is None else sum(job.sparse_bytes)
    numbers = dict.fromkeys((field.name for field in fields(StepFigures)), nan)
    mean = StepFigures(**numbers | {"step_s": step_s, "exposed_s": exposed_s, "bytes_sent": nbytes, "work_s": 0.1})
    ranks = RankFigures((mean, mean, mean, replace(mean, work_s=0.1 + late)))
    unreviewed = replace(Overlap.from_dict(overlap()), workers=None, slow_worker=None)
    return replace(unreviewed, ranks=ranks, plan=plan, costs=job, density=density)


def predicted(job: GroupCosts, plan: Plan, **options: float) -> Overlap:
    """As the cost model predicts it: a forward pass of 50 ms, and a backward pass until the last gradient."""
    exposed = max(0.0, predict_finish(plan, job) - job.ready[-1])
    return run(0.05 + job.ready[-1] + exposed, exposed, plan, job, **options)


def texts(job: Overlap, level: str) -> list[str]:
    return [remark.text for remark in advise(job) if remark.level == level]


def test_a_fast_link_hides_everything_and_ddp_does_as_well() -> None:
    job = costs(1e12)
    remarks = predicted(job, plan_optimal(job))
    assert any("hides behind the backward pass" in text for text in texts(remarks, "good"))
    assert any("about as fast" in text for text in texts(remarks, "hint"))
    assert any("density 0.3 would cost no time" in text for text in texts(remarks, "hint"))


def test_a_slow_link_is_exposed_and_ddp_is_slower_still() -> None:
    job = costs(2e8)
    now = predicted(job, plan_optimal(job))
    assert not any("are exposed" in text for text in texts(now, "hint"))  # another hint says how to shorten it
    unpredicted = replace(now, plan=None, costs=None)
    assert any("are exposed" in text and "Larger batches" in text for text in texts(unpredicted, "hint"))
    half = Prediction(now.ranks.mean, plan_optimal(job), job).step(ddp_plan(job, 12.5 * 2**20), scaled(job, dense=0.5))
    slower = half / now.ranks.mean.step_s
    assert any(f"bf16 DDP would be {slower:.1f} times slower" in text for text in texts(now, "good"))
    sharded = replace(now, settings=now.settings | {"replicate_size": "2"})
    assert any(f"bf16 HSDP would be {slower:.1f} times slower" in text for text in texts(sharded, "good"))
    lower = next(text for text in texts(now, "hint") if "would save" in text)
    assert lower.startswith("density 0.0")


def test_a_lower_density_saves_as_predicted() -> None:
    job = costs(1e9)
    plan = plan_optimal(job)
    now = predicted(job, plan)
    lower = next(text for text in texts(now, "hint") if "would save" in text)
    density = float(lower.split()[1])
    saved = sum(job.sparse_bytes) * (1 - density / 0.05) / 1e6
    assert f"{saved:.2f} MB" in lower
    mean = now.ranks.mean
    faster = mean.step_s / Prediction(mean, plan, job).step(plan, scaled(job, sparse=density / 0.05))
    assert f"{faster:.2f} times faster" in lower


def test_too_many_workers_for_an_all_gather() -> None:
    job = costs(1e9, density=0.3, world_size=64)
    plan = Plan.from_stops([5, 10, 15, 20])
    assert any("times faster here" in text for text in texts(predicted(job, plan, density=0.3), "warning"))


def test_one_buffer_for_everything_should_be_cut() -> None:
    job = costs(4e9)
    assert any('fusion="adaptive"' in text for text in texts(predicted(job, Plan.from_stops([20])), "hint"))
    assert not any('fusion="adaptive"' in text for text in texts(predicted(job, plan_optimal(job)), "hint"))


def test_missing_tensors_and_stragglers_are_named() -> None:
    job = costs(1e10)
    remarks = advise(predicted(job, plan_optimal(job), late=0.05), missing_rate=0.25)
    assert remarks[0].level == "warning"
    assert "25.0% of the gradient tensors send nothing" in remarks[0].text
    assert any("wait for rank 3" in remark.text for remark in remarks)
    assert any("times 1.09 on rank 0, 1.09 on rank 1, 1.09 on rank 2, 0.73 on rank 3." in r.text for r in remarks)


def test_a_worker_that_the_reviews_have_found_slow_is_named_with_what_to_do() -> None:
    job = costs(1e10)
    own = (0.1,) * 9 + (0.15,)
    slow = SlowWorker(9, "node3", 0.041, 0.18, 1200)
    reviewed = replace(predicted(job, plan_optimal(job), late=0.05), workers=WorkerTimes(1250, 0.18, own, own))
    assert not any("rank 3" in remark.text for remark in advise(reviewed))  # by the reviews, no worker is slow
    first, *others = advise(replace(reviewed, slow_worker=slow))
    assert first.level == "warning"
    waiting = "rank 9 on host node3 is slow: the others wait 41.0 ms of every step of 180.0 ms for it, since step 1,200"
    assert waiting in first.text
    assert "data loader" in first.text
    (batches,) = [remark.text for remark in others if "batches" in remark.text]
    assert batches.endswith("1.03 on rank 6, 0.69 on rank 9, and about 1 on the others.")


def test_without_a_plan_nothing_is_predicted() -> None:
    remarks = advise(run(0.1, 0.0, None, None, density=1.0))
    assert [remark.level for remark in remarks] == ["good"]


def test_streams_are_not_predicted() -> None:
    job = costs(2e8)
    streams = Plan(tuple(Group(place, place + 1, "stream") for place in range(20)))
    (remark,) = advise(run(0.2, 0.1, streams, job))
    assert "are exposed" in remark.text


@pytest.mark.parametrize("nbytes", [1.0, 3e7, 1e12])
def test_the_buckets_of_ddp_cover_all_tensors(nbytes: float) -> None:
    job = costs(1e9)
    plan = ddp_plan(job, nbytes)
    assert plan.num_tensors == 20
    assert all(isinstance(group, Group) and group.collective == "allreduce" for group in plan.groups)

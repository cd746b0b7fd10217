"""Remarks on a job's figures.

Covers: hidden and exposed exchange; DDP slower, faster and alike; a lower and a higher density; regrouping; missing
    tensors; a straggler; plain DDP; predictions agree with the cost model.
"""

from __future__ import annotations

from typing import Any

import pytest

from lightning_safusion.fusion.plans.adaptive import plan_optimal
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.fusion.plans.pricing import predict_finish
from lightning_safusion.report.advice import JobFigures, advise, ddp_plan, scaled, step_with

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


def figures(job: GroupCosts, plan: Plan, **options: object) -> JobFigures:
    """As the cost model predicts them: a forward pass of 50 ms, and a backward pass until the last gradient."""
    exposed = max(0.0, predict_finish(plan, job) - job.ready[-1])
    known: dict[str, Any] = {"density": 0.05, "bytes_sent": sum(job.sparse_bytes)} | options
    return JobFigures(0.05 + job.ready[-1] + exposed, exposed, plan=plan, costs=job, **known)


def texts(job: JobFigures, level: str) -> list[str]:
    return [remark.text for remark in advise(job) if remark.level == level]


def test_a_fast_link_hides_everything_and_ddp_does_as_well() -> None:
    job = costs(1e12)
    remarks = figures(job, plan_optimal(job))
    assert any("hides behind the backward pass" in text for text in texts(remarks, "good"))
    assert any("about as fast" in text for text in texts(remarks, "hint"))
    assert any("density 0.3 would cost no time" in text for text in texts(remarks, "hint"))


def test_a_slow_link_is_exposed_and_ddp_is_slower_still() -> None:
    job = costs(2e8)
    now = figures(job, plan_optimal(job))
    assert any("are exposed" in text for text in texts(now, "hint"))
    half = step_with(now, ddp_plan(job, 12.5 * 2**20), scaled(job, dense=0.5))
    assert any(f"bf16 DDP would be {half / now.step_s:.1f} times slower" in text for text in texts(now, "good"))
    lower = next(text for text in texts(now, "hint") if "would save" in text)
    assert lower.startswith("density 0.0")


def test_a_lower_density_saves_what_it_says() -> None:
    job = costs(1e9)
    plan = plan_optimal(job)
    now = figures(job, plan)
    lower = next(text for text in texts(now, "hint") if "would save" in text)
    density = float(lower.split()[1])
    saved = sum(job.sparse_bytes) * (1 - density / 0.05) / 1e6
    assert f"{saved:.2f} MB" in lower
    faster = now.step_s / step_with(now, plan, scaled(job, sparse=density / 0.05))
    assert f"{faster:.2f} times faster" in lower


def test_too_many_workers_for_an_all_gather() -> None:
    job = costs(1e9, density=0.3, world_size=64)
    plan = Plan.from_stops([5, 10, 15, 20])
    assert any("times faster here" in text for text in texts(figures(job, plan, density=0.3), "warning"))


def test_one_buffer_for_everything_should_be_cut() -> None:
    job = costs(4e9)
    assert any('fusion="adaptive"' in text for text in texts(figures(job, Plan.from_stops([20])), "hint"))
    assert not any('fusion="adaptive"' in text for text in texts(figures(job, plan_optimal(job)), "hint"))


def test_missing_tensors_and_stragglers_are_named() -> None:
    job = costs(1e10)
    remarks = advise(figures(job, plan_optimal(job), missing_rate=0.25, slowest_rank=(3, 0.05)))
    assert remarks[0].level == "warning"
    assert "25.0% of the gradient tensors send nothing" in remarks[0].text
    assert any("wait for rank 3" in remark.text for remark in remarks)


def test_plain_ddp_has_no_plan_to_speak_of() -> None:
    remarks = advise(JobFigures(step_s=0.1, exposed_s=0.0, density=1.0, bytes_sent=0.0))
    assert [remark.level for remark in remarks] == ["good"]


def test_streams_are_not_predicted() -> None:
    job = costs(2e8)
    streams = Plan(tuple(Group(place, place + 1, "stream") for place in range(20)))
    (remark,) = advise(JobFigures(0.2, 0.1, 0.05, 1e6, plan=streams, costs=job))
    assert "are exposed" in remark.text


@pytest.mark.parametrize("nbytes", [1.0, 3e7, 1e12])
def test_the_buckets_of_ddp_cover_all_tensors(nbytes: float) -> None:
    job = costs(1e9)
    plan = ddp_plan(job, nbytes)
    assert plan.num_tensors == 20
    assert all(isinstance(group, Group) and group.collective == "allreduce" for group in plan.groups)

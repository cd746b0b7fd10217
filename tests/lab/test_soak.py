"""Long trainings: what they grow by, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.attack.soak import JOBS, _soaked, growth, problem, soak
from lab.attack.workers import End
from tests.process_group import run_alone

Readings = list[tuple[int, int, int, int]]


def readings(slope: float = 0.0, early: int = 0, files: int = 29) -> Readings:
    """A hundred, in 50,000 steps: KiB in 1,000 steps, KiB that the first half adds, and open files at the end."""
    return [
        (step, 1000 + int(slope * step / 1000) + min(step, 20_000) * early // 20_000 + step % 70, 29, 2)
        for step in range(500, 50_500, 500)
    ][:-1] + [(50_000, 1000 + int(slope * 50) + early, files, 2)]


def test_growth_is_what_is_kept_of_later_steps() -> None:
    assert abs(growth(readings())) < 10
    assert abs(growth(readings(early=50_000))) < 10
    assert 90 < growth(readings(slope=100.0)) < 110


@pytest.mark.parametrize(
    ("how", "grown", "wrong"),
    [
        ({}, {}, None),
        ({}, {"slope": 50.0}, "rank 1 grows by"),
        ({}, {"files": 30}, "rank 1 has ever more files"),
        ({"told": {"digest": "b"}}, {}, "replicas differ"),
        ({"code": None}, {}, "rank 1: hung"),
        ({"told": {"step": 400}}, {}, "rank 1: finished"),
    ],
)
def test_what_did_not_stay_level_is_named(how: dict[str, Any], grown: dict[str, Any], wrong: str | None) -> None:
    told: dict[str, Any] = {"step": 50_000, "digest": "a", "readings": readings()}
    ends = [
        End(0, 0, 1.0, told),
        End(1, how.get("code", 0), 1.0, told | {"readings": readings(**grown)} | how.get("told", {})),
    ]
    found = problem(ends, 50_000)
    assert found is None if wrong is None else found is not None and wrong in found


def test_a_job_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="no job is called 'calbacks'; there are: callbacks, default"):
        soak(jobs="calbacks")


@pytest.mark.slow
@pytest.mark.parametrize("job", ["callbacks", "dropped"])
def test_jobs_train_with_equal_replicas(tmp_path: Path, job: str) -> None:
    ends: list[End] = run_alone(lambda: _soaked(JOBS[job], 40, tmp_path), timeout=120)
    assert [end.how for end in ends] == ["finished"] * 2
    assert len({end.told["digest"] for end in ends}) == 1
    assert {len(end.told["readings"]) for end in ends} == {40}

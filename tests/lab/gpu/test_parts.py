"""Parts of the stages: stacks of waits, echoes, gaps of a stream, and what becomes of measured times."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from lab.gpu.costs import counted, factors
from lab.gpu.device import Device
from lab.gpu.jobs import Echo
from lab.gpu.numerics import engines
from lab.gpu.rivals import buckets_of
from lab.gpu.sanitizer import errors_in
from lab.gpu.steps import Measured, fitting
from lab.gpu.trace import idle_seconds
from lab.gpu.training import Phase, Steps
from lab.gpu.waits import watched
from lightning_safusion.fusion import fused
from lightning_safusion.kernels import cpu
from lightning_safusion.tools.plan.device import Device as Speeds
from lightning_safusion.tools.plan.work import Work

PLACE = Device(rehearse=True)


def test_waits_are_noted_with_the_lines_that_lead_there() -> None:
    with watched(PLACE) as stacks:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    ((stack, count),) = stacks.seen.items()
    assert count == 2
    assert stack.startswith("tests/lab/gpu/test_parts.py:")
    assert "warnings.warn" in stack.splitlines()[0]


def test_the_numbers_are_those_of_the_cpu_where_nothing_is_compiled_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "serves_buffers", fused.serves_buffers)  # a stage's process keeps what it replaces
    with cpu.unused():
        assert engines(PLACE, 2) == []


def test_echoes_answer_as_workers_with_the_same_numbers_would() -> None:
    echo, own, all_of = Echo(3), torch.tensor([1.0, 2.0]), torch.zeros(6)
    echo.all_gather(all_of, own).wait()
    echo.all_reduce(own).wait()
    assert all_of.tolist() == [1.0, 2.0] * 3
    assert own.tolist() == [3.0, 6.0]
    assert echo.gather_objects("a") == ["a"] * 3
    assert echo.split([[0, 1], [2]]).world_size == 2


def test_the_busiest_stream_is_idle_between_its_kernels() -> None:
    def event(stream: int, start: float, end: float, device: Any = torch.autograd.DeviceType.CUDA) -> Any:
        return SimpleNamespace(
            device_type=device, device_resource_id=stream, time_range=SimpleNamespace(start=start, end=end)
        )

    host = event(7, 0.0, 900.0, torch.autograd.DeviceType.CPU)
    events = [event(7, 0, 10), event(7, 5, 20), event(7, 50, 60), event(7, 61, 70), event(3, 0, 9), host]
    assert idle_seconds(events) == pytest.approx(31e-6)
    assert idle_seconds([host]) == 0.0


def test_factors_are_what_the_counted_work_does_not_explain() -> None:
    device = Speeds("X100", memory=1e9, launch=1e-6, instructions=64e9)
    work = {"narrow": Work(2, 1e6, 0.0), "commit": Work(1, 0.0, 64e3), "copy": Work(1)}
    found = factors(device, {"narrow": 2e-3 + 2e-6, "commit": 3e-6 + 1e-6, "copy": 5e-6}, work)
    assert found == pytest.approx({"narrow": 2.0, "commit": 3.0})
    assert replace(device, factors=found).seconds(work) == pytest.approx(2e-3 + 2e-6 + 4e-6 + 1e-6)


def test_the_work_of_a_window_is_that_of_its_buffers() -> None:
    one, two = counted([[60_000]], 2), counted([[60_000], [60_000]], 2)
    assert two["narrow"].nbytes == 2 * one["narrow"].nbytes
    assert one["commit"].launches == two["commit"].launches == 1


def test_a_batch_takes_the_wanted_time_unless_memory_ends_before() -> None:
    few, many = Measured(8, 0.018, 3_000), Measured(32, 0.042, 6_000)  # 10 ms and 1 ms for each; 2,000 and 125 bytes
    assert fitting(few, many, 0.060, room=1e9) == 50
    assert fitting(few, many, 0.060, room=4_500) == 20
    assert fitting(few, many, 0.001, room=1e9) == 1


def test_steps_that_record_everything_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 9.0, 10.0, 12.0, 17.0, 20.0])  # steps of 9, 1, 2, 5 and 3 seconds
    monkeypatch.setattr(PLACE, "moment", lambda: next(clock))
    steps = Steps(PLACE, [Phase(4, 1, 2), Phase(8, 1, 1)])
    for step in range(6):
        record = SimpleNamespace(surveyed=step in (1, 3))  # of the step before
        steps.on_train_batch_start(SimpleNamespace(strategy=SimpleNamespace(record=record)), None, 4, step)
    steps.on_train_end(SimpleNamespace(strategy=None), None)
    assert [(times.usual, times.recorded) for times in steps.times] == [([1.0], [2.0]), ([3.0], [])]
    assert [times.step for times in steps.times] == [1.0, 3.0]


def test_buckets_hold_the_last_tensors_first_as_those_of_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.gpu.rivals._BUCKET_BYTES", 40)
    buckets = buckets_of([(3, 2), (4,), (5, 2)], torch.device("cpu"))
    assert [[tuple(g.shape) for g in bucket.gradients()] for bucket in buckets] == [[(5, 2)], [(4,), (3, 2)]]
    assert [(bucket.index(), bucket.is_last()) for bucket in buckets] == [(0, False), (1, True)]


def test_what_compute_sanitizer_counts_is_read_from_its_last_line() -> None:
    assert errors_in("=== ERROR SUMMARY: 3 errors\n=== ERROR SUMMARY: 0 errors\n") == 0
    assert errors_in("=== ERROR SUMMARY: 1 error") == 1
    assert errors_in("=== Target application returned an error") == -1

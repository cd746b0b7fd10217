"""Moments of training loops become timelines.

Covers: one batch per step; accumulation; optimizers that take turns, that run backward passes themselves, or have no
    hook after their step; time between batches; windows that are observed late; steps that are not recorded.
"""

from __future__ import annotations

import numpy as np

from lightning_safusion.fusion.events import Clock, WindowEvents
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.profiling.timeline import StepRecorder, StepTimeline


def phases(step: StepTimeline) -> list[tuple[str, float, float]]:
    return [(phase.name, phase.begin, phase.end) for phase in step.phases]


def window(number: int, drained: float) -> WindowEvents:
    return WindowEvents(number, 1.0, Layout(()), np.zeros(0), (), drained)


def batch(recorder: StepRecorder, now: float, step: int | None, optimizers: int = 1) -> float:
    """Forward 2 s, backward 3 s, for each optimizer, which takes 1 s if it steps; 0.5 s at the end."""
    recorder.mark("batch", now)
    for _ in range(optimizers):
        recorder.mark("backward", now + 2)
        recorder.mark("backward_end", now + 5)
        now += 5
        if step is not None:
            recorder.mark("optimizer", now)
            recorder.mark("optimizer_end", now + 1)
            now += 1
    recorder.mark("batch_end", now + 0.5)
    if step is not None:
        recorder.end_step(step)
    return now + 0.5


def take(recorder: StepRecorder, before: int = 100) -> list[StepTimeline]:
    return recorder.take(Clock(), before)


def test_one_batch_per_step() -> None:
    recorder = StepRecorder()
    batch(recorder, 10.0, 4)
    batch(recorder, 17.0, 5)
    first, second = take(recorder)
    assert (first.step, first.begin, first.end) == (4, 10.0, 16.5)
    assert phases(first) == [("forward", 10.0, 12.0), ("backward", 12.0, 15.0), ("optimizer", 15.0, 16.0)]
    assert (second.step, second.begin, second.end) == (5, 16.5, 23.5)
    assert phases(second)[0] == ("data", 16.5, 17.0)
    assert take(recorder) == []


def test_accumulated_batches_are_one_step() -> None:
    recorder = StepRecorder()
    batch(recorder, 10.0, None)
    batch(recorder, 16.0, 0)
    (step,) = take(recorder)
    assert (step.begin, step.end) == (10.0, 22.5)
    assert [name for name, *_ in phases(step)] == ["forward", "backward", "data", "forward", "backward", "optimizer"]


def test_optimizers_that_take_turns() -> None:
    recorder = StepRecorder()
    batch(recorder, 0.0, 0, optimizers=2)
    (step,) = take(recorder)
    assert phases(step) == [
        *(("forward", 0.0, 2.0), ("backward", 2.0, 5.0), ("optimizer", 5.0, 6.0)),
        *(("forward", 6.0, 8.0), ("backward", 8.0, 11.0), ("optimizer", 11.0, 12.0)),
    ]


def test_an_optimizer_without_a_hook_ends_with_the_batch() -> None:
    recorder = StepRecorder()
    recorder.mark("batch", 0.0)
    recorder.mark("optimizer", 3.0)
    recorder.mark("batch_end", 5.0)
    recorder.end_step(0)
    (step,) = take(recorder)
    assert phases(step) == [("optimizer", 3.0, 5.0)]


def test_an_optimizer_that_runs_backward_passes() -> None:
    recorder = StepRecorder()
    recorder.mark("batch", 0.0)
    for now in (0.0, 5.0):
        recorder.mark("backward", now + 1)
        recorder.mark("backward_end", now + 3)
        recorder.mark("optimizer", now + 4)
    recorder.mark("optimizer_end", 10.0)
    recorder.mark("batch_end", 10.0)
    recorder.end_step(0)
    (step,) = take(recorder)
    assert phases(step) == [
        *(("forward", 0.0, 1.0), ("backward", 1.0, 3.0)),
        *(("forward", 4.0, 6.0), ("backward", 6.0, 8.0), ("optimizer", 9.0, 10.0)),
    ]


def test_an_optimizer_whose_step_calls_that_of_another() -> None:
    recorder = StepRecorder()
    for moment, now in (("batch", 0.0), ("optimizer", 2.0), ("optimizer_end", 4.0), ("optimizer_end", 5.0)):
        recorder.mark(moment, now)  # type: ignore[arg-type]  # a moment
    recorder.mark("batch_end", 6.0)
    recorder.end_step(0)
    (step,) = take(recorder)
    assert step.spans("optimizer") == [(2.0, 5.0)]


def test_validation_between_batches_is_no_part_of_a_step() -> None:
    recorder = StepRecorder()
    batch(recorder, 0.0, 0)
    recorder.pause()
    batch(recorder, 50.0, 1)
    _, second = take(recorder)
    assert second.begin == 50.0
    assert phases(second)[0] == ("forward", 50.0, 52.0)


def test_a_step_begins_where_one_that_was_not_recorded_has_ended() -> None:
    recorder = StepRecorder()
    recorder.skip(9.0)
    batch(recorder, 10.0, 3)
    (step,) = take(recorder)
    assert step.begin == 9.0


def test_windows_belong_to_the_step_in_which_they_ended() -> None:
    recorder = StepRecorder()
    batch(recorder, 0.0, 0)
    batch(recorder, 10.0, 1)
    recorder.observe(window(0, 5.0))  # observed late, as on CUDA
    batch(recorder, 20.0, 2)
    recorder.observe(window(1, 14.9))
    first, second = take(recorder, before=2)
    assert [each.drained for each in first.windows] == [5.0]
    assert [each.drained for each in second.windows] == [14.9]
    recorder.observe(window(2, 25.0))
    (third,) = take(recorder)
    assert (third.step, [each.drained for each in third.windows]) == (2, [25.0])

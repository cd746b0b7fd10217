"""Moments of training loops become timelines."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_safusion.fusion.events import Clock, WindowEvents
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.profiling.timeline import Moment, StepRecorder, StepTimeline


def phases(step: StepTimeline) -> list[tuple[str, float, float]]:
    return [(phase.name, phase.begin, phase.end) for phase in step.phases]


def window(number: int, drained: float) -> WindowEvents:
    return WindowEvents(number, 1.0, Layout(()), np.zeros(0), (), drained)


Moments = list[tuple[Moment, float]]


def batch(now: float, steps: bool = True, optimizers: int = 1) -> Moments:
    """Forward 2 s, backward 3 s, for each optimizer, which takes 1 s if it steps; 0.5 s at the end."""
    marks: Moments = [("batch", now)]
    for _ in range(optimizers):
        marks += [("backward", now + 2), ("backward_end", now + 5)]
        now += 5
        if steps:
            marks += [("optimizer", now), ("optimizer_end", now + 1)]
            now += 1
    return [*marks, ("batch_end", now + 0.5)]


def record(recorder: StepRecorder, moments: Moments, step: int) -> None:
    for moment, now in moments:
        recorder.mark(moment, now)
    recorder.end_step(step)


def take(recorder: StepRecorder, before: int = 100) -> list[StepTimeline]:
    return recorder.take(Clock(), before)


def test_one_batch_per_step() -> None:
    recorder = StepRecorder()
    record(recorder, batch(10.0), 4)
    record(recorder, batch(17.0), 5)
    first, second = take(recorder)
    assert (first.step, first.begin, first.end) == (4, 10.0, 16.5)
    assert phases(first) == [("forward", 10.0, 12.0), ("backward", 12.0, 15.0), ("optimizer", 15.0, 16.0)]
    assert (second.step, second.begin, second.end) == (5, 16.5, 23.5)
    assert phases(second)[0] == ("data", 16.5, 17.0)
    assert take(recorder) == []


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        pytest.param(
            batch(10.0, steps=False) + batch(16.0),
            [
                *(("forward", 10.0, 12.0), ("backward", 12.0, 15.0), ("data", 15.5, 16.0)),
                *(("forward", 16.0, 18.0), ("backward", 18.0, 21.0), ("optimizer", 21.0, 22.0)),
            ],
            id="accumulated batches",
        ),
        pytest.param(
            batch(0.0, optimizers=2),
            [
                *(("forward", 0.0, 2.0), ("backward", 2.0, 5.0), ("optimizer", 5.0, 6.0)),
                *(("forward", 6.0, 8.0), ("backward", 8.0, 11.0), ("optimizer", 11.0, 12.0)),
            ],
            id="optimizers that take turns",
        ),
        pytest.param(
            [("batch", 0.0), ("optimizer", 3.0), ("batch_end", 5.0)],
            [("optimizer", 3.0, 5.0)],
            id="no hook after a step",
        ),
        pytest.param(
            [
                ("batch", 0.0),
                *(("backward", 1.0), ("backward_end", 3.0), ("optimizer", 4.0)),
                *(("backward", 6.0), ("backward_end", 8.0), ("optimizer", 9.0)),
                *(("optimizer_end", 10.0), ("batch_end", 10.0)),
            ],
            [
                *(("forward", 0.0, 1.0), ("backward", 1.0, 3.0)),
                *(("forward", 4.0, 6.0), ("backward", 6.0, 8.0), ("optimizer", 9.0, 10.0)),
            ],
            id="an optimizer that runs backward passes",
        ),
        pytest.param(
            [("batch", 0.0), ("optimizer", 2.0), ("optimizer_end", 4.0), ("optimizer_end", 5.0), ("batch_end", 6.0)],
            [("optimizer", 2.0, 4.0), ("optimizer", 4.0, 5.0)],
            id="a step that calls that of another optimizer",
        ),
    ],
)
def test_moments_of_one_step(moments: Moments, expected: list[tuple[str, float, float]]) -> None:
    recorder = StepRecorder()
    record(recorder, moments, 0)
    (step,) = take(recorder)
    assert phases(step) == expected
    assert (step.begin, step.end) == (moments[0][1], moments[-1][1])


def test_validation_between_batches_is_no_part_of_a_step() -> None:
    recorder = StepRecorder()
    record(recorder, batch(0.0), 0)
    recorder.pause()
    record(recorder, batch(50.0), 1)
    _, second = take(recorder)
    assert second.begin == 50.0
    assert phases(second)[0] == ("forward", 50.0, 52.0)


def test_a_step_begins_where_one_that_was_not_recorded_has_ended() -> None:
    recorder = StepRecorder()
    recorder.skip(9.0)
    record(recorder, batch(10.0), 3)
    (step,) = take(recorder)
    assert step.begin == 9.0


def test_windows_belong_to_the_step_in_which_they_ended() -> None:
    recorder = StepRecorder()
    record(recorder, batch(0.0), 0)
    record(recorder, batch(10.0), 1)
    recorder.observe(window(0, 5.0))  # observed late, as on CUDA
    record(recorder, batch(20.0), 2)
    recorder.observe(window(1, 14.9))
    first, second = take(recorder, before=2)
    assert [each.drained for each in first.windows] == [5.0]
    assert [each.drained for each in second.windows] == [14.9]
    recorder.observe(window(2, 25.0))
    (third,) = take(recorder)
    assert (third.step, [each.drained for each in third.windows]) == (2, [25.0])

"""Figures of steps whose moments are known."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from math import isnan, nan

import pytest
from rich.console import Console

from lightning_safusion.profiling.figures import RankFigures, StepFigures, buffer_means, build_table
from lightning_safusion.profiling.timeline import StepTimeline, merge, subtract, total
from tests.profiling.steps import cpu_step, cuda_step, plain_step, unrecorded


def test_intervals_are_merged() -> None:
    assert merge([(5.0, 6.0), (1.0, 2.0), (1.5, 3.0), (3.0, 4.0), (7.0, 7.0), (9.0, 8.0)]) == [(1.0, 4.0), (5.0, 6.0)]
    assert merge([(nan, 2.0), (1.0, nan)]) == []
    assert total([(0.0, 2.0), (1.0, 3.0), (4.0, 5.0)]) == 4.0


def test_intervals_are_subtracted() -> None:
    assert subtract([(0.0, 10.0)], [(2.0, 3.0), (5.0, 6.0), (9.0, 12.0)]) == [(0.0, 2.0), (3.0, 5.0), (6.0, 9.0)]
    assert subtract([(0.0, 1.0), (2.0, 3.0)], [(0.0, 5.0)]) == []


def test_the_parts_of_a_cpu_step_add_up() -> None:
    figures = StepFigures.of(cpu_step())
    assert figures == StepFigures(
        step_s=23.0,
        data_s=1.0,
        forward_s=3.0,
        backward_s=16.0 - 2.0 - 2.0 - 2.0,  # without selection, decoding, exposed
        select_s=2.0,
        exchange_s=8.0,
        exposed_s=2.0,
        decode_s=2.0,
        optimizer_s=2.0,
        other_s=1.0,
        work_s=3.0 + 14.0 + 2.0,
        overlap_ratio=6.0 / 8.0,
        bytes_sent=600.0,
    )
    parts = ("data_s", "forward_s", "backward_s", "select_s", "exposed_s", "decode_s", "optimizer_s", "other_s")
    assert sum(getattr(figures, part) for part in parts) == figures.step_s


def test_on_cuda_selection_and_decoding_lie_beside_the_backward_pass() -> None:
    figures = StepFigures.of(cuda_step())
    assert figures.backward_s == 12.0  # 4 to 16: it stood still until 20
    assert (figures.select_s, figures.decode_s, figures.exposed_s) == (2.0, 2.0, 2.0)
    assert figures.work_s == 3.0 + 12.0 + 1.0 + 2.0  # decoding at 18 to 19 is work too
    assert figures.overlap_ratio == 6.0 / 8.0
    assert figures.other_s == 1.0


def test_with_plain_ddp_only_phases_are_known() -> None:
    figures = StepFigures.of(plain_step())
    assert figures.backward_s == 16.0
    assert set(figures.as_dict()) == {
        *("step_s", "data_s", "forward_s", "backward_s", "optimizer_s", "other_s", "work_s")
    }


def test_a_collective_whose_end_was_not_recorded_ends_with_the_wait() -> None:
    figures = StepFigures.of(unrecorded(cpu_step()))
    assert figures.exchange_s == 18.0 - 7.0
    assert figures.exposed_s == 2.0


def test_means_leave_out_what_is_not_known() -> None:
    mean = StepFigures.mean([StepFigures.of(cpu_step()), StepFigures.of(plain_step())])
    assert (mean.backward_s, mean.exposed_s) == (13.0, 2.0)
    nothing = StepFigures.mean([])
    assert all(isnan(getattr(nothing, field.name)) for field in fields(nothing))


def test_the_slowest_rank_works_longest() -> None:
    slow = StepTimeline.from_dict({**plain_step().to_dict(), "phases": [["forward", 0.0, 20.0]]})
    ranks = RankFigures(tuple(StepFigures.of(step) for step in (plain_step(), slow)))
    assert ranks.slowest == (0, 1.0)  # 21 s of forward, backward and optimizer
    assert (ranks.as_dict()["slowest_rank"], ranks.as_dict()["skew_s"]) == (0, 1.0)
    unknown = RankFigures((replace(ranks.ranks[0], work_s=nan),) * 2)
    assert not {"slowest_rank", "skew_s", "work_s"} & set(unknown.as_dict())


def test_buffers_are_averaged_over_the_steps_of_one_plan() -> None:
    values = cpu_step().to_dict()
    del values["windows"][0]["buffers"][0]
    other_plan = StepTimeline.from_dict(values)
    first, second = buffer_means([other_plan, cpu_step(), unrecorded(cpu_step())])
    assert first.tensors == ("layer0.weight", "layer1.weight")
    assert first.steps == second.steps == 2
    assert (first.ready_s, first.select_s, first.exposed_s, first.decode_s) == (2.0, 1.0, 0.0, 1.0)
    assert first.exchange_s == (3.0 + 8.0) / 2
    assert (second.ready_s, second.exchange_s, second.exposed_s) == (8.0, 5.0, 2.0)
    assert buffer_means([]) == buffer_means([plain_step()]) == []


@pytest.mark.parametrize("step", [cpu_step(), cuda_step(), plain_step()])
def test_steps_survive_json(step: StepTimeline) -> None:
    text = json.dumps(step.to_dict(), allow_nan=False)
    assert StepTimeline.from_dict(json.loads(text)) == step


def test_unknown_moments_survive_json() -> None:
    values = unrecorded(cpu_step()).to_dict()
    again = StepTimeline.from_dict(json.loads(json.dumps(values, allow_nan=False))).buffers[0]
    assert isnan(again.events.finished)
    assert isnan(again.ready[0])
    assert again.ready[1] == 6.0


def shown(steps: list[StepTimeline], ranks: int = 2) -> str:
    console = Console(width=100)
    figures = RankFigures((StepFigures.mean([StepFigures.of(step) for step in steps]),) * ranks)
    with console.capture() as capture:
        console.print(build_table("Where the time went", figures, buffer_means(steps)))
    return capture.get()


def test_the_table_shows_parts_and_late_buffers() -> None:
    text = shown([cpu_step()])
    (exposed,) = [line.split() for line in text.splitlines() if line.strip().startswith("exposed exchange")]
    assert exposed == ["exposed", "exchange", "2000.00", "2000.00", "8.7%"]
    assert "75.0% of the exchange overlaps with computation." in text
    assert "layer2.weight +2" in text
    assert "layer0.weight" not in text  # was never waited for


def test_the_table_of_plain_ddp_leaves_out_what_is_not_known() -> None:
    text = shown([plain_step()], ranks=1)
    assert "backward" in text
    assert "exchange" not in text
    assert "nan" not in text
    assert "Rank" not in text

"""Time to accuracy: curves are those of the real workers, figures follow from them, and nothing is done twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from lab.accuracy import study
from lab.accuracy.job import trained_row
from lab.accuracy.reached import RowTimes, seconds, summarize
from lab.accuracy.report import Setting, build_table
from lab.accuracy.study import Comparison, time_to_accuracy
from lab.accuracy.training import Curve, Training, make_averager, train_curve
from lab.bench.measure import Rhythm
from lab.tasks import TASKS
from lab.virtual.training import VirtualTraining
from tests.process_group import run_alone
from tests.quick import quick_of

TASK = replace(TASKS["digits-resnet"], steps=5, batch=8)


def times(step_s: float) -> RowTimes:
    return RowTimes(step_s, step_s, step_s, None, None)


def training(row: str, plan: list[list[Any]] | None, steps: int = 3) -> Training:
    return Training(replace(TASK, steps=steps), trained_row(row), 0.05, 2, 0, plan)


@pytest.mark.slow
def test_a_run_trains_measures_and_goes_on_where_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    comparison = Comparison(replace(TASK, steps=3), ("saf-pooled[wire=q4,density=0.1]",), 0.05, 2, (0,))

    def run() -> None:
        time_to_accuracy(comparison, [None], Rhythm(1, 2, 3), tmp_path, Console(width=120))

    run_alone(run, timeout=300)
    (record,) = json.loads((tmp_path / "accuracy.json").read_text())
    ddp, sparse = record["rows"]
    assert [ddp["name"], sparse["name"]] == ["ddp", "saf-pooled[wire=q4,density=0.1]"]
    assert ddp["reached"] == 1
    assert ddp["seconds"]["0"] == pytest.approx(ddp["steps"]["0"] * ddp["times"]["step_s"])
    assert [at for at, _ in sparse["curve"]] == pytest.approx([sparse["times"]["step_s"] * step for step in (1, 2, 3)])
    assert sparse["times"]["plan"]
    assert ddp["times"]["plan"] is None
    assert (tmp_path / "accuracy.png").stat().st_size > 0
    assert "saf-pooled[wire=q4,density=0.1]" in capfd.readouterr().out  # no markup of rich's

    lines = (tmp_path / "curves.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "curves.jsonl").write_text(lines[0] + lines[1][:20])  # interrupted in the middle of a line

    def again() -> None:
        study.measure = None  # type: ignore[assignment]  # steps are not measured again
        run()

    run_alone(again, timeout=300)
    after = (tmp_path / "curves.jsonl").read_text().splitlines(keepends=True)
    assert after[0] == lines[0]
    assert len(after) == 2
    metrics = [json.loads(line)["result"]["metrics"] for line in (lines[1], after[1])]
    assert metrics[0] == metrics[1]
    (repeated,) = json.loads((tmp_path / "accuracy.json").read_text())
    assert repeated == record


@pytest.mark.slow
def test_rows_of_ddp_train_as_their_hooks_do() -> None:
    curves = {row: train_curve(training(row, None)).metrics for row in ("ddp", "dear", "powersgd-rank4", "ddp-bf16")}
    assert curves["dear"] == curves["ddp"]
    assert curves["powersgd-rank4"] == curves["ddp"]  # dense for ten steps
    assert None not in curves["ddp-bf16"]


SPARSE = ["oktopk", "gtopk", "ssfusion", "saf-pooled[wire=q4]", "wfbp[memory=ef21,momentum=0]"]


@pytest.mark.parametrize("row", quick_of(SPARSE, ["saf-pooled[wire=q4]"]))
def test_sparse_rows_train_with_the_plan_that_they_are_given(row: str) -> None:
    curve = train_curve(training(row, [[62, "allgather"]]))
    assert curve.steps == [1, 2, 3]
    assert None not in curve.metrics


def test_the_plan_decides_what_travels_dense() -> None:
    virtual = VirtualTraining(TASK, 0, 2)
    generator = torch.Generator().manual_seed(0)
    gradients = [[torch.randn(param.numel(), generator=generator) for param in virtual.params] for _ in range(2)]
    middle = [(first + second) / 2 for first, second in zip(*gradients, strict=True)]
    order, means, totals = virtual.order, [], [torch.zeros_like(mean) for mean in middle]
    averager = make_averager(training("safusion", [[40, "allgather"], [22, "allreduce"]]), virtual, [])
    for _ in range(3):  # two windows come before there is a plan
        means = list(averager.average([[gradient.clone() for gradient in each] for each in gradients]))
        totals = [total + mean for total, mean in zip(totals, means, strict=True)]
    averager.close()
    for index in order[40:]:
        torch.testing.assert_close(totals[index], 3 * middle[index])  # nothing stays behind
    large = [index for index in order[:40] if means[index].numel() >= 512]
    assert all(0 < int((means[index] != 0).sum()) < 0.2 * means[index].numel() for index in large)


def test_what_decides_a_training_names_it() -> None:
    def settings(row: str, plan: list[list[Any]] | None = None) -> str:
        return str(training(row, plan).settings())

    one, two = [[62, "allgather"]], [[62, "allreduce"]]
    others = settings("safusion", one), settings("safusion", two), settings("safusion"), settings("ddp-bf16")
    assert len({*others, settings("safusion[density=0.1]", one), settings("ddp[lr=0.1]")}) == 6
    assert settings("safusion[dense_below=5]", one) != others[0]
    assert settings("safusion") == settings("ddp") == settings("dear")  # plain averages, whoever makes them
    assert settings("safusion[density=0.05,wire=auto]", one) == others[0]


def test_options_of_the_optimizer_change_the_training() -> None:
    usual, wild = (train_curve(training(row, None, steps=3)) for row in ("ddp", "ddp[lr=3]"))
    assert usual.metrics != wild.metrics


def test_a_training_that_diverges_ends() -> None:
    curve = train_curve(training("ddp[lr=1e38]", None, steps=5))
    assert curve.metrics[-1] is None
    assert curve.steps[-1] < 5


def test_a_row_arrives_at_the_first_point_that_is_as_good_seed_by_seed() -> None:
    ends = {0: 0.9, 1: 0.8}
    curves = {
        "ddp": {s: Curve([2, 4, 6], [0.1, 0.2, end], 1.0) for s, end in ends.items()},
        "wfbp": {0: Curve([2, 4, 6], [0.5, 0.896, 0.99], 1.0), 1: Curve([2, 4, 6], [0.79, 0.794, 0.7], 1.0)},
        "omgs": {s: Curve([2, 4], [0.5, None], 1.0) for s in ends},
    }
    step = {"ddp": times(1.0), "wfbp": times(0.25), "omgs": times(0.1)}
    ddp, wfbp, omgs = summarize(TASK, curves, step)
    assert ddp.steps == {0: 6, 1: 6}
    assert (wfbp.steps, wfbp.seconds, wfbp.reached) == ({0: 4, 1: None}, {0: 1.0, 1: None}, 1)
    assert wfbp.curve == [(0.5, pytest.approx(0.645)), (1.0, pytest.approx(0.845)), (1.5, pytest.approx(0.845))]
    assert (omgs.reached, omgs.mean_seconds, len(omgs.curve)) == (0, None, 1)
    console = Console(width=120, record=True)
    console.print(build_table([ddp, wfbp, omgs], Setting(TASK, 2, "100mbit", 0.05, (0, 1)), 0.01))
    text = console.export_text()
    assert "1 of 2" in text
    assert "never" in text
    assert "2 diverged" in text
    with pytest.raises(RuntimeError, match="seed 0 has diverged"):
        summarize(TASK, {"ddp": {0: Curve([1], [None], 1.0)}}, step)


def test_a_loss_is_to_be_low() -> None:
    curves = {"ddp": {0: Curve([1, 2, 3], [3.0, 2.01, 2.0], 1.0)}, "wfbp": {0: Curve([1, 2, 3], [3, 2.1, 2.03], 1.0)}}
    ddp, wfbp = summarize(TASKS["bytes-lstm"], curves, {"ddp": times(1.0), "wfbp": times(1.0)})
    assert (ddp.steps, wfbp.steps) == ({0: 2}, {0: None})


def test_the_dense_steps_of_powersgd_take_as_long_as_those_of_ddp() -> None:
    step = {"ddp": times(1.0), "powersgd-rank4": times(0.1), "omgs": times(0.1)}
    assert seconds("powersgd-rank4", 30, step) == pytest.approx(12.0)
    assert seconds("powersgd-rank4", 4, step) == pytest.approx(4.0)
    assert seconds("omgs", 30, step) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "digits"}, "unknown task 'digits'"),
        ({"workers": 3}, "64 samples per step of digits-resnet cannot be shared"),
        ({"density": 2.0}, "density is a share"),
        ({"systems": ["easgd"]}, "'easgd' cannot be predicted: workers hold different"),
        ({"systems": ["saf-naive"]}, "each step's timing"),
        ({"systems": ["omgs[fusion=horovod]"]}, "scope='tensor'"),
        ({"systems": ["wfbp[collective=hierarchical]"]}, "have no nodes"),
        ({"systems": ["wfbp[collective=hierarchical-sharded]"]}, "have no nodes"),
        ({"systems": ["wfbp[beta2=0.9]"]}, "SGD, which has no beta2"),
        ({"systems": ["wfbp[lr=fast]"]}, "lr is a number, got 'fast'"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study.accuracy(output=tmp_path, **options)

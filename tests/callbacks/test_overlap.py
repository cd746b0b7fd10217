"""OverlapProfiler in real trainings."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_safusion import Aligned, SAFusionStrategy
from lightning_safusion.callbacks import OverlapProfiler
from lightning_safusion.fusion.events import Clock
from lightning_safusion.profiling import StepFigures, load_timeline, merge_timelines
from lightning_safusion.profiling.timeline import StepTimeline
from tests.models import TakeTurns, TinyClassifier, classification, trainer
from tests.process_group import run_launched
from tests.quick import quick_of
from tests.simulated import TIME, Sleep, SlowTopK, slow_messages

SPARSE: dict[str, Any] = {"collective": "allgather", "fusion": "wfbp"}


def fit(profiler: OverlapProfiler, model: LightningModule | None = None, **options: Any) -> Trainer:
    """Trains on two ranks, sparse."""
    options = {"strategy": SAFusionStrategy(**SPARSE), "callbacks": [profiler], "max_steps": 12} | options
    fitted = trainer(**options)
    fitted.fit(model or TinyClassifier(), classification())
    return fitted


# a schedule of sleeps

FORWARD, BACKWARD, SELECT, EXCHANGE, OPTIMIZER, LOAD = 0.04, 0.06, SlowTopK.seconds, 0.1, 0.08, 0.06


class Asleep(nn.Linear):
    """A layer whose gradients are ready after its sleep."""

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(super().forward(x), FORWARD, BACKWARD)


class AsleepSGD(torch.optim.SGD):
    """Takes a known time."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        TIME.sleep(OPTIMIZER)
        return loss


class SlowLoader(DataLoader[Any]):
    """Takes a known time for every batch."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            TIME.sleep(LOAD)
            yield batch


def test_times_agree_with_a_schedule_of_sleeps(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        slow_messages(lambda: TIME.now() + EXCHANGE)
        profiler = OverlapProfiler(9, 6, tmp_path, table=False)
        options: dict[str, Any] = {"compressor": SlowTopK(), "density": 0.5, "dense_below": 0}
        strategy = SAFusionStrategy(fusion=Aligned(2), collective="allgather", **options)
        model = TinyClassifier(make=lambda params: AsleepSGD(params, 0.1))
        model.net = nn.Sequential(*(Asleep(32, 32) for _ in range(3)))
        model.temperature.requires_grad_(False)
        fitted = trainer(strategy, callbacks=[profiler], max_steps=9)
        fitted.fit(model, SlowLoader(classification().dataset, batch_size=16))
        step = profiler.steps[-1]
        origin = step.spans("backward")[0][0]
        return StepFigures.of(step).as_dict(), [
            [round(moment - origin, 6) for span in (b.select, b.exchange, b.exposed) for moment in span]
            for b in step.buffers
        ]

    for figures, buffers in run_launched(2, run):
        # 0.06 s of backward and 0.03 s of selection alternate; nothing else takes time
        assert buffers == [
            [0.06, 0.09, 0.09, 0.19, 0.27, 0.27],
            [0.15, 0.18, 0.18, 0.28, 0.27, 0.28],
            [0.24, 0.27, 0.27, 0.37, 0.28, 0.37],
        ]
        assert {key: value for key, value in figures.items() if key != "bytes_sent"} == pytest.approx(
            {
                "data_s": LOAD,
                "forward_s": 3 * FORWARD,
                "backward_s": 3 * BACKWARD,
                "select_s": 3 * SELECT,
                "exchange_s": 0.28,
                "exposed_s": 0.1,
                "decode_s": 0.0,
                "optimizer_s": OPTIMIZER,
                "other_s": 0.0,
                "work_s": 3 * FORWARD + 3 * BACKWARD + 3 * SELECT + OPTIMIZER,
                "overlap_ratio": 0.18 / 0.28,
                "step_s": LOAD + 3 * FORWARD + 3 * BACKWARD + 3 * SELECT + 0.1 + OPTIMIZER,
            }
        )


# keys, files and tables


def test_ranks_agree_and_every_logger_gets_all_keys(tmp_path: Path) -> None:
    def run(rank: int) -> tuple[Any, list[int], list[Any]]:
        loggers = [CSVLogger(tmp_path, name, flush_logs_every_n_steps=1) for name in ("first", "second")]
        profiler = OverlapProfiler(5, 2)
        fitted = fit(profiler, logger=loggers, max_steps=14)  # ends among steps that are recorded
        numbers = [step.step for step in profiler.steps]
        return profiler.figures, numbers, fitted.strategy._observers

    results = run_launched(2, run)
    figures, numbers, _ = results[0]
    assert figures == results[1][0]
    assert numbers == [13]
    assert [observers for *_, observers in results] == [[], []]
    keys = {f"safusion/{key}" for key in (*StepFigures.mean(()).__dict__, "slowest_rank", "skew_s")}
    for name in ("first", "second"):
        (path,) = (tmp_path / name).glob("*/metrics.csv")
        rows = list(csv.DictReader(path.open()))
        assert keys <= set(rows[0])
        assert [row["step"] for row in rows] == ["1", "4", "9", "13"]
        assert float(rows[-1]["safusion/exposed_s"]) == pytest.approx(figures.mean.exposed_s)
    (run_dir,) = (tmp_path / "first").glob("*/safusion")
    assert sorted(path.name for path in run_dir.iterdir()) == [
        *("overlap.json", "timeline_rank_00000.json", "timeline_rank_00001.json")
    ]


def test_files_hold_what_was_recorded(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        profiler = OverlapProfiler(5, 3, tmp_path)
        fitted = fit(profiler)
        shown = fitted.progress_bar_metrics["exposed_ms"]
        assert shown == pytest.approx(profiler.figures.mean.exposed_s * 1e3, abs=0.006)
        figure = profiler.plot()
        assert "exposed" in figure.axes[0].get_title(loc="left")
        return profiler.steps, profiler.figures

    (mine, figures), (theirs, _) = run_launched(2, run)
    content = json.loads((tmp_path / "overlap.json").read_text())
    assert content["world_size"] == 2
    assert content["plain_ddp"] is None
    assert [row["step"] for row in content["steps"]] == [0, 1, 2, 3, 4, 7, 8, 9]
    assert content["mean"] == figures.mean.as_dict()
    assert content["ranks"] == [each.as_dict() for each in figures.ranks]
    assert [row["tensors"] for row in content["buffers"]] == [list(buffer.tensors) for buffer in mine[-1].buffers]
    assert content["plan"] == [[1, "allgather"]] * 7
    assert content["settings"]["fusion"] == "WFBP()"
    assert load_timeline(tmp_path) == mine[-1]
    events = json.loads(merge_timelines(tmp_path).read_text())["traceEvents"]
    for rank, steps in enumerate((mine, theirs)):
        forward = [event["dur"] for event in events if event["pid"] == rank and event["name"] == "forward"]
        assert forward == pytest.approx([(end - begin) * 1e6 for s in steps for begin, end in s.spans("forward")])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_first_step_that_is_averaged_as_ddp_does_is_not_recorded(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        profiler = OverlapProfiler(10, 3, tmp_path, table=False)
        strategy = SAFusionStrategy(density=0.05)
        trainer(strategy, callbacks=[profiler], max_steps=10, max_epochs=-1).fit(TinyClassifier(), classification())

    run_launched(2, run)
    steps = json.loads((tmp_path / "overlap.json").read_text())["steps"]
    assert [row["step"] for row in steps] == [1, 2, 3, 7, 8, 9]
    assert all(row["bytes_sent"] for row in steps)


@pytest.mark.parametrize("bar", quick_of(("TQDMProgressBar", "RichProgressBar"), ("TQDMProgressBar",)))
def test_the_table_is_printed_with_both_progress_bars(
    bar: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(rank: int) -> None:
        from lightning.pytorch import callbacks

        profiler = OverlapProfiler(10, 2, tmp_path)
        fit(profiler, callbacks=[profiler, getattr(callbacks, bar)()], enable_progress_bar=True)

    run_launched(2, run)
    output = capfd.readouterr().out
    assert output.count("Where the time went") == 3  # after 2 and 10 steps, and at the end; by rank 0 only
    assert "exposed_ms" in output


# kinds of trainings


def kinds(steps: Sequence[StepTimeline]) -> list[list[str]]:
    """Names of the phases of each recorded step."""
    return [[phase.name for phase in step.phases] for step in steps]


class Unfreezes(TinyClassifier):
    """One layer learns from the second epoch on, for which the model is wrapped anew."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.net[layer].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[self.layer].requires_grad_(self.current_epoch > 0)


def train_all(rank: int, folder: Path) -> dict[str, list[StepTimeline]]:
    """The recorded steps of trainings of some kinds, one after the other."""
    every = {"accumulates": (4, 2), "turns": (4, 2), "wrapped": (6, 6), "again": (4, 2)}
    made = {kind: OverlapProfiler(*steps, folder / kind, table=False) for kind, steps in every.items()}
    fit(made["accumulates"], accumulate_grad_batches=2, max_steps=8)
    turns = SAFusionStrategy(**SPARSE, find_unused_parameters=True)
    fit(made["turns"], TakeTurns(), strategy=turns, max_steps=16)
    fit(made["wrapped"], Unfreezes(0), limit_train_batches=3, max_steps=6, max_epochs=2)
    for _ in range(2):
        fit(made["again"], max_steps=4)
    return {kind: profiler.steps for kind, profiler in made.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[StepTimeline]]]]:
    """The folder of these trainings, and what both ranks have recorded."""
    folder = tmp_path_factory.mktemp("trainings")
    return folder, run_launched(2, train_all, folder)


def test_accumulated_batches_belong_to_one_step(trained: Any) -> None:
    for steps in (found["accumulates"] for found in trained[1]):
        batch = ["data", "forward", "backward"]
        assert kinds(steps) == [[*batch, *batch, "optimizer"]] * 2
        assert [len(step.windows) for step in steps] == [1, 1]
        assert [step.step for step in steps] == [6, 7]


def test_optimizers_that_take_turns_belong_to_one_step(trained: Any) -> None:
    for steps in (found["turns"] for found in trained[1]):
        assert kinds(steps) == [["data", *["forward", "backward", "optimizer"] * 2]] * 2
        assert [len(step.windows) for step in steps] == [2, 2]


def test_a_model_that_is_wrapped_anew_is_followed(trained: Any) -> None:
    for steps in (found["wrapped"] for found in trained[1]):
        assert [sum(len(buffer.tensors) for buffer in step.buffers) for step in steps] == [5, 5, 5, 7, 7, 7]


def test_a_second_fit_begins_anew(trained: Any) -> None:
    content = json.loads((trained[0] / "again" / "overlap.json").read_text())
    assert [row["step"] for row in content["steps"]] == [0, 1, 2, 3]


def test_validation_is_no_part_of_a_step(tmp_path: Path) -> None:
    class Validated(TinyClassifier):
        moments: ClassVar[list[float]]

        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            self.moments.append(time.perf_counter())

    def run(rank: int) -> Any:
        Validated.moments = []
        profiler = OverlapProfiler(8, 8, tmp_path, table=False)
        fitted = trainer(
            SAFusionStrategy(**SPARSE), callbacks=[profiler], max_steps=8, val_check_interval=4, limit_val_batches=1
        )
        fitted.fit(Validated(), classification(), classification())
        first = [(step.step, step.phases[0].name) for step in profiler.steps]
        return first, [(step.begin, step.end) for step in profiler.steps], Validated.moments

    for first, steps, moments in run_launched(2, run):
        without_data = [number for number, name in first if name != "data"]
        assert without_data == [0, 4]
        assert len(moments) >= 2
        assert not any(begin <= moment <= end for moment in moments for begin, end in steps)
        assert any(steps[3][1] <= moment <= steps[4][0] for moment in moments)


def test_with_plain_ddp_phases_are_timed_and_it_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: int) -> Any:
        profiler = OverlapProfiler(5, 2, tmp_path)
        with caplog.at_level("INFO"):
            fitted = fit(profiler, strategy=SAFusionStrategy(density=1.0), max_steps=5)
        said = [record.message for record in caplog.records if "OverlapProfiler" in record.message]
        return profiler.figures.mean.as_dict(), fitted.progress_bar_metrics, said

    (values, bar, said), (*_, by_others) = run_launched(2, run)
    assert values["backward_s"] > 0
    assert "exposed_s" not in values
    assert "exposed_ms" not in bar
    assert len(said) == 1
    assert "no exchange: plain DDP is used, because everything is sent" in said[0]
    assert by_others == []
    assert "density 1" in json.loads((tmp_path / "overlap.json").read_text())["plain_ddp"]


def test_after_an_error_files_are_written_too(tmp_path: Path) -> None:
    class Failing(TinyClassifier):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 7:
                raise ValueError("no good")
            return super().training_step(batch, batch_idx)

    def run(rank: int) -> None:
        with pytest.raises(ValueError, match="no good"):
            fit(OverlapProfiler(5, 2, tmp_path), Failing())

    run_launched(2, run)
    assert load_timeline(tmp_path).step == 4
    assert merge_timelines(tmp_path).exists()


def test_ranges_are_there_only_for_a_profiler(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        from lightning_safusion.fusion import shipment

        entered: list[str] = []
        original = shipment.record_function

        def noted(name: str, args: str) -> Any:
            entered.append(name)
            return original(name, args)

        shipment.record_function = noted  # type: ignore[assignment, misc]  # a function in the place of a class
        fit(OverlapProfiler(4, 2, tmp_path, table=False), max_steps=4)
        silent = list(entered)
        with torch.profiler.profile() as profile:
            fit(OverlapProfiler(4, 2, tmp_path, table=False), max_steps=4)
        counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("SAFusion::")}
        return silent, counts

    for silent, counts in run_launched(2, run):
        assert silent == []
        # the first two windows, whose order is not known, have one buffer, the other two have seven
        assert counts == dict.fromkeys(("SAFusion::select", "SAFusion::exchange", "SAFusion::decode"), 2 * 1 + 2 * 7)


def test_windows_that_are_observed_one_step_late_belong_to_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(rank: int) -> Any:
        monkeypatch.setattr(Clock, "instant", False)  # as the clock of a CUDA device
        reports: list[list[int]] = []
        for every, record, last in ((6, 3, 20), (4, 4, 10)):
            profiler = OverlapProfiler(every, record, tmp_path, table=False)
            fit(profiler, max_steps=last)
            assert all(len(step.windows) == 1 for step in profiler.steps)
            content = json.loads((tmp_path / "overlap.json").read_text()) if rank == 0 else {"steps": []}
            reports.append([row["step"] for row in content["steps"]])
        return reports

    first, _ = run_launched(2, run)
    # the last window of a fit is observed when the fit is over
    assert first == [[0, 1, 2, 3, 4, 5, 9, 10, 11, 15, 16, 17], [0, 1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_times_are_read_one_step_later(tmp_path: Path) -> None:
    profiler = OverlapProfiler(6, 3, tmp_path)
    # with this memory the engine is used with one worker, too
    strategy = SAFusionStrategy(**SPARSE, memory="dgc")
    fitted = trainer(strategy, accelerator="gpu", devices=1, callbacks=[profiler], max_steps=20)
    fitted.fit(TinyClassifier(), classification())
    assert [step.step for step in profiler.steps] == [15, 16, 17]
    for step in profiler.steps:
        (window,) = step.windows
        assert window.beside
        names = [phase.name for phase in step.phases]
        assert names == ["data", "forward", "backward", "optimizer"]
        ((begin, end),) = step.spans("backward")
        for buffer in window.buffers:
            assert begin < buffer.events.closed <= buffer.events.launched <= buffer.exchange[1] <= buffer.events.decoded
            assert buffer.events.decoded <= window.drained <= end
        figures = StepFigures.of(step)
        assert 0 <= figures.exposed_s < figures.step_s
        assert 0 <= figures.overlap_ratio <= 1
    assert [row["step"] for row in json.loads((tmp_path / "overlap.json").read_text())["steps"]] == [
        *(0, 1, 2, 3, 4, 5, 9, 10, 11, 15, 16, 17)
    ]


def test_there_is_no_picture_before_a_fit() -> None:
    with pytest.raises(RuntimeError, match="no step has been recorded in this process"):
        OverlapProfiler().plot()

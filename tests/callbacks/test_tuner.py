"""BufferSizeTuner in real trainings."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from typing_extensions import override

from lightning_safusion import Aligned, Cadence, SAFusionStrategy
from lightning_safusion.callbacks import BufferSizeTuner
from lightning_safusion.callbacks.tuner import describe
from lightning_safusion.fusion.plans.adaptive import Tuned
from lightning_safusion.fusion.replan import Decision
from tests.integration.test_history import Lines
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched
from tests.quick import quick_of
from tests.simulated import TIME, slow_messages


class Deep(TinyClassifier):
    """Many tensors."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(7)), nn.Linear(32, 10))


class Unfreezes(Deep):
    """Trains its first layer from the second epoch on."""

    @override
    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


class Seen(Callback):
    """What a rank records of a fit: how many tensors each buffer holds, step by step, and what was decided and said."""

    def __init__(self) -> None:
        self.plans: list[list[int]] = []
        self.elements: list[int] = []  # of each buffer at the end
        self.decisions: list[Decision] = []  # of the tuner
        self.lines: list[str] = []

    @property
    def actions(self) -> list[str]:
        return [decision.action for decision in self.decisions]

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.plans.append(trainer.strategy.figures()["plan"])
        costs, numels = trainer.strategy.costs, 0
        self.elements = []
        for count in self.plans[-1] if costs is not None else []:
            self.elements.append(sum(costs.numels[numels : numels + count]))
            numels += count


def fit(tuner: BufferSizeTuner, *more: Callback, model: LightningModule | None = None, **options: Any) -> Seen:
    """Trains, and returns what this rank has recorded."""
    system = {"process_group_backend": "gloo", "fusion": Aligned(1), "collective": "allgather"}
    chosen = SAFusionStrategy(**(system | options.pop("strategy", {})))
    path = options.pop("ckpt_path", None)
    seen, said = Seen(), Lines()
    fitting = trainer(chosen, callbacks=[*more, tuner, seen], **({"limit_train_batches": 20} | options))
    fitting.fit(model or Deep(), classification(), ckpt_path=path)
    seen.lines = [line for line in said.lines if "BufferSizeTuner" in line]
    seen.decisions = tuner.decisions
    return seen


def slow_link(seconds: float = 0.008) -> None:
    """A message costs this much after the one before it, and nothing else takes time."""
    ends = [0.0]

    def end() -> float:
        ends.append(max(ends[-1], TIME.now()) + seconds)
        return ends[-1]

    slow_messages(end)


def quick(**options: Any) -> BufferSizeTuner:
    """A tuner for trainings of 20 steps."""
    bounds = {name: options.pop(name) for name in ("min_elements", "max_elements") if name in options}
    return BufferSizeTuner(Cadence(**({"warmup_every": 4, "trial_windows": 3} | options)), **bounds)


@pytest.mark.parametrize("system", quick_of(("saf-inter", "behind"), ("saf-inter",)))
def test_one_buffer_per_tensor_is_left_where_messages_are_slow(system: str, tmp_path: Path) -> None:
    def run(rank: int) -> Seen:
        slow_link()
        loggers = [CSVLogger(tmp_path, name=name, version=0) for name in "ab"]
        return fit(quick(), strategy={"system": system}, logger=loggers, log_every_n_steps=1)

    seen = run_launched(2, run)
    assert seen[0].decisions == seen[1].decisions
    assert seen[0].plans == seen[1].plans
    assert seen[0].actions[:2] == ["switch", "keep"]
    switch, keep = seen[0].decisions[:2]
    assert switch.rival == 17
    assert keep.buffers == len(seen[0].plans[9]) < 9
    assert keep.measured > 0
    assert len(seen[0].lines) == sum(action != "stay" for action in seen[0].actions)
    assert seen[1].lines == []
    assert "instead of 17 buffers" in seen[0].lines[0]
    for name in "ab":
        with (tmp_path / name / "version_0" / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        logged = [float(row["safusion/buffers"]) for row in rows if row.get("safusion/buffers")]
        measured = [float(row["safusion/measured_gain"]) for row in rows if row.get("safusion/measured_gain")]
        assert logged[-1] == seen[0].decisions[-1].buffers
        assert measured == pytest.approx([d.measured for d in seen[0].decisions if d.measured is not None])
        assert {"safusion/predicted_gain", "safusion/window_s"} <= rows[0].keys()


def test_bounds_and_freeze_are_kept() -> None:
    def run(rank: int) -> Seen:
        slow_link()
        return fit(quick(max_elements=2200, freeze_after=8))

    seen = run_launched(2, run)[0]
    assert seen.actions.count("freeze") == 1
    assert max(decision.window for decision in seen.decisions) <= 12  # the end of a trial that began before
    assert seen.plans[10] == seen.plans[-1]
    assert len(seen.plans[-1]) < 17
    assert max(seen.elements) <= 2200


@pytest.mark.parametrize("steps", quick_of((7, 12), (7,)))  # in the middle of a trial, and after it
def test_a_resumed_training_continues_its_trial(tmp_path: Path, steps: int) -> None:
    def run(rank: int) -> tuple[Seen, Seen]:
        slow_link()
        saving = ModelCheckpoint(tmp_path, filename="saved", every_n_train_steps=steps)
        first = fit(quick(freeze_after=5), saving, limit_train_batches=steps, enable_checkpointing=True)
        path = str(tmp_path / "saved.ckpt")
        return first, fit(quick(freeze_after=5), max_epochs=2, limit_train_batches=steps, ckpt_path=path)

    first, again = run_launched(2, run)[0]
    assert first.actions[0] == "switch"
    assert len(again.plans[0]) == first.decisions[-1].buffers < 17  # from the first step on
    verdicts = [action for action in first.actions + again.actions if action in ("keep", "revert")]
    assert len(verdicts) == 1  # the trial goes on, with what it was told before
    assert all(decision.window > steps for decision in again.decisions)


def test_accumulated_gradients_and_a_second_fit() -> None:
    def run(rank: int) -> list[list[int]]:
        tuner = quick()
        strategy = SAFusionStrategy(process_group_backend="gloo", fusion=Aligned(1), collective="allgather")
        fitting = trainer(strategy, callbacks=[tuner], limit_train_batches=20, accumulate_grad_batches=2)
        windows = []
        for _ in range(2):
            fitting.fit_loop.max_epochs = fitting.current_epoch + 1
            fitting.fit(Deep(), classification())
            windows.append([decision.window for decision in tuner.decisions])
        assert isinstance(strategy.settings.fusion, Tuned)
        assert isinstance(strategy.settings.fusion.policy, Aligned)  # not tuned twice
        return windows

    first, second = run_launched(2, run)[1]
    assert set(first) & {4, 8}
    assert set(second) & {4, 8}
    assert max(first) <= 10  # one window for two batches


@pytest.mark.slow
def test_a_model_that_is_wrapped_anew_is_tuned_anew() -> None:
    def run(rank: int) -> Seen:
        return fit(quick(), model=Unfreezes(), max_epochs=2, limit_train_batches=10)

    seen = run_launched(2, run)
    assert seen[0].decisions == seen[1].decisions
    windows = [decision.window for decision in seen[0].decisions]
    assert windows != sorted(windows)  # counted from the beginning
    assert sum(seen[0].plans[0]) == 15
    assert sum(seen[0].plans[-1]) == 17


def test_where_there_is_nothing_to_measure_it_says_so() -> None:
    def run(rank: int) -> list[Seen]:
        return [fit(quick(), strategy={"density": 1.0, "collective": "auto"}), fit(quick(), deterministic=True)]

    seen, silent = run_launched(2, run)
    reasons = "plain DDP is used, because everything is sent", "a deterministic training measures no times"
    for reason, first, second in zip(reasons, seen, silent, strict=True):
        assert first.decisions == second.decisions == second.lines == []
        assert len(first.lines) == 1
        assert reason in first.lines[0]
    assert len(seen[1].plans[-1]) == 17


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (SAFusionStrategy(fusion="wfbp"), "WFBP.*no sizes to choose: use 'adaptive'"),
        (SAFusionStrategy(system="saf-naive"), "Naive.*no sizes"),
    ],
)
def test_what_cannot_be_tuned_is_refused_with_the_way_out(strategy: SAFusionStrategy, text: str) -> None:
    fitting = trainer(strategy, devices=1, callbacks=[BufferSizeTuner()])
    with pytest.raises(MisconfigurationException, match=text):
        BufferSizeTuner().setup(fitting, Deep(), "fit")


def test_options_of_its_cadence_are_taken_one_by_one_for_one_more_release() -> None:
    with pytest.warns(DeprecationWarning, match="warmup_windows of BufferSizeTuner"):
        assert BufferSizeTuner(warmup_windows=40).cadence == Cadence(warmup_windows=40)


def test_options_are_part_of_what_ranks_compare() -> None:
    def run(rank: int) -> str:
        with pytest.raises(RuntimeError, match="different settings") as error:
            fit(BufferSizeTuner(Cadence(every=50 + rank)))
        return str(error.value)

    assert "every=50" in run_launched(2, run)[0]


def test_decisions_in_words() -> None:
    words = [
        describe(Decision(5, "switch", 3, 1, 0.2, None, 0.05)),
        describe(Decision(5, "switch", 3, 1, None, None, 0.05)),
        describe(Decision(12, "revert", 1, 3, 0.2, -0.01, 0.0505)),
        describe(Decision(9, "stay", 3, 4, 0.004, None, 0.05)),
        describe(Decision(9, "stay", 3, 3, 0.0, None, 0.05)),
        describe(Decision(9, "freeze", 3, 3)),
        describe(Decision(15, "dense", 2, 3, None, None, 0.05)),
        describe(Decision(22, "keep", 2, 2, None, 0.1, 0.045)),
        describe(Decision(22, "revert", 3, 2)),
    ]
    assert words == [
        "3 buffers instead of 1 buffer: a window (50.0 ms) should take 20.0 % less",
        "3 buffers instead of 1 buffer, which no longer fit",
        "back to 1 buffer from 3 buffers: a window took 50.5 ms, 1.0 % more (20.0 % less predicted)",
        "3 buffers stay: a window in another plan of 4 buffers would take 0.4 % less",
        "3 buffers stay: no other plan would take less time",
        "3 buffers from now on",
        "everything dense in 2 buffers instead of 3 buffers, since plain DDP should be faster: it is tried",
        "2 buffers stay: a window took 45.0 ms, 10.0 % less",
        "back to 3 buffers from 2 buffers: no window was measured, or the residual is not empty yet",
    ]

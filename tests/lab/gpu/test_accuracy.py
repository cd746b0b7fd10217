"""The set `accuracy`: how many steps fit, what is compared, and that a second call goes on where the first has ended.

Covers: steps by measured times; losses against dense training's of the same seed; a stage whose training fails, whose
    time is over, or that is stopped between two points of a curve.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

from lab.gpu import accuracy, trials
from lab.gpu.accuracy import COMPARED, GOALS, MOST_STEPS, chosen_steps, comparison, trainings
from lab.gpu.device import Device
from lab.gpu.figures import Figure
from lab.gpu.stages import Setting
from lab.gpu.trials import Outcome, Recipe, Trial, trained

SOME = ("dense", "PowerSGD rank 4")
DENSE, OTHER = (Trial("25M", system, 0) for system in SOME)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Figure]]:
    """A stage with two systems that need no kernels."""
    monkeypatch.setattr(accuracy, "COMPARED", {"25M": SOME})
    return lambda: list(trainings(Setting(True, tmp_path), "accuracy", [DENSE, OTHER]))


def told(loss: float | None) -> Outcome:
    return Outcome(loss, [], (10, 1e-3, 1.0), 1.0, 4)


@pytest.mark.parametrize(
    ("seconds", "least", "most"),
    [
        ({"dense": 0.01, "2 %": 0.01, "1 %": 0.01}, MOST_STEPS, MOST_STEPS),
        ({"dense": 0.04, "2 %": 0.05, "1 %": 0.05}, 800, 1000),
        ({"dense": 0.01, "2 %": 0.02, "1 %": 0.02, "DeMo": 0.07}, 1500, 1999),
        ({"dense": 0.01, "2 %": 0.02, "1 %": 0.02, "DeMo": 9.0}, 1500, 1500),
        ({}, MOST_STEPS, MOST_STEPS),
    ],
)
def test_steps_are_as_many_as_fit(seconds: dict[str, float], least: int, most: int) -> None:
    assert least <= chosen_steps("25M", seconds) <= most


def test_losses_are_compared_with_dense_training_of_the_same_seed() -> None:
    losses = {("dense", 0): 1.0, ("dense", 1): 2.0, ("2 %", 0): 1.004, ("2 %", 1): 2.0, ("1 %", 1): 2.1}
    known = {Trial("25M", *of): told(loss) for of, loss in losses.items()}
    known[Trial("25M", "DeMo", 0)] = told(None)
    two, one = comparison("25M", known.get)
    assert (two.value, two.most, two.holds) == (pytest.approx(0.2), 0.5, True)
    assert two.note == "seed 0: +0.40, seed 1: +0.00"
    assert (one.value, one.most, one.holds) == (pytest.approx(5.0), 1.0, False)
    assert {size for size, _ in GOALS} <= COMPARED.keys()


def test_a_second_call_goes_on(
    stage: Callable[[], list[Figure]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, done = trained, list[Trial]()

    def once(place: Device, trial: Trial, *arguments: object, **options: object) -> Outcome:
        if len(arguments) > 1:  # no look at a rate
            done.append(trial)
            if done == [DENSE, OTHER]:
                raise RuntimeError("no memory")
        return real(place, trial, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(accuracy, "trained", once)
    figures: list[Figure] = []
    with pytest.raises(RuntimeError, match="trainings that failed: 25M, PowerSGD rank 4, seed 0"):
        figures.extend(trainings(Setting(True, tmp_path), "accuracy", [DENSE, OTHER]))
    first = (tmp_path / "accuracy-curves.csv").read_text()
    again = {figure.name: figure for figure in stage()}
    assert done == [DENSE, OTHER, OTHER]
    for trial in (DENSE, OTHER):
        assert again[f"{trial}: held-out loss"].note.startswith("3 steps, rate ")
    assert "25M, PowerSGD rank 4: held-out loss above dense training's" in again
    curves = (tmp_path / "accuracy-curves.csv").read_text()
    assert curves.startswith(first)
    assert [line.split(",")[1] for line in curves.splitlines()[1:]] == ["dense"] * 3 + ["PowerSGD rank 4"] * 3


def test_what_does_not_fit_is_named(stage: Callable[[], list[Figure]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy.Work, "fits", lambda work, trial: trial == DENSE)
    names = [figure.name for figure in stage()]
    assert f"{DENSE}: held-out loss" in names
    assert f"{OTHER}: not trained" in names


def test_a_training_that_is_stopped_leaves_its_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations = iter([5.0])  # then the user stops it
    monkeypatch.setattr(trials.BatchedTraining, "evaluate", lambda training: next(evaluations))
    with pytest.raises(StopIteration):
        trained(Device(rehearse=True), DENSE, Recipe(4, 1e-3), tmp_path / "curves.csv", points=2)
    header, point = (tmp_path / "curves.csv").read_text().splitlines()
    assert header.split(",")[-3:] == ["step", "training loss", "held-out loss"]
    assert point.split(",")[:6] == ["25M", "dense", "0", "4", "0.001", "2"]


def test_a_training_that_diverges_has_no_loss() -> None:
    outcome = trained(Device(rehearse=True), DENSE, Recipe(4, 1e30), points=4)
    assert outcome.loss is None
    assert len(outcome.curve) < 4

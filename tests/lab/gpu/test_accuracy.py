"""The set `accuracy`: what is trained next, what is compared, and a second call goes on where the first has ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("triton")

from lab.gpu import trials
from lab.gpu.accuracy import COMPARED, GOALS, SEEDS, Result, Trials, comparison, finished
from lab.gpu.device import Device
from lab.gpu.trials import SIZES, Outcome, Trial, trained

DENSE, SPARSE, OTHER = (Trial("25M", system, 0, 1e-3) for system in ("dense", "2 %", "1 %"))


def told(loss: float | None) -> Outcome:
    return Outcome(loss, [(1, 1.0, 1.0)], 1.0, (4, 4.0))


def work(trial: Trial) -> Result:
    if trial == OTHER:
        time.sleep(600)
    if trial == SPARSE:
        raise MemoryError("2 TB")
    return told(trial.lr)


def test_losses_are_compared_at_best_rates_with_dense_training_of_the_same_seed(tmp_path: Path) -> None:
    known = Trials(tmp_path, cuda=True)
    losses = {("dense", 0): (1.0, 1.1), ("dense", 1): (2.0, None), ("2 %", 0): (1.2, 1.004), ("2 %", 1): (2.0, None)}
    losses |= {("1 %", 1): (2.1, 2.2), ("DeMo", 0): (None, None)}
    for (system, seed), pair in losses.items():
        for lr, loss in zip((1e-3, 2e-3), pair, strict=True):
            known.add(Trial("25M", system, seed, lr), told(loss))
    two, one = comparison("25M", known)
    assert (two.value, two.most, two.holds) == (pytest.approx(0.2), 0.5, True)
    assert two.note == "seed 0: +0.40 (rates 0.001 and 0.002), seed 1: +0.00 (rates 0.001 and 0.001)"
    assert (one.value, one.most, one.holds) == (pytest.approx(5.0), 1.0, False)
    assert {size for size, _ in GOALS} <= COMPARED.keys()


def test_the_second_seed_takes_the_best_rates_and_a_second_call_goes_on(tmp_path: Path) -> None:
    known, order = Trials(tmp_path, cuda=True), list[Trial]()
    for trial in known.missing():
        order.append(trial)
        known.add(trial, told(None if trial.system == "1 %" else abs(trial.lr - 2e-3)))
    assert order[0] == DENSE
    assert {trial.lr for trial in order if trial.seed == SEEDS[1]} == {2e-3}
    assert {trial.system for trial in order if trial.seed == SEEDS[1]} == {"dense", "2 %", "PowerSGD rank 4"}
    assert {(trial.size, trial.system) for trial in order} == {
        (size, system) for size, systems in COMPARED.items() for system in systems
    }
    assert list(Trials(tmp_path, cuda=True).missing()) == []
    assert next(Trials(tmp_path, cuda=False).missing()) == DENSE  # a rehearsal trains nothing that counts


@pytest.mark.slow
def test_trainings_side_by_side_outlive_one_that_fails_and_one_that_hangs() -> None:
    last = [DENSE._replace(lr=lr) for lr in SIZES["25M"].rates]
    results = dict(finished([OTHER, SPARSE, *last], work, 2, time.perf_counter() + 40, rehearse=False))
    assert results[SPARSE] == "MemoryError('2 TB')"
    assert str(results[OTHER]).startswith("time was short")
    assert [results[trial] for trial in last] == [told(trial.lr) for trial in last]


def test_a_training_that_is_stopped_leaves_its_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations = iter([5.0])  # then the user stops it
    monkeypatch.setattr(trials.BatchedTraining, "evaluate", lambda training: next(evaluations))
    with pytest.raises(StopIteration):
        trained(Device(rehearse=True), DENSE, 4, tmp_path / "curves.csv", points=2)
    header, point = (tmp_path / "curves.csv").read_text().splitlines()
    assert header.split(",")[-3:] == ["step", "training loss", "held-out loss"]
    assert point.split(",")[:5] == ["25M", "dense", "0", "0.001", "2"]


def test_a_training_that_diverges_has_no_loss() -> None:
    outcome = trained(Device(rehearse=True), DENSE._replace(lr=1e30), 4, points=4)
    assert outcome.loss is None
    assert len(outcome.curve) < 4

"""Experiments of the papers: claims are read right, and each command ends in a table, sentences and a picture."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from examples.workloads.make_tiny_data import FOLDER
from lab.__main__ import main
from lab.papers import convergence, curves
from lab.papers.claims import DENSE, EXPERIMENTS, HERE, PAPERS, RIVALS, Claim, Step
from lab.papers.convergence import SYSTEMS, TASKS, Point
from lab.papers.figures import write
from lab.papers.measured import WORKLOADS, measure, row_of
from lab.papers.report import draw, gains, sentences, table
from lightning_safusion.tools.bench.rows import parse_row
from lightning_safusion.tools.plan.traces import TRACE_NAMES
from tests.documents.pages import ROOT

TIMES = {"wfbp": 2.0, "oktopk": 1.5, "omgs": 1.2, "cupcake": 1.1, PAPERS: 1.0, HERE: 0.9, DENSE: 1.3}


def steps(number: int, times: dict[str, float] = TIMES) -> list[Step]:
    experiment = EXPERIMENTS[number]
    return [
        Step(model, condition.name, system, times[system], times[system] / 10, times[system] / 5)
        for model in experiment.models
        for condition in experiment.conditions
        for system in experiment.systems
    ]


def points(losses: dict[str, float]) -> list[Point]:
    """A curve for each task and system, whose last metric is worse than dense by a share."""
    return [
        Point(task, system, step, step / 10, (1 - share if TASKS[task].higher_is_better else 1 + share) * step / 2)
        for task in TASKS
        for system, share in losses.items()
        for step in (1, 2)
    ]


@pytest.mark.parametrize("number", EXPERIMENTS)
def test_every_experiment_can_be_simulated_and_measured(number: int) -> None:
    experiment = EXPERIMENTS[number]
    assert set(experiment.models) <= {*WORKLOADS} & set(TRACE_NAMES)
    assert len({each.name for each in experiment.conditions}) == len(experiment.conditions)
    for condition in experiment.at(["1gbit"], 2):
        for system in experiment.systems:
            parse_row(row_of(system, condition))


@pytest.mark.parametrize("number", EXPERIMENTS)
def test_every_comparison_of_a_claim_has_a_range(number: int) -> None:
    equal = dict.fromkeys(EXPERIMENTS[number].systems, 1.0)
    found = gains(EXPERIMENTS[number], steps(number, equal))
    assert all((gain.claimed is None) == (not gain.claim.ranges) for gain in found)
    assert all(gain.percent == 0 for gain in found)


def test_densities_and_models_have_claims_of_their_own() -> None:
    throughput, density = EXPERIMENTS[2].claims[0], EXPERIMENTS[6].claims[0]
    assert throughput.range("vit-large", "16 GPUs, 200gbit") == (18, 104)
    assert throughput.range("bert-large", "16 GPUs, 200gbit") == (20, 144)
    names = [condition.name for condition in EXPERIMENTS[6].conditions]
    assert [density.range("bert-large", name) for name in names] == [(27.7, 78.6), (26.2, 83.1), (14.2, 77.2)]


def test_a_claim_holds_by_its_least_gain_or_its_most() -> None:
    at_least, at_most = Claim("seconds", (), {"": (10, 20)}), Claim("select", (), {"": (4, 6)}, at_most=True)
    assert [at_least.reached(gain, (10, 20)) for gain in (9, 10, 30)] == [False, True, True]
    assert [at_most.reached(gain, (4, 6)) for gain in (-5, 6, 7)] == [True, True, False]


def test_sentences_count_what_holds() -> None:
    first, beyond = sentences(EXPERIMENTS[5], steps(5))
    assert first.startswith("**The claim is reached in part**: the step of `wfbp`, `oktopk`, `omgs`, `cupcake`")
    assert "by +10 % to +100 %" in first  # cupcake, wfbp
    assert "24 of 32 comparisons" in first  # all but cupcake with ResNet-152 and BERT-large, at four compressors
    assert beyond.startswith("Not in the slides: the step of `ddp-bf16`")
    good = sentences(EXPERIMENTS[5], steps(5, {**TIMES, "cupcake": 1.3, "omgs": 1.3}))[0]
    assert good.startswith("**The claim is reached**")
    bad = sentences(EXPERIMENTS[5], steps(5, {**TIMES, **dict.fromkeys(RIVALS, 0.9)}))[0]
    assert bad.startswith("**The claim is not reached**")


def test_what_was_not_measured_decides_nothing() -> None:
    nothing_exposed = [replace(each, exposed=0.0) for each in steps(4)]
    found = sentences(EXPERIMENTS[4], nothing_exposed)
    assert found[0].startswith("Not decided: the exposed exchange of `wfbp`")
    assert math.isnan(gains(EXPERIMENTS[4], nothing_exposed)[0].percent)
    assert "nan" not in table(EXPERIMENTS[4], nothing_exposed)
    figure = Figure()
    draw(EXPERIMENTS[4], nothing_exposed, figure)
    assert figure.axes


def test_a_tiny_experiment_leaves_table_picture_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["papers", "--experiment", "3", "--tiny", "--output", str(tmp_path)])
    text = (tmp_path / "experiment-3-tiny.md").read_text()
    assert text.strip() in capsys.readouterr().out
    (row,) = re.findall(r"^\| resnet-152 .*$", text, re.MULTILINE)
    assert f"\n{row}\n" in (ROOT / "docs" / "papers.md").read_text(), "docs/papers.md has other figures"
    with (tmp_path / "experiment-3-tiny.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["system"] for row in rows] == EXPERIMENTS[3].systems
    assert all(float(row["seconds"]) > float(row["exposed"]) > 0 for row in rows)
    assert (tmp_path / "experiment-3-tiny.svg").read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--experiment 8", "there is no experiment 8: give 1 to 7"),
        ("--experiment 1 --measured", "experiment 1 always trains"),
        ("--experiment 1 --tiny --bandwidth 1gbit,10gbit", "over links of one bandwidth, got 1gbit, 10gbit"),
        ("--experiment 2 --config a.yaml", "--config is of trainings"),
        ("--experiment 2 --measured --bandwidth 1gbit", "--bandwidth is of simulated links and of those of --tiny"),
        ("--experiment 7 --bandwidth fast", "fast"),
    ],
)
def test_what_makes_no_sense_is_refused(options: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["papers", *options.split()])


@pytest.mark.parametrize("number", ["1", "3 --measured"])
def test_full_size_needs_a_launcher(number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="start the command with srun or torchrun, or give --tiny"):
        main(["papers", "--experiment", *number.split(), "--output", str(tmp_path)])


def test_accuracy_is_compared_with_dense_and_on_images_with_rivals() -> None:
    losses = dict.fromkeys(SYSTEMS, 0.1) | {"dense": 0.0, PAPERS: 0.01}
    found = curves.sentences(points(losses))
    assert all(line.startswith(f"{task}: **the claim is reached**") for task, line in zip(TASKS, found, strict=False))
    found = curves.sentences(points(losses | {"omgs": 0.005}))
    assert ["is reached in part" in line for line in found[:4]] == [True, True, False, False]
    found = curves.sentences(points(losses | {PAPERS: 0.03}))
    assert ["is not reached" in line for line in found[:4]] == [False, False, True, True]
    figure = Figure()
    curves.draw(points(losses), figure)
    assert len(figure.axes) == 2 * len(TASKS)
    assert "| lstm_wikitext2 | safusion-paper | 1.010 |" in curves.table(points(losses))


@pytest.mark.parametrize(("options", "beside"), [([], ""), (["--config", "a/quick.yaml"], ", quick")])
def test_what_has_been_trained_is_not_trained_again(
    options: list[str], beside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / FOLDER).mkdir(parents=True)
    out = tmp_path / "out" / "experiment-1-tiny"
    logs = [out / f"{where}{beside}" for where in ("links of 100mbit", "the loopback")]
    known = points(dict.fromkeys(SYSTEMS, 0.015) | {"dense": 0.0})
    for task in TASKS:
        for system in SYSTEMS:
            own = [point for point in known if (point.task, point.system) == (task, system)]
            for folder in logs:
                folder.mkdir(parents=True, exist_ok=True)
                write(folder / f"{task} {system}.csv", own)
    main(["papers", "--experiment", "1", "--tiny", "--output", "out", *options])
    text = (tmp_path / "out" / "experiment-1-tiny.md").read_text()
    assert text.count("the claim is reached in part") == 2  # images: level with the rivals
    assert (tmp_path / "out" / "experiment-1-tiny.svg").stat().st_size > 10_000


@pytest.mark.slow
def test_tiny_workloads_train_and_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(convergence, "TASKS", {"bert_large_squad": TASKS["bert_large_squad"]})
    monkeypatch.setattr(convergence, "SYSTEMS", ("dense", "oktopk"))
    trained = convergence.train(True, ["1gbit"], [], tmp_path / "trained")
    assert trained is not None
    for system in ("dense", "oktopk"):
        curve = [point for point in trained[0] if point.system == system]
        assert [point.step for point in curve] == sorted({point.step for point in curve})
        assert curve[-1].metric > curve[0].metric
        assert curve[-1].seconds > curve[0].seconds > 0

    breakdown = replace(EXPERIMENTS[4], models=("bert-large",), claims=(Claim("exposed", (("wfbp", HERE),), {}),))
    found = measure(breakdown, True, ["100mbit"], [], tmp_path / "measured")
    assert found is not None
    assert [step.system for step in found[0]] == ["wfbp", HERE]
    assert all(step.seconds > 0 and step.select > 0 for step in found[0])

"""The table, its verdict, sweeps, files, pictures, and ``safusion plan``."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_safusion import SAFusionStrategy
from lightning_safusion.comm.cost import LINKS
from lightning_safusion.tools.plan.calibration import CollectiveSample, CollectiveTimes
from lightning_safusion.tools.plan.cluster import Cluster
from lightning_safusion.tools.plan.comparison import best_sparse, plan_table, recommend, sweep_table
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.pictures import plot_sweep, plot_table
from lightning_safusion.tools.plan.report import SWEEPS, parse_sweep, run_plan
from lightning_safusion.tools.plan.traces import resolve_trace
from safusion_command import main

LSTM, RESNET = resolve_trace("lstm"), resolve_trace("resnet-50")
SLOW = Job(LSTM, Cluster(8, 1, LINKS["1gbit"]))
FAST = Job(RESNET, Cluster(8, 8, LINKS["200gbit-rdma"]), 0.1)
SOME = ["ddp", "ddp-bf16", "gtopk", "safusion"]
ARGUMENTS: dict[str, Any] = {"nodes": 8, "gpus_per_node": 1, "bandwidth": "1gbit", "density": 0.01}


def test_rows_come_in_the_order_asked_for_with_speed_ups_over_bf16_ddp() -> None:
    rows = plan_table(SLOW, SOME)
    assert [row.system for row in rows] == SOME
    assert rows[1].speedup == 1.0
    for row in rows:
        assert row.speedup == pytest.approx(rows[1].iteration_s / row.iteration_s)
        assert row.exposed_s == pytest.approx(row.iteration_s - LSTM.seconds)


def test_sparse_is_recommended_where_it_pays() -> None:
    rows = plan_table(SLOW, SOME)
    best = best_sparse(rows)
    assert best is not None
    assert best.system == "safusion"
    assert min(rows, key=lambda row: row.iteration_s).system == "gtopk"  # faster, but it loses gradients
    (verdict, accuracy, faster), settings = recommend(rows, 0.01, "AdamW")
    assert "'safusion'" in verdict
    assert re.fullmatch(r"gtopk is faster \(.* ms\), and not recommended: its accuracy is not known\.", faster)
    assert "with AdamW and safusion is not known" in accuracy
    strategy = settings["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_safusion.SAFusionStrategy"
    assert strategy["init_args"] == {"system": "safusion", "density": 0.01}


def test_dense_is_recommended_where_it_is_better() -> None:
    rows = plan_table(FAST, SOME)
    assert best_sparse(rows) is None
    (verdict,), settings = recommend(rows, 0.1, "SGD")
    assert verdict.startswith("Dense DDP is the better choice")
    assert settings["trainer"]["strategy"]["init_args"] == {"system": "ddp-bf16"}


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ("collective=hierarchical,density=0.005", {"density": 0.005, "collective": "hierarchical"}),
        (
            "wire=q4,dense_below=4096,scope=tensor",
            {"density": 0.01, "wire": "q4", "dense_below": 4096, "scope": "tensor"},
        ),
    ],
)
def test_settings_have_the_options_of_the_best_row(options: str, given: dict[str, Any]) -> None:
    best = f"safusion[{options}]"
    (verdict, accuracy), settings = recommend(
        plan_table(Job(LSTM, Cluster(8, 8, LINKS["10gbit"])), [best, "wfbp"]), 0.01, "AdamW"
    )
    assert repr(best) in verdict
    assert f"with AdamW and {best} is not known" in accuracy
    arguments = settings["trainer"]["strategy"]["init_args"]
    assert arguments == {"system": "safusion", **given}
    assert SAFusionStrategy(**arguments).system == "safusion"


def test_the_defaults_accuracy_is_known_at_the_density_of_a_row() -> None:
    (_, accuracy), settings = recommend(plan_table(SLOW, ["saf-pooled[density=0.02]"]), 0.01, "AdamW")
    assert "a density of 0.02 ended" in accuracy
    assert settings["trainer"]["strategy"]["init_args"] == {"system": "saf-pooled", "density": 0.02}


def test_a_sweep_over_links_takes_no_measured_times() -> None:
    samples = tuple(CollectiveSample(size, 1.0) for size in (100, 10_000))
    times = CollectiveTimes(samples)
    measured = Job(LSTM, Cluster(8, 1, LINKS["1gbit"], measured={"allgather": times, "allreduce": times}))
    assert plan_table(measured, ["syncea"])[0].iteration_s > 1.0
    records = sweep_table(measured, ["ddp"], over={"bandwidth": ["1gbit", "100gbit"], "nodes": [8, 16]})
    rows = {(record["bandwidth"], record["nodes"]): record["iteration_s"] for record in records}
    assert rows["100gbit", 8] < rows["1gbit", 8] < rows["1gbit", 16]


def test_pictures_show_every_system() -> None:
    rows = plan_table(SLOW, SOME)
    ax = plot_table(rows).axes[0]
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert labels == [row.system for row in sorted(rows, key=lambda row: -row.iteration_s)]
    assert len(ax.patches) == 2 * len(SOME)
    records = sweep_table(SLOW, SOME, over={"nodes": [2, 4]})
    shown = [str(line.get_label()) for line in plot_sweep(records, "nodes").axes[0].get_lines()]
    assert [label.removeprefix("~ ") for label in shown] == SOME
    counted = {record["system"]: record["counted"] for record in records}
    assert [not label.startswith("~ ") for label in shown] == [counted[name] for name in SOME]


def test_systems_that_lie_on_each_other_have_one_line() -> None:
    records = sweep_table(SLOW, ["ddp", "ddp-bf16", "ddp-fp16"], over={"bandwidth": ["1gbit", "10gbit"]})
    lines = plot_sweep(records, "bandwidth").axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["ddp", "ddp-bf16, ddp-fp16"]


def test_every_simulation_is_told_before_it_begins() -> None:
    told: list[str] = []
    plan_table(SLOW, ["safusion", "ddp"], told.append)
    sweep_table(SLOW, ["ddp"], {"nodes": [2, 4]}, told.append)
    assert told == ["ddp-bf16", "safusion", "ddp", *2 * ["ddp-bf16", "ddp"]]


def test_sweep_texts() -> None:
    assert parse_sweep("bandwidth=1gbit,10gbit density") == {
        "bandwidth": ["1gbit", "10gbit"],
        "density": list(SWEEPS["density"]),
    }
    for wrong in ("speed", "density=", "bandwidth=,"):
        with pytest.raises(ValueError, match=wrong.rstrip("=,")):
            parse_sweep(wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sweep": "nodes=two"}, "nodes is a whole number, got 'two'"),
        ({"sweep": "density=0.1,0"}, "density is a share"),
        ({"sweep": "bandwidth=fast"}, "unknown bandwidth 'fast'"),
        ({"output": "taken"}, "taken"),
    ],
)
def test_what_is_wrong_is_said_before_the_simulation(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").touch()
    monkeypatch.setattr("lightning_safusion.tools.plan.report.plan_table", lambda *_: pytest.fail("it simulates"))
    with pytest.raises((OSError, ValueError), match=message):
        run_plan("lstm", **ARGUMENTS, systems=SOME, **options)


def test_json_has_all_that_was_found_and_is_alone(capfd: pytest.CaptureFixture[str]) -> None:
    run_plan("lstm", **ARGUMENTS, systems=SOME, sweep="nodes=2,4", format="json")
    printed, progress = capfd.readouterr()
    found = json.loads(printed)
    assert progress == ""  # it is no terminal
    assert found["systems"] == [asdict(row) for row in plan_table(SLOW, SOME)]
    assert found["sweep"] == sweep_table(SLOW, SOME, {"nodes": [2, 4]})
    sentences, settings = recommend(plan_table(SLOW, SOME), 0.01, "AdamW", 8)
    assert set(sentences) < set(found["sentences"])
    assert found["settings"] == settings


def test_yaml_is_a_file_for_lightning_cli(capsys: pytest.CaptureFixture[str]) -> None:
    run_plan("lstm", **ARGUMENTS, systems="ssfusion[offload=false]", format="yaml")
    given = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]
    assert given["init_args"] == {"system": "ssfusion", "density": 0.01, "offload": False}
    assert SAFusionStrategy(**given["init_args"]).settings.offload is False


def test_files_are_written_where_pictures_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run_plan("lstm", **ARGUMENTS, systems=SOME, format="yaml", output=str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"plan.csv", "plan.json", "settings.yaml"}
    told = " ".join(capsys.readouterr().err.split())
    assert 'no pictures: a picture needs matplotlib: pip install "lightning-safusion[plot]"' in told


@pytest.mark.parametrize(
    ("options", "density"),
    [({}, 0.02), ({"optimizer": "sgd"}, 0.1), ({"optimizer": "ADAMW"}, 0.02), ({"density": 0.3}, 0.3)],
)
def test_the_command_begins_with_the_default_density(
    options: dict[str, Any], density: float, capsys: pytest.CaptureFixture[str]
) -> None:
    run_plan("lstm", bandwidth="1gbit", systems="saf-pooled", **options)
    printed = capsys.readouterr().out
    assert f"density: {density}\n" in printed
    assert f"Accuracy with {options.get('optimizer', 'AdamW')}: on small networks" in " ".join(printed.split())


def test_an_unknown_optimizer_needs_a_density() -> None:
    with pytest.raises(ValueError, match=r"'Shampoo': nothing is known .* name a density"):
        run_plan("lstm", optimizer="Shampoo")


def test_a_sweep_shows_the_recommended_system_and_the_rate_of_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    run_plan("lstm", nodes=8, gpus_per_node=1, systems=SOME, density=0.01, sweep="bandwidth=1gbit,30gbit")
    lines = capsys.readouterr().out.partition("recommended system")[2].splitlines()
    rows = [words for words in (re.findall(r"[\w.-]+", line) for line in lines) if words and words[0] in ("1", "30")]
    assert [words[:2] for words in rows] == [["1", "safusion"], ["30", "safusion"]]  # gtopk is faster


def test_the_command_prints_and_writes_rows_with_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "ddp-bf16, saf-pooled[collective=sharded, density=0.1],saf-pooled[density=0.2]"
    names = ["ddp-bf16", "saf-pooled[collective=sharded,density=0.1]", "saf-pooled[density=0.2]"]
    options = ["--nodes", "8", "--gpus-per-node", "1", "--bandwidth", "1gbit", "--sweep", "nodes=2,16"]
    main(["plan", "--trace", "lstm", *options, "--systems", rows, "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert f"'{names[1]}' takes" in "".join(line.strip() for line in printed.splitlines())
    for text in ("class_path: lightning_safusion.SAFusionStrategy", "modelled, not measured"):
        assert text in " ".join(printed.split())
    files = {"plan.csv", "plan.json", "plan.png", "settings.yaml", "sweep.csv", "sweep.json", "sweep.png"}
    assert {path.name for path in tmp_path.iterdir()} == files
    for stem, count in (("plan", 1), ("sweep", 2)):
        records = json.loads((tmp_path / f"{stem}.json").read_text(encoding="utf-8"))
        assert [record["system"] for record in records] == names * count
        with (tmp_path / f"{stem}.csv").open(encoding="utf-8") as file:
            assert [row["system"] for row in csv.DictReader(file)] == names * count
    arguments = yaml.safe_load((tmp_path / "settings.yaml").read_text(encoding="utf-8"))["trainer"]["strategy"]
    assert arguments["init_args"] == {"system": "saf-pooled", "density": 0.1, "collective": "sharded"}

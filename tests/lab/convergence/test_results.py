"""Results: written once, found again, summed up, ranked and drawn."""

from __future__ import annotations

import itertools
import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from lab.__main__ import main
from lab.convergence.pictures import save_pictures
from lab.convergence.plan import DENSITIES, LANGUAGE, MAIN, SCOPES, SMALL_DENSE, full, short
from lab.convergence.ranks import standings
from lab.convergence.scheme import Scheme
from lab.convergence.summary import summarize, table
from lab.convergence.training import Result, Run, read_results, results_of
from lab.processes import key_of
from lab.tasks import TASKS, Task

TASK = TASKS["digits-resnet"]
ALL = {**SCOPES, **SMALL_DENSE}


def result(metric: float | None = 0.9, **changes: Any) -> Result:
    values = {"missing": 0.0, "density": 0.01, "error": 0.9, "bytes_mean": 120.0, "bytes_median": 100.0}
    return Result(
        **({"metric": metric, "curve": [1.0], **values, "dense_bytes": 4000, "tensors": 62, "seconds": 1.0} | changes)
    )


def test_a_run_that_is_written_down_is_not_missing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    runs = [Run(TASK, Scheme("ahead"), seed) for seed in (0, 1)]
    ledger = read_results(path)
    assert ledger.missing([*runs, runs[0]]) == runs  # each once
    ledger.add(runs[0].settings(), result(0.5))
    for each in (ledger, read_results(path)):
        assert each.missing(runs) == runs[1:]
        assert results_of(each, runs) == {"digits-resnet/ahead": {0: result(0.5)}}
    # whatever decides the result makes another run
    for other in (
        Run(TASK, Scheme("ahead", density=0.05), 0),
        Run(replace(TASK, steps=5), Scheme("ahead"), 0),
        Run(replace(TASK, revision=99), Scheme("ahead"), 0),
        Run(TASKS["digits-vgg"], Scheme("ahead"), 0),
    ):
        assert ledger.missing([other]) == [other]


def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    runs = [Run(TASK, Scheme("ahead"), seed) for seed in (0, 1)]
    ledger = read_results(path)
    for run in runs:
        ledger.add(run.settings(), result())
    path.write_text(path.read_text()[:-20])
    ledger = read_results(path)
    assert ledger.missing(runs) == runs[1:]
    ledger.add(runs[1].settings(), result())
    assert read_results(path).missing(runs) == []
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(ValueError, match="line 1 of .* is not a finished run"):
        read_results(path)


def test_intervals_and_differences_are_over_seeds() -> None:
    runs = [Run(TASK, scheme, seed) for seed in range(3) for scheme in (Scheme("dense"), Scheme("ahead"))]
    metrics = {"digits-resnet/dense": (0.90, 0.94, 0.80), "digits-resnet/ahead": (0.91, 0.96, 0.83)}
    dense, ahead = summarize(runs, {config: dict(enumerate(map(result, each))) for config, each in metrics.items()})
    assert ahead.metric.mean == pytest.approx(0.90)
    assert ahead.difference.mean == pytest.approx(0.02)
    quantile = 4.302652729749464  # of Student's t, two degrees of freedom
    assert ahead.difference.half == pytest.approx(quantile * 0.01 / math.sqrt(3))  # seed by seed: no more than this
    assert dense.metric.half > 0.1
    assert "| digits-resnet/ahead | 0.9000 ± 0.1629 | 0.9100 | +0.0200 ± 0.0248 | 3 |" in table([dense, ahead])
    assert ahead.ratio == 40


def test_runs_that_diverged_are_counted_and_not_averaged() -> None:
    runs = [Run(TASK, Scheme("ahead"), seed) for seed in range(2)]
    (summary,) = summarize(runs, {runs[0].config: {0: result(None)}})
    assert math.isnan(summary.metric.mean)
    assert "| 1 (1 diverged) |" in table([summary])
    (summary,) = summarize(runs, {runs[0].config: {0: result(None), 1: result(0.7)}})
    assert (summary.metric.mean, summary.diverged, summary.runs) == (0.7, 1, 2)
    json.dumps(summary.figures(), allow_nan=False)


Rows = dict[tuple[str, float, int], tuple[float | None, float]]  # metric and bytes by contender, density and seed


def ranked(rows: Rows, contenders: dict[str, Scheme], task: Task = MAIN[0]) -> dict[str, Any]:
    """Standings by name, the best first."""
    results: dict[str, dict[int, Result]] = {}
    for (name, density, seed), (metric, sent) in rows.items():
        config = Run(task, replace(ALL[name], density=density), 0).config
        results.setdefault(config, {})[seed] = result(metric, bytes_median=sent)
    return {row.name: row for row in standings(results, contenders)}


def test_ranks_at_equal_bytes_do_not_reward_sending_more() -> None:
    rows: Rows = {}
    for density, name, seed in itertools.product(DENSITIES, ALL, (0, 1)):
        larger = 2.0 if "small dense" in name else 1.0
        # all lie on one curve over bytes, so that at equal density whoever sends more looks better
        sent = 1000 * density * larger
        rows[name, density, seed] = math.log(sent) + (0.1 if name == "ahead" else 0.0), sent
    table = ranked(rows, ALL)
    assert all(row.trials == 6 for row in table.values())
    assert (table["ahead"].by_bytes, table["ahead"].error) == (1, 0)
    assert table["ahead, small dense"].by_density == 1.5
    # at the lowest density it cannot send so little
    assert table["ahead, small dense"].by_bytes > table["behind"].by_bytes >= 2
    del rows["ahead", DENSITIES[0], 1]
    assert all(row.trials == 5 for row in ranked(rows, ALL).values())  # incomplete trials do not count


def test_ranks_are_of_every_seed() -> None:
    order = list(SCOPES)
    rows: Rows = {}
    for density, seed in itertools.product(DENSITIES, (0, 1)):
        for place, name in enumerate(reversed(order) if seed else order):
            rows[name, density, seed] = 0.5 - place / 10 - seed / 100, 100 * density
    table = ranked(rows, SCOPES)
    assert {row.by_bytes for row in table.values()} == {2.5}
    first, inner = table[order[0]], table[order[1]]
    assert first.error == pytest.approx(stdev([1, 4] * 3) / math.sqrt(6))
    assert first.error > inner.error


def test_more_bytes_than_the_largest_density_needs_change_nothing() -> None:
    rows: Rows = {(name, density, 0): (0.8, 1000 * density) for density in DENSITIES for name in SCOPES}
    for density in DENSITIES:
        rows["pooled, 4 bits", density, 0] = 0.9, 100 * density
    best, *_ = ranked(rows, SCOPES).values()
    # nobody else can send as few bytes as four bits need at the lowest density
    assert (best.name, best.by_bytes, best.trials) == ("pooled, 4 bits", 1, 3)


def test_ranks_know_that_a_small_loss_is_good_and_divergence_bad() -> None:
    rows = {
        (name, density, 0): (None if name == "ahead" else 3.0 - place / 10, 100 * density)
        for density in DENSITIES
        for place, name in enumerate(SCOPES)
    }
    assert list(ranked(rows, SCOPES, LANGUAGE)) == ["pooled, 4 bits", "pooled", "behind", "ahead"]
    best, *_ = ranked({key: row for key, row in rows.items() if key[1] == 0.05}, SCOPES, LANGUAGE).values()
    assert math.isnan(best.error)


@pytest.mark.slow
def test_every_picture_is_drawn_from_a_full_plan(tmp_path: Path) -> None:
    runs = full([0, 1])
    results: dict[str, dict[int, Result]] = {}
    for place, run in enumerate(runs):
        results.setdefault(run.config, {})[run.seed] = result(0.5 + place / 1000)
    files = save_pictures(summarize(runs, results), tmp_path)
    names = ("density", "bytes", "observation_1", "observation_2", "scales")
    assert [file.name for file in files] == [f"{name}.png" for name in names]
    assert all(file.stat().st_size > 10_000 for file in files)
    assert save_pictures([], tmp_path) == []


def test_names_are_listed_and_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    main(["convergence", "--list", "--only", "*powersgd*", "--study", "scopes"])
    names = capsys.readouterr().out.split()
    assert len(names) == len(MAIN) + 2  # other ranks on one task
    assert all("powersgd" in name for name in names)
    with pytest.raises(SystemExit, match="no configuration matches only='nothing'"):
        main(["convergence", "--only", "nothing"])


def test_schemes_are_given_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    given = "dense,pooled[density=0.02,memory=residual[decay=0.9]]"
    main(["convergence", "--tasks", "digits-resnet,bytes-lstm", "--schemes", given, "--seeds", "0,1", "--list"])
    names = [line.partition("/")[2] for line in capsys.readouterr().out.split()]
    assert names == ["dense", "pooled[density=0.02,memory=residual[decay=0.9]]"] * 2


@pytest.mark.slow
def test_the_short_preset_survives_ctrl_c_and_runs_nothing_twice(tmp_path: Path) -> None:
    arguments = ["convergence", "--preset", "short", "--output", str(tmp_path), "--processes", "2"]
    arguments += ["--only", "digits-resnet/*"]
    runs = [run for run in short([0]) if run.task.name == "digits-resnet"]
    again = [sys.executable, "-m", "lab", *arguments]
    process = subprocess.Popen(
        again,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    path = tmp_path / "results.jsonl"
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 1
    before = path.read_text().splitlines()
    assert 1 <= len(before) < len(runs)
    subprocess.run(again, check=True)
    after = path.read_text().splitlines()
    assert after[: len(before)] == before
    settings = [key_of(json.loads(line)["settings"]) for line in after]
    assert sorted(settings) == sorted(key_of(run.settings()) for run in runs)
    for config, by_seed in results_of(read_results(path), runs).items():
        if "ahead" in config or "pooled" in config:
            assert by_seed[0].missing == 0
        if "behind" in config:
            assert by_seed[0].missing > 0
    stamp = path.stat().st_mtime_ns
    subprocess.run(again, check=True)
    assert path.stat().st_mtime_ns == stamp
    assert {"table.md", "summary.json"} <= {file.name for file in tmp_path.iterdir()}

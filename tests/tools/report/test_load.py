"""Reading a run directory: the callbacks' files come back as they were, and errors name file and entry."""

from __future__ import annotations

import json
from math import isnan
from pathlib import Path
from typing import Any

import pytest

from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.tools.report.page import load_run
from tests.tools.report.runs import DECISIONS, NASTY, SLOW, WORKERS, missing, overlap, step, write_run


def test_what_the_profiler_writes_comes_back(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path))
    content = run.overlap
    assert content.to_dict() == overlap()
    assert (content.decisions, content.workers, content.slow_worker) == (DECISIONS, WORKERS, SLOW)
    assert content.plan == Plan.from_stops([2, 4])
    assert content.costs is not None
    assert content.costs.numels == (500,) * 4
    assert content.timeline is not None
    assert content.timeline.to_dict() == step(8).to_dict()
    assert list(content.steps) == [7, 8]
    assert content.buffers[0].tensors == ("head.weight", NASTY)
    assert run.missing is None


def test_what_the_monitor_writes_comes_back(tmp_path: Path) -> None:
    data = load_run(write_run(tmp_path, absent=missing())).missing
    assert data is not None
    assert (data.samples, data.steps) == (4, (10, 20, 30, 40))
    assert data.missing_rate == pytest.approx(2 / 24)
    assert [each.missing for each in data.tensors] == [0.0, 0.0, 0.25]
    assert data.tensors[-1].rates == (0.0, 0.5, 0.0, 0.5)
    assert data.tensors[-1].name == NASTY
    assert data.tensors[0].error == 0.5


def test_numbers_that_do_not_exist_are_nan(tmp_path: Path) -> None:
    content = load_run(write_run(tmp_path, overlap(aside="there is one worker"))).overlap
    assert isnan(content.ranks.mean.exposed_s)
    assert (content.plan, content.costs, content.buffers, content.decisions) == (None, None, (), ())


def test_the_directory_of_the_logger_is_accepted(tmp_path: Path) -> None:
    write_run(tmp_path / "version_0" / "safusion")
    assert load_run(tmp_path / "version_0").folder == tmp_path / "version_0" / "safusion"


def test_a_directory_without_files_names_the_callback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no overlap.json in .*nowhere: OverlapProfiler"):
        load_run(tmp_path / "nowhere")


def paths(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the keys of a content are, the first of each list's."""
    if isinstance(value, dict):
        return [p for key in value for p in [(*above, key), *paths(value[key], (*above, key))]]
    if isinstance(value, list) and value:
        return paths(value[0], (*above, 0))
    return []


# Computed again; of any content; with gaps under plain DDP.
UNREAD = {"mean", "slowest_rank", "skew_s"}
FREE = {"settings", "profiler", "versions", "clocks"}
GAPS = {"steps", "ranks", "mean"}


@pytest.mark.parametrize(("file", "least"), [("overlap.json", 50), ("missing_rate.json", 8)])
def test_every_entry_that_is_left_out_is_named(tmp_path: Path, file: str, least: int) -> None:
    whole = (write_run(tmp_path, absent=missing()) / file).read_text()
    checked = 0
    for *above, key in paths(json.loads(whole)):
        if key in UNREAD or FREE & {*above} or GAPS & {*above}:
            continue
        content = json.loads(whole)
        part = content
        for place in above:
            part = part[place]
        del part[key]
        (tmp_path / file).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=rf"{file} .*{key}"):
            load_run(tmp_path)
        checked += 1
    assert checked >= least


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"version": 99}', "version 99, and this package reads version 1"),
        ('{"version": 1}', "no entry"),
        (json.dumps(overlap() | {"plan": [[0, "allgather"]]}), "cannot be read: a group needs at least one tensor"),
    ],
)
def test_a_file_of_something_else_or_damaged_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    write_run(tmp_path)
    (tmp_path / "overlap.json").write_text(text)
    with pytest.raises(ValueError, match=rf"overlap\.json .*{message}"):
        load_run(tmp_path)

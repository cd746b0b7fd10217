"""The command that runs the stages: what fails, hangs or is stopped leaves the rest as it is, and is reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.__main__ import main
from lab.gpu.archive import archive
from lab.gpu.command import Outcome, gpu, refused_pair
from lab.gpu.device import need_kernels
from lab.gpu.figures import Figure, Lines, equal, note
from lab.gpu.page import page
from lab.gpu.stages import LIMIT, ROOT, SETS, STAGES, Stage, UnfitError, stages_of
from tests.e2e.processes import wait_until

MADE = "tests.lab.gpu.made"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the stages of the tests are there."""
    monkeypatch.setattr("lab.gpu.command.REHEARSAL_FACTOR", 1.0)
    kept = dict(STAGES)
    STAGES.clear()
    for name, seconds in {"good": 60, "failing": 60, "hanging": 30, "outside": 60, "unfit": 60}.items():
        STAGES[name] = Stage(f"{MADE}:{name}", "made", seconds, f"what {name} shows")
    yield
    STAGES.clear()
    STAGES.update(kept)  # in their order, which item by item would not come back


def packed(folder: Path) -> dict[str, bytes]:
    with tarfile.open(folder.with_suffix(".tgz")) as tar:
        files = {entry.name.removeprefix(f"{folder.name}/"): tar.extractfile(entry) for entry in tar.getmembers()}
        return {name: file.read() for name, file in files.items() if file is not None}


def written(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Stages by name, and their states."""
    stages = {stage["name"]: stage for stage in json.loads((folder / "gpu.json").read_text())["stages"]}
    return stages, {name: stage["state"] for name, stage in stages.items()}


def gone(pid: int) -> bool:
    """Whether a process has ended; it may be left to be reaped."""
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"needs a CUDA device.*nothing was measured.*--rehearse"):
        main(["gpu", "--set", "first", "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_unknown_stages_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="unknown stage 'warp'. Choose one of 'environment', "):
        main(["gpu", "--output", str(tmp_path), "--rehearse", "--stages", "warp"])


@pytest.mark.parametrize("group", SETS)
def test_a_set_ends_within_the_time_of_a_call(group: str) -> None:
    assert sum(STAGES[name].seconds for name in stages_of(group)) <= LIMIT


def test_the_half_hour_names_every_set() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    commands = text.partition("### Half an hour on one GPU")[2].partition("```bash")[2].partition("```")[0]
    assert {line.split()[5] for line in commands.splitlines() if "--set" in line} == set(SETS)


def test_an_archive_has_what_matters_first_and_names_the_rest(tmp_path: Path) -> None:
    noise = os.urandom(50_000)
    for name in ("gpu.md", "gpu.json", "a.log", "deep/trace.gz", "triton-cache/kernel"):
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(noise[: 30_000 if name == "a.log" else None])
    assert archive(tmp_path / "run", limit=200_000).stat().st_size <= 200_000
    assert packed(tmp_path / "run") == {
        "gpu.md": noise, "gpu.json": noise, "a.log": noise[:30_000], "left-out.txt": b"deep/trace.gz\n",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("triton", "numpy", "said"), [("3.6.0", "2.4.0", True), ("3.6.0", "2.3.5", False), ("3.9.0", "2.4.6", False)]
)
def test_a_rehearsal_says_which_pair_of_versions_cannot_run(
    triton: str, numpy: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.gpu.command.version", {"triton": triton, "numpy": numpy}.__getitem__)
    assert (refused_pair() is not None) is said


@pytest.mark.slow
def test_a_machine_that_lacks_what_all_stages_need_ends_the_run_with_words(made: None, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="not done: unfit, good"):
        gpu(tmp_path / "out", rehearse=True, stages=("unfit", "good"))
    found, states = written(tmp_path / "out")
    assert found["good"]["why"] == found["unfit"]["why"] == "no kernel starts here"
    assert states == {"unfit": "unfit", "good": "not run"}


def test_where_the_kernels_do_not_start_no_other_operations_are_measured() -> None:
    with pytest.raises(UnfitError, match="fused kernels do not start on cpu, so nothing was measured"):
        need_kernels(torch.device("cpu"))


@pytest.mark.slow
def test_stages_that_fail_or_hang_leave_the_others_as_they_are(
    made: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path /= "out"
    with pytest.raises(RuntimeError, match="not done: failing, hanging; outside: numbers are equal"):
        gpu(tmp_path, rehearse=True, stages=("failing", "hanging", "outside", "good"))
    assert packed(tmp_path)["gpu.md"] == (tmp_path / "gpu.md").read_bytes()
    found, states = written(tmp_path)
    assert states == {"failing": "failed", "hanging": "timed out", "outside": "done", "good": "done"}
    assert [figure["name"] for figure in found["failing"]["figures"]] == ["before"]
    assert "this stage is broken" in found["failing"]["why"]
    assert gone(found["hanging"]["figures"][0]["value"])
    assert found["good"]["figures"][2]["value"] is True
    text = (tmp_path / "gpu.md").read_text()
    assert "nothing here was measured on a device" in text
    assert "this stage is broken" in text
    assert "| numbers are equal | **no** | yes | **no** | rank 1 \\| row 2 |" in text
    assert "| time | 9 ms | ≤ 1 | not judged |" in text


@pytest.mark.slow
def test_ctrl_c_writes_what_there_is(made: None, tmp_path: Path) -> None:
    tmp_path /= "out"
    program = (
        "import sys; from lab.gpu import command; from lab.gpu.stages import STAGES, Stage; "
        f"STAGES |= {{name: Stage('{MADE}:' + name, '', 300, name) for name in ('good', 'hanging')}}; "
        "command.main(sys.argv[1:])"
    )
    arguments = ["--output", str(tmp_path), "--rehearse", "--stages", "good,hanging,numerics"]
    job = subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_until(Lines(tmp_path / "hanging.jsonl").read, 60, lambda: "no figure")
    os.kill(job.pid, signal.SIGINT)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 1
    assert "not done: hanging, numerics" in errors
    found, states = written(tmp_path)
    assert states == {"good": "done", "hanging": "stopped", "numerics": "not run"}
    assert gone(found["hanging"]["figures"][0]["value"])
    assert packed(tmp_path)["gpu.json"] == (tmp_path / "gpu.json").read_bytes()


@pytest.mark.parametrize(
    ("figure", "holds", "budget"),
    [
        (equal("a", True), True, "yes"),
        (equal("a", False), False, "yes"),
        (Figure("a", 2.0, most=2.0), True, "≤ 2"),
        (Figure("a", 2.5, most=2.0), False, "≤ 2"),
        (Figure("a", 0.5, least=0.6), False, "≥ 0.6"),
        (Figure("a", 1, least=0, most=2), True, "≤ 2 and ≥ 0"),
        (Figure("a", 1), None, ""),
        (note("a", "text"), None, ""),
    ],
)
def test_figures_are_inside_their_budgets_or_not(figure: Figure, holds: bool | None, budget: str) -> None:
    assert figure.holds is holds
    assert figure.budget == budget


def test_a_file_that_was_cut_short_gives_its_whole_lines(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "figures")
    assert lines.read() == []
    lines.add(note("first", 1))
    with lines.path.open("a") as file:
        file.write('{"name": "sec')
    assert lines.read() == [note("first", 1)]


def test_the_page_of_a_device_judges_what_was_measured() -> None:
    figures = note("device", "X100"), Figure("time", 9.0, "ms", most=1.0)
    outcome = Outcome("passes", "done", 3.0, figures)
    text = page([outcome], rehearse=False, costs=True)
    assert "Measured on X100." in text
    assert "rehearsal" not in text.lower()
    assert "| time | 9 ms | ≤ 1 | **no** |" in text
    assert "device-costs.json" in text

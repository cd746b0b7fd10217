"""Commands of the documents that end within seconds are run: in a folder that has what the documents assume."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path

import pytest

from lightning_safusion.tools.bench.results import SystemFigures
from lightning_safusion.tools.plan.traces import resolve_trace
from tests.documents.pages import PAGES, ROOT, blocks, commands
from tests.documents.test_commands import PROGRAMS
from tests.tools.plan.test_calibration import COSTS
from tests.tools.report.runs import write_run
from tests.tools.report.test_comparison import plain, sparse

#: Commands that are not run, by the reason; other tests see to it that they exist and take their options.
EXCEPTIONS = {
    "needs root, for links of a given rate": r"sudo ",
    "a cluster's, or another launcher's": r"(srun|torchrun|horovodrun) ",
    "loads from the network": r"(pip install|git clone|curl|hf download|for name in|scripts/install_horovod\.sh)\b",
    "of the shell": r"(export|mkdir|ls) ",
    "builds or tests the whole project, which CI does": r"(make|pytest|(SAFUSION_VERSIONS=1 )?python -m pytest) ",
    "measures or trains for minutes": (
        r"safusion (bench|demo)\b|python -m lab (bench|selection|native|hook|window|numerics|callbacks|missing-rate)\b"
        r"|python -m lab (attack\b|perplexity|papers\b(?!.* [34]$)|break-even|convergence (--output|--tasks|--study))"
        r"|python -m lab (lightning-suite|soak|hsdp-loss)\b|SAFUSION_CUDA_"
    ),
    "needs a GPU, or Triton's compiler for minutes": r"python3? -m lab (gpu|kernels|launches)\b",
    "stands for something of the reader's": (
        r"python train\.py |python -m lab …"
        r"|safusion (…|(trace|timeline) RUN_DIR|report RUN|plan --device FILE|plan --output DIR)"
    ),
    "a name in a sentence": r"safusion (trace|timeline|report)$",
    "trains; run by tests/examples": r"python (examples/|-m examples)",
}
COMMANDS = list(
    dict.fromkeys(shlex.join(takewhile(lambda word: word != ">", words)) for page in PAGES for words in commands(page))
)


def reason(command: str) -> str | None:
    plain = " ".join(shlex.split(command))
    return next((why for why, pattern in EXCEPTIONS.items() if re.match(pattern, plain)), None)


RUN = [command for command in COMMANDS if reason(command) is None]
#: Simulating all systems takes ten seconds: one command does.
ALL_SYSTEMS = "safusion plan"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with copies of the documents, and files that a reader has by then."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("bench/trace.json", "bench/trace-loopback-0.01.json", "safusion_bench/trace-1gbit-0.01.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        resolve_trace("lstm").save(path)
        COSTS.save(path.with_name(path.name.replace("trace", "calibration")))
    write_run(tmp_path / "lightning_logs" / "version_0")
    sparse(tmp_path / "logs" / "safusion" / "version_0")
    plain(tmp_path / "logs" / "ddp" / "version_0")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_a_command_of_the_documents_ends_well(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    if command.startswith("safusion plan") and command != ALL_SYSTEMS and "--systems" not in words:
        words += ["--systems", "hsdp-bf16,saf-hsdp" if "--sharded" in words else "ddp-bf16,saf-pooled"]
    program, args = ("safusion_command", words[1:]) if words[0] == "safusion" else (words[2], words[3:])
    before, code = _files(place), None
    try:
        PROGRAMS[program][1](args)
    except SystemExit as ended:
        code = ended.code
    assert code in (0, None)
    written = set(_files(place).items()) - set(before.items())
    assert written or capsys.readouterr().out
    for name in re.findall(r"--(?:output|document) (\S+)", command):
        assert [path for path, _ in written if path.is_relative_to(place / name)]


def test_the_table_of_the_guide_is_made_of_what_bench_writes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (text for text in blocks(ROOT / "docs/guide/predict.md", "python") if "bench.json" in text)
    figures = SystemFigures(
        "saf-pooled", 0.5, 0.4, 0.6, 1.1, 0.5, 0.02, 0.01, 1e-3, 1e-3, 4e6, None, 0.02, 4.0, 1e9, None
    )
    (place / "safusion_bench" / "bench.json").write_text(json.dumps({"systems": [asdict(figures)]}))
    exec(block, {})  # noqa: S102 - the very text that readers copy
    assert capsys.readouterr().out == "saf-pooled,0.5,4000000.0,0.02\n"


def test_most_commands_of_the_planner_are_run_and_every_exception_is_one() -> None:
    assert sum(command.startswith("safusion plan --") for command in RUN) >= 10
    assert {"safusion systems", "safusion report lightning_logs/version_0"} <= set(RUN)
    assert all(command.startswith(("safusion ", "python -m lab ")) for command in RUN), RUN
    assert set(EXCEPTIONS) == {why for why in map(reason, COMMANDS) if why is not None}

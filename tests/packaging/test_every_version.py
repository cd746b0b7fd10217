"""Training, its resumption and its report with every minor version of torch and of Lightning.

The installed versions are always tried. Every pair is tried where ``SAFUSION_VERSIONS=1`` asks for it: each torch is
installed in an environment of its own (2 to 4 GB), which is removed before the next one. ``-s`` shows the table that
docs/limits.md has::

    SAFUSION_VERSIONS=1 python -m pytest -s -n 0 tests/packaging/test_every_version.py
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning
import pytest
import torch

from tests.packaging.environments import ROOT, needs, run
from tests.packaging.test_versions import ASKED, ROOM

TORCH = tuple(f"2.{minor}" for minor in range(5, 16))
LIGHTNING = ("2.4", "2.5", "2.6")


def train(python: str | Path, folder: Path) -> dict[str, str]:
    folder.mkdir()
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    printed = run(python, ROOT / "tests" / "packaging" / "job.py", folder, cwd=folder, **variables)
    versions: dict[str, str] = json.loads(printed.splitlines()[-1])
    return versions


@pytest.mark.slow
def test_a_job_trains_resumes_and_reports_with_the_installed_versions(tmp_path: Path) -> None:
    versions = train(sys.executable, tmp_path / "run")
    assert (versions["torch"], versions["lightning"]) == (torch.__version__, lightning.__version__)


@pytest.fixture(scope="module")
def rows() -> Iterator[list[list[str]]]:
    """Versions of torch and Lightning that were tried together; printed as a table when all are done."""
    done: list[list[str]] = []
    yield done
    print("\n| torch | Lightning |\n| --- | --- |")
    for torch_version, *others in done:
        print(f"| {torch_version} | {', '.join(others)} |")


@pytest.mark.slow
@pytest.mark.skipif(not ASKED, reason="downloads 30 GB: SAFUSION_VERSIONS=1 asks for it")
@pytest.mark.parametrize("version", TORCH)
def test_a_job_trains_resumes_and_reports_with_every_version(
    version: str, rows: list[list[str]], tmp_path: Path
) -> None:
    needs("uv")
    if shutil.disk_usage(tmp_path).free < ROOM:
        pytest.skip(f"needs {ROOM >> 30} GiB of disk")
    environment = tmp_path / "environment"
    python, row = environment / "bin" / "python", []
    run("uv", "venv", "--quiet", "--python", sys.executable, environment)
    try:
        pip = ("uv", "pip", "install", "--quiet", "--python", python)
        run(*pip, f"torch=={version}.*", "--requirements", ROOT / "pyproject.toml", timeout=1500)
        for other in LIGHTNING:
            run(*pip, f"lightning=={other}.*")
            versions = train(python, tmp_path / other)
            row += [versions["lightning"]] if row else [versions["torch"].partition("+")[0], versions["lightning"]]
    finally:
        shutil.rmtree(environment)
    rows.append(row)


def test_the_documents_table_has_every_version() -> None:
    table = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8").partition("test_every_version")[2]
    found = re.findall(r"^\| (2\.\d+)\.\d+ \| (.*) \|$", table, re.MULTILINE)
    assert tuple(version for version, _ in found) == TORCH
    for _, others in found:
        assert tuple(other.rpartition(".")[0] for other in others.split(", ")) == LIGHTNING

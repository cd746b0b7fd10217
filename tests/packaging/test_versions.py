"""The oldest and the newest versions that are declared, installed in environments of their own.

Each test downloads a torch with all that it needs (some 3 GB) and removes it again, so it runs only where
``SAFUSION_VERSIONS=1`` asks for it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, build, needs, run, unpack

ASKED = os.environ.get("SAFUSION_VERSIONS") == "1"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="wheels are built on Linux"),
    pytest.mark.skipif(not ASKED, reason="downloads 6 GB: SAFUSION_VERSIONS=1 asks for it"),
]
ROOM = 12 << 30  # bytes, for the environment and what it is unpacked from
TOOLS = (
    *("pytest", "pytest-rerunfailures", "pytest-xdist", "hypothesis"),
    *("lion-pytorch", "schedulefree", "scikit-learn", "scipy"),
)
TESTS = (
    "tests/test_strategy.py",
    "tests/test_settings.py",
    "tests/integration/test_momentum.py",
    "tests/kernels/cpu/test_native.py",
    "tests/comm/test_message_properties.py",
)


def interpreter(version: str) -> str:
    """A Python of a version, as it is called; skips the test where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    installed = sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
    for program in (f"python{version}", *map(str, installed)):
        if shutil.which(program) and _works(program, "-c", ""):
            return program
    if not _works("uv", "python", "install", version):
        pytest.skip(f"no Python {version} here, and uv cannot get one")
    return version


def _works(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that does not stay: pytest keeps those of three runs."""
    if shutil.disk_usage(tmp_path).free < ROOM:
        pytest.skip(f"needs {ROOM >> 30} GiB of disk")
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(("version", "resolution"), [("3.10", "lowest-direct"), ("3.13", "highest")])
def test_declared_versions_work(version: str, resolution: str, folder: Path) -> None:
    needs("uv")
    called = interpreter(version)
    build(folder / "dist", platform.machine())
    (wheel,) = (folder / "dist").glob(f"*{platform.machine()}.whl")
    tree = unpack(next((folder / "dist").glob("*.tar.gz")), folder / "sdist")
    python = folder / "environment" / "bin" / "python"
    run("uv", "venv", "--quiet", "--python", called, folder / "environment")
    pip = ["uv", "pip", "install", "--quiet", "--no-cache", "--python", python]
    declared = ["--requirements", tree / "pyproject.toml", "--extra", "plot"]
    run(*pip, "--resolution", resolution, *declared, timeout=1500)
    run(*pip, "--no-deps", wheel)
    run(*pip, *TOOLS)

    assert "saf-pooled" in run(python.parent / "safusion", "systems", cwd=folder)
    assert "loss 0.0" in run(python, tree / "examples" / "quickstart.py", cwd=folder)
    for own in ("lightning_safusion", "safusion_command.py"):  # the tests find what is installed
        path = tree / own
        (shutil.rmtree if path.is_dir() else os.remove)(path)
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider"]
    options += ["-W", "ignore::FutureWarning"]  # old Lightning in torch 2.4 and later: torch.load
    # Builds of torch for CUDA do not fork after a backward pass: a process for each file, without the test that does it
    options += ["-k", "not seeded_deterministic"]
    for tests in TESTS:
        printed = run(python, "-m", "pytest", *options, tests, cwd=tree, timeout=1500)
        assert re.search(r"\d+ passed", printed)
    assert (ROOT / "pyproject.toml").read_text() == (tree / "pyproject.toml").read_text()

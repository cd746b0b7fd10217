"""What is built for a release, and environments of their own to install it in."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path | None = None, timeout: int = 600, **variables: str) -> str:
    """Runs a program, with more variables in its environment, and returns what it printed; fails if it does."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    ended = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert ended.returncode == 0, f"{' '.join(map(str, command))}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def needs(*modules: str) -> None:
    """Skips the test where tools to build with are missing."""
    found = {name for names in importlib.metadata.packages_distributions().values() for name in names}
    missing = [name for name in modules if shutil.which(name) is None and name not in found]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


def build(output: Path, *platforms: str) -> None:
    """Builds an sdist, a wheel with a library for each of these machines, and one without, as a release does."""
    needs("build", "auditwheel")
    script = ROOT / "scripts" / "build_wheels.py"
    run(sys.executable, script, "--output", output, "--platforms", *platforms)


def unpack(sdist: Path, folder: Path) -> Path:
    shutil.unpack_archive(sdist, folder)
    (tree,) = folder.iterdir()
    return tree


def closure(requirements: Sequence[str]) -> set[str]:
    """Names of installed distributions that these need, and what those need, and so on."""
    names: set[str] = set()
    left = [(Requirement(text), "") for text in requirements]
    done: set[tuple[str, str]] = set()
    while left:
        requirement, extra = left.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (requirement.name.lower(), wanted) in done:
                continue
            done.add((requirement.name.lower(), wanted))
            try:
                found = importlib.metadata.distribution(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                continue  # pip will say so
            names.add(requirement.name)
            left += [(Requirement(text), wanted) for text in found.requires or []]
    return names


def clean_environment(folder: Path, requirements: Sequence[str]) -> Path:
    """The Python of a new environment, with links to what this process has of these requirements and all they need."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for name in closure(requirements):
        for file in importlib.metadata.distribution(name).files or []:
            top = Path(file.parts[0])
            link, target = site / top, Path(str(file.locate())).parents[len(file.parts) - 1] / top
            if top.name not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(target)
    return python


def install(python: Path, *arguments: str | Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-index", *arguments)


def extras_of(wheel: Path, extras: Sequence[str]) -> list[str]:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        text = packed.read(name).decode()
    kept = []
    for line in re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE):
        requirement, _, marker = line.partition(";")
        found = re.search(r'extra == "([\w-]+)"', marker)
        if found is None or found[1] in extras:
            kept.append(requirement.strip())
    return kept

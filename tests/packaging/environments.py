"""What is built for a release, and environments of their own to install it in."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path | None = None, timeout: int = 600, **variables: str) -> str:
    """Runs a program and returns what it printed.

    Args:
        command: Program and arguments.
        cwd: Working directory.
        timeout: Seconds.
        variables: Of the environment, beside those of this process.

    Raises:
        AssertionError: If it failed; the message holds what it printed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    ended = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert ended.returncode == 0, f"{' '.join(map(str, command))}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def needs(*modules: str) -> None:
    """Skips the test where tools to build with are missing."""
    missing = [name for name in modules if shutil.which(name) is None and not _is_module(name)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


def _is_module(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def build(output: Path, *platforms: str) -> list[Path]:
    """Builds sdist and wheels as a release does.

    Args:
        output: Folder for them.
        platforms: Machines whose library they hold; a wheel without one is always built.

    Returns:
        All that was built.
    """
    needs("build", "auditwheel")
    script = ROOT / "scripts" / "build_wheels.py"
    run(sys.executable, script, "--output", output, "--platforms", *platforms)
    return sorted(output.iterdir())


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpacks an sdist and returns its tree."""
    with tarfile.open(sdist) as packed:
        packed.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


def closure(requirements: Sequence[str]) -> set[str]:
    """Names of installed distributions that these need, and what those need, and so on."""
    from packaging.requirements import Requirement

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
    """Makes an environment that has these distributions and all that they need, by links to those of this process.

    Args:
        folder: Where it is made.
        requirements: As a package declares them.

    Returns:
        Its Python.
    """
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
    """Installs in an environment what needs no index."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-index", *arguments)


def extras_of(wheel: Path, extras: Sequence[str]) -> list[str]:
    """What a wheel requires, with these extras."""
    import zipfile

    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        text = packed.read(name).decode()
    required = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    kept = []
    for line in required:
        requirement, _, marker = line.partition(";")
        found = re.search(r'extra == "([\w-]+)"', marker)
        if found is None or found[1] in extras:
            kept.append(requirement.strip())
    return kept

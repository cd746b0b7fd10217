"""Work in a Python of its own: with other variables, or with kernels that were compiled with sanitizers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_SANITIZERS = "-fsanitize=address,undefined"
_SHOWN = 600


class ApartError(RuntimeError):
    """The other Python has not come to its end; the message is the last of what it has printed."""


def run_apart(
    work: str, *numbers: int, limit: float, root: Path = ROOT, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Calls a function in a Python of its own.

    Args:
        work: ``"module:function"``; it takes the numbers, and returns plain values.
        limit: Seconds.
        root: Folder with the packages.
        variables: Further environment.

    Raises:
        ApartError: If it fails, or takes longer.
    """
    command = [sys.executable, "-m", "lab.attack.apart", work, *map(str, numbers)]
    own = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **(variables or {})}
    try:
        ended = subprocess.run(
            command, cwd=root, env=os.environ | own, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        raise ApartError(f"not ended after {limit:.0f} s") from None
    if ended.returncode:
        report = next((line for line in ended.stderr.splitlines() if "ERROR: " in line or "runtime error" in line), "")
        raise ApartError(f"ended with {ended.returncode}: {report or ended.stderr[-_SHOWN:]}")
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


@cache
def sanitized() -> tuple[Path, dict[str, str]] | None:
    """A copy of the package whose kernels watch every access (AddressSanitizer) and operation (UBSan).

    Returns:
        Its folder, which is removed when the process ends, and the environment that it needs; None without a compiler
        that has both.
    """
    compiler = os.environ.get("CC", "gcc")
    if shutil.which(compiler) is None:
        return None
    runtime = [_library(compiler, name) for name in ("libasan.so", "libstdc++.so.6")]
    folder = _folder()
    flags = {"CFLAGS": f"{_SANITIZERS} -fno-sanitize-recover=undefined -g", "LDFLAGS": _SANITIZERS}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder), "--build-temp", f"{folder}/o"]
    subprocess.run(build, cwd=ROOT, env=os.environ | flags, capture_output=True, check=False)
    if not all(runtime) or not list(folder.rglob("libkernels.so.*")):
        return None
    unwanted = shutil.ignore_patterns("*.so.*", "__pycache__")
    shutil.copytree(ROOT / "lightning_safusion", folder / "lightning_safusion", ignore=unwanted, dirs_exist_ok=True)
    (folder / "lab").symlink_to(ROOT / "lab")
    # Python itself leaks; the runtime of C++ has to be there before torch asks for it
    return folder, {"ASAN_OPTIONS": "detect_leaks=0", "LD_PRELOAD": " ".join(map(str, runtime))}


def _library(compiler: str, name: str) -> str | None:
    """Its path, as the compiler knows it."""
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False)
    return found.stdout.strip() if os.path.isabs(found.stdout.strip()) else None


_kept: list[Any] = []


def _folder() -> Path:
    _kept.append(tempfile.TemporaryDirectory(prefix="safusion-sanitized-"))
    return Path(_kept[-1].name)


def main() -> None:
    """Does the work that the command line names, and prints what it returns."""
    module, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(import_module(module), name)(*map(int, sys.argv[2:]))))


if __name__ == "__main__":
    main()

"""What a machine has, and the tests that wait for a device."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import torch

from lab.gpu.device import Device
from lab.gpu.figures import Figure, equal, note
from lab.gpu.stages import ROOT, Setting
from lightning_safusion.kernels import cpu

_PACKAGES = ("torch", "triton", "lightning", "numpy", "rich", "torchmetrics", "pytest", "hypothesis")
_TESTS = ("tests/test_gpu.py", "tests/kernels/cuda/test_encode.py", "tests/kernels/cuda/test_decode.py")
_REHEARSED = ("tests/test_gpu.py", "tests/kernels/cuda/test_serves.py")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def environment(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    yield note("versions", ", ".join(f"{package} {_version(package)}" for package in _PACKAGES))
    yield note("Python and CUDA", f"{platform.python_version()}, {torch.version.cuda}")
    yield note("C compiler, which Triton needs", shutil.which("cc") or shutil.which("gcc") or "missing")
    yield note("compiled kernels of the CPU", cpu.usable(), about="without them NumPy makes what is compared")
    if setting.rehearse:
        yield note("device", "a CPU: nothing is measured")
        yield equal("the interpreter runs the kernels", os.environ.get("TRITON_INTERPRET") == "1")
        return
    yield note("device", torch.cuda.get_device_name(0))
    properties = torch.cuda.get_device_properties(0)
    about = f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB"
    yield note("compute capability", f"{properties.major}.{properties.minor}", about=about)
    begin = time.perf_counter()
    Device(rehearse=False)
    yield equal("the fused kernels serve the device", True)
    about = "less if it was compiled before"
    yield note("Triton's start, and what it compiles for a first buffer", time.perf_counter() - begin, "s", about)


def tests(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        about = "the stages numerics, races and processes make the same comparisons"
        yield note("tests", f"not run: {' and '.join(missing)} missing", about=about)
        return
    for file in _REHEARSED if setting.rehearse else _TESTS:  # one by one: if time runs out, some have been seen
        yield from _tested(file, setting.folder / "tests.xml")


def _tested(file: str, report: Path) -> Iterator[Figure]:
    """Runs the tests of a file or folder; the repository's own options of pytest need xdist."""
    report.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--import-mode=importlib", f"--junitxml={report}"]
    subprocess.run([sys.executable, "-m", "pytest", *options, file], cwd=ROOT, check=False)
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))  # noqa: S314 - of our own tests
    bad = [case.get("name", "") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    yield equal(f"no test of {file} fails", not bad, ", ".join(bad))
    yield note(f"tests of {file} passed", len(cases) - len(bad) - skipped, about=f"{skipped} skipped")

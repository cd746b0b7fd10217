"""What a machine has, what compiling the kernels takes there, and the tests that wait for a device."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import torch

from lab.gpu.buffers import DECAY, Case, Rank
from lab.gpu.device import Device
from lab.gpu.figures import Figure, equal, note
from lab.gpu.numerics import cases
from lab.gpu.stages import ROOT, Setting
from lightning_safusion.kernels import cpu
from lightning_safusion.kernels.cuda import buffer, serves_buffers
from lightning_safusion.kernels.cuda.buffer import WindowKernels
from lightning_safusion.kernels.cuda.launch import options_of

_PACKAGES = ("torch", "triton", "lightning", "numpy", "rich", "torchmetrics", "pytest", "hypothesis")
# Registers of a multiprocessor, and how many at a time a warp of 32 threads gets for each of its threads.
_REGISTERS, _ROUNDED = 65_536, 8
_TESTS = ("tests/test_gpu.py", "tests/kernels/cuda/test_encode.py", "tests/kernels/cuda/test_decode.py")
_REHEARSED = ("tests/test_gpu.py", "tests/kernels/cuda/test_wire.py")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


class Compiled:
    """Takes the place of a launch, and keeps what the compiler has made of every variant of a kernel."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def __call__(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        if programs == 0:
            return
        options = options_of(kernel)
        with torch.cuda.device_of(arguments[0]):
            made = kernel[(programs,)](*arguments, **constants, **options)
        named = ", ".join(f"{name}={value}" for name, value in constants.items())
        self.found[f"{kernel.fn.__name__}[{named}]"] = made, 32 * options["num_warps"]


def _run(case: Case, moments: list[int] | None) -> None:
    """A window of one rank."""
    rank = Rank.of(replace(case, world_size=1), 0, 2, moments)
    rank.run()
    rank.kernels.received.copy_(rank.kernels.sent)
    window = WindowKernels(rank.memory.device)
    rank.kernels.decode(DECAY, window.status)
    window.commit([rank.kernels])


def _registers(compiled: Compiled) -> Iterator[Figure]:
    """Spills of all variants, and the fewest blocks of a multiprocessor by registers; nothing in the interpreter."""
    made = {name: (each, threads) for name, (each, threads) in compiled.found.items() if hasattr(each, "n_regs")}
    spilled = {name: each.n_spills for name, (each, _) in made.items() if each.n_spills}
    about = ", ".join(f"{name}: {count}" for name, count in spilled.items())
    yield Figure("variants of kernels that spill registers", len(spilled), most=0, note=about)
    blocks = {
        name: _REGISTERS // (-(-each.n_regs // _ROUNDED) * _ROUNDED * threads) for name, (each, threads) in made.items()
    }
    fewest = min(blocks, key=lambda name: blocks[name]) if blocks else ""
    yield Figure("blocks of a multiprocessor, the fewest", blocks.get(fewest, 0), least=2, note=fewest)
    about = "<br>".join(f"{name}: {each.n_regs}" for name, (each, _) in sorted(made.items()))
    yield note("variants compiled", len(compiled.found), about=about and f"registers: {about}")


def environment(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    place = Device(setting.rehearse)
    yield note("device", torch.cuda.get_device_name(place.device) if place.cuda else "a CPU: nothing is measured")
    if place.cuda:
        properties = torch.cuda.get_device_properties(place.device)
        about = f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB"
        yield note("compute capability", f"{properties.major}.{properties.minor}", about=about)
    yield note("versions", ", ".join(f"{package} {_version(package)}" for package in _PACKAGES))
    yield note("Python and CUDA", f"{platform.python_version()}, {torch.version.cuda}")
    yield note("C compiler, which Triton needs", shutil.which("cc") or shutil.which("gcc") or "missing")
    yield note("compiled kernels of the CPU", cpu.usable(), about="without them NumPy makes what is compared")
    begin = time.perf_counter()
    if place.cuda:
        yield equal("the fused kernels serve the device", serves_buffers(place.device), "else the log has the warning")
    else:
        yield equal("the interpreter runs the kernels", os.environ.get("TRITON_INTERPRET") == "1")
    yield note(
        "compiling what a first window needs", time.perf_counter() - begin, "s", "less if it was compiled before"
    )
    compiled, begin = Compiled(), time.perf_counter()
    with patch.object(buffer, "launch", compiled):
        for case, moments in cases(setting.rehearse).values():
            _run(case, moments)
    place.wait()
    yield note("all variants of the numbers' stage", time.perf_counter() - begin, "s")
    yield from _registers(compiled)


def tests(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        about = "the stages numerics, races, graphs and processes make the same comparisons"
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

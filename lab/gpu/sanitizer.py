"""Whether kernels keep to their memory: a small case under NVIDIA's compute-sanitizer, where that is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from lab.gpu.device import Device
from lab.gpu.figures import Figure, equal, note
from lab.gpu.numerics import CASES, against_the_cpu
from lab.gpu.stages import ROOT, Setting

_PROGRAM = "compute-sanitizer"
_SMALL = "keys in units of the update"
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")


def small(setting: Setting) -> Iterator[Figure]:
    """The case that the program watches."""
    Device(setting.rehearse)
    case, moments = CASES[_SMALL]
    yield equal(_SMALL, not against_the_cpu(case, 3, moments))


def errors_in(text: str) -> int:
    """Errors that the program has counted; -1 if it has not come to its end."""
    found = _ERRORS.findall(text)
    return int(found[-1]) if found else -1


def _program() -> str | None:
    beside = Path("/usr/local/cuda/bin", _PROGRAM)  # where CUDA's toolkit has it
    return shutil.which(_PROGRAM) or (str(beside) if beside.exists() else None)


def sanitizer(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    program = _program()
    if program is None or setting.rehearse:
        yield note("compute-sanitizer", f"not run: {'a rehearsal' if setting.rehearse else 'the program is missing'}")
        return
    file, log = setting.folder / "memcheck.jsonl", setting.folder / "memcheck.log"
    command = [program, "--tool", "memcheck", sys.executable, "-m", "lab.gpu.stage", f"{__name__}:small", str(file)]
    # each tensor has memory of its own, so that what lies behind one is nobody's
    variables = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with log.open("w") as output:
        ended = subprocess.run(command, cwd=ROOT, env=variables, stdout=output, stderr=output, check=False)
    errors = errors_in(log.read_text(errors="replace"))
    yield equal("compute-sanitizer finds no access out of bounds", errors == 0 and not ended.returncode, f"{errors}")

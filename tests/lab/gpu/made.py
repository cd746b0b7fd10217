"""Stages that the tests of the command run: they go well, fail, hang, or cannot run on this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from lab.gpu.figures import Figure, equal, note
from lab.gpu.stages import Setting, UnfitError


def good(setting: Setting) -> Iterator[Figure]:
    yield equal("numbers are equal", True)
    yield Figure("time", 9.0, "ms", most=1.0)
    yield note("rehearsal", setting.rehearse)


def failing(setting: Setting) -> Iterator[Figure]:
    yield note("before", 1)
    raise RuntimeError("this stage is broken")


def hanging(setting: Setting) -> Iterator[Figure]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield note("child", child.pid)
    time.sleep(600)


def outside(setting: Setting) -> Iterator[Figure]:
    yield equal("numbers are equal", False, "rank 1 | row 2")


def unfit(setting: Setting) -> Iterator[Figure]:
    yield note("before", 1)
    raise UnfitError("no kernel starts here")

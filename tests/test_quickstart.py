"""The example that users copy runs as they would run it: under a launcher, and started by Lightning itself."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scripts import run_script

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.py"


def launched(folder: Path) -> str:
    first, second = run_script(QUICKSTART, folder)
    assert "loss" not in second
    return first


def started_by_lightning(folder: Path) -> str:
    ended = subprocess.run(
        [sys.executable, str(QUICKSTART)], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("start", [launched, pytest.param(started_by_lightning, marks=pytest.mark.slow)])
def test_quickstart(start: Callable[[Path], str], tmp_path: Path) -> None:
    printed = start(tmp_path)
    loss = re.search(r"^loss ([\d.]+)$", printed, re.MULTILINE)
    assert loss, printed
    assert float(loss[1]) < 0.1  # the target's variance is about 0.6
    if "plain DDP took over" in printed:  # on the loopback the dense all-reduce may be the cheaper one
        return
    sent = re.search(r"^sent ([\d,]+) bytes per step where DDP sends ([\d,]+)$", printed, re.MULTILINE)
    assert sent, printed
    # a dense buffer carries a few bytes of flags beside the gradients
    assert 0 < int(sent[1].replace(",", "")) < 1.01 * int(sent[2].replace(",", ""))

"""Runs scripts as a launcher would, in processes that have imported everything already."""

from __future__ import annotations

import io
import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

from tests.process_group import run_launched


def run_script(script: Path, folder: Path, world_size: int = 2) -> list[str]:
    """Runs a script in a folder, on each of several workers, as torchrun does.

    Args:
        script: Its ``main`` is what it does when it is run.
        folder: Working directory.
        world_size: Workers.

    Returns:
        What each worker has printed, in rank order.

    Raises:
        RuntimeError: If it failed on a worker; the message holds the tracebacks.
    """

    def run(rank: int) -> str:
        os.chdir(folder)
        sys.argv = [str(script)]
        printed = io.StringIO()
        with redirect_stdout(printed):
            runpy.run_path(str(script), run_name="__main__")
        return printed.getvalue()

    return run_launched(world_size, run, timeout=120)

"""The process of a stage: ``python -m lab.gpu.stage FUNCTION FILE [--rehearse]``; figures are written as they come."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

from lab.gpu.figures import Lines
from lab.gpu.interpreter import quicken
from lab.gpu.stages import UNFIT, Setting, UnfitError


def main(function: str, file: str, *options: str) -> None:
    """Runs a stage.

    Args:
        function: Of the stage, ``MODULE:NAME``.
        file: Takes the figures, a line of JSON each.
        options: ``--rehearse``: on the CPU.
    """
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    module, _, name = function.partition(":")
    lines = Lines(Path(file))
    setting = Setting("--rehearse" in options, Path(file).parent)
    if setting.rehearse:
        quicken()
    try:
        for figure in getattr(importlib.import_module(module), name)(setting):
            lines.add(figure)
            print(figure, flush=True)
    except UnfitError as error:
        print(*str(error).split(), flush=True)  # one line
        sys.exit(UNFIT)


if __name__ == "__main__":
    main(*sys.argv[1:])

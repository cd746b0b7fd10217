"""The training of ``examples/slurm/train.py`` as all tests here run it, and what it ends with."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from tests.e2e.processes import ROOT

SCRIPT = ROOT / "examples" / "slurm" / "train.py"
STEPS = 400  # long enough to be interrupted
LIMIT = 300.0  # seconds for one training, which takes 10 on an idle machine
# Two workers are few enough for dense buffers to be cheaper: "allgather" makes residuals matter.
OPTIONS = [
    *("--accelerator", "cpu", "--collective", "allgather", "--density", "0.05", "--deterministic"),
    *("--steps", str(STEPS), "--save-every", "100"),
]


def command(folder: Path, *more: str) -> list[str | Path]:
    """The command line of one worker, or of the launcher that Lightning is."""
    return [sys.executable, SCRIPT, *OPTIONS, "--folder", folder, *more]


def assert_same(folder: Path, reference: Path) -> None:
    mine, expected = (torch.load(ended / "final.pt", weights_only=True) for ended in (folder, reference))
    assert mine.keys() == expected.keys()
    different = [name for name in mine if not torch.equal(mine[name], expected[name])]
    assert not different, f"different from an uninterrupted run on one machine: {different}"


def assert_sparse(output: str) -> None:
    """The last step's gradients were sent sparse."""
    figures = re.search(r"sent (\d+) bytes per step, DDP sends (\d+)", output)
    assert figures, output[-3000:]
    assert int(figures[1]) < 0.15 * int(figures[2])


def steps_of(output: str, verb: str) -> dict[str, list[int]]:
    """By rank: the steps at which it says that it "saves", or "continues"."""
    steps: dict[str, list[int]] = {}
    for rank, step in re.findall(rf"rank (\d+) {verb} at step (\d+)", output):
        steps.setdefault(rank, []).append(int(step))
    return steps

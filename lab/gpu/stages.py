"""The stages: what each runs, how long it may take, and what it shows. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: Of the checkout.
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Setting:
    """Where a stage runs.

    Args:
        rehearse: On the CPU, with Triton's interpreter and small sizes.
        folder: For files that it writes.
    """

    rehearse: bool
    folder: Path


@dataclass(frozen=True)
class Stage:
    """One of them. It runs in a process of its own.

    Args:
        function: ``MODULE:NAME``; called with a :class:`Setting`, it yields figures.
        seconds: After which it is ended.
        shows: What a reader learns, in a line.
    """

    function: str
    seconds: float
    shows: str


#: In the order in which they run: what others depend on first, what repeats others last.
STAGES: dict[str, Stage] = {
    "environment": Stage(
        "lab.gpu.environment:environment", 100, "versions, whether Triton serves, and what compiling the kernels takes"
    ),
    "waits": Stage("lab.gpu.waits:waits", 40, "every place where the host waits for the device, with its stack"),
    "numerics": Stage("lab.gpu.numerics:numerics", 90, "messages, means and residuals against the CPU, bit for bit"),
    "passes": Stage("lab.gpu.timing:passes", 60, "the time of every kernel against a copy"),
    "windows": Stage("lab.gpu.timing:windows", 60, "whole windows of BERT-base: device, host, launches and memory"),
    "races": Stage("lab.gpu.races:races", 45, "windows whose streams are late at random, and some that are abandoned"),
    "graphs": Stage("lab.gpu.races:graphs", 30, "selection and packing replayed from a CUDA graph"),
    "processes": Stage("lab.gpu.processes:processes", 60, "two workers over gloo: replicas, and the CPU's numbers"),
    "trainer": Stage("lab.gpu.trainer:precisions", 100, "a Trainer with a model of BERT-base's size against DDP"),
    "deterministic": Stage(
        "lab.gpu.trainer:deterministic", 45, "a one-element parameter, and torch's deterministic algorithms"
    ),
    "selection": Stage("lab.gpu.selection:selection", 30, "the compressors that torch's operations serve"),
    "tests": Stage("lab.gpu.environment:tests", 90, "the tests that wait for a device"),
}

#: Seconds for all stages on a device.
LIMIT = 470.0
#: A rehearsal in Triton's interpreter may take so many times as long.
REHEARSAL_FACTOR = 6.0

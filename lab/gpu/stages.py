"""The stages: what each runs, how long it may take, and what it shows. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: Of the checkout.
ROOT = Path(__file__).parents[2]


#: Status of a stage's process that has met :class:`UnfitError`.
UNFIT = 3


class UnfitError(RuntimeError):
    """A stage raises it where no stage can show what it must: the machine lacks something that all of them need."""


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
        function: ``MODULE:NAME``; called with a :class:`Setting`, it yields figures, each with its budget.
        group: The set that it belongs to; "" for one that begins every set.
        seconds: After which it is ended.
        shows: What a reader learns, in a line.
    """

    function: str
    group: str
    seconds: float
    shows: str


#: In the order in which the stages of a set run: what matters most first, what repeats others last.
STAGES: dict[str, Stage] = {
    "environment": Stage("lab.gpu.environment:environment", "", 40, "versions, and whether Triton starts"),
    "steps": Stage("lab.gpu.steps:steps", "first", 150, "steps of the default, DDP, its bf16 hook and PowerSGD"),
    "numerics": Stage(
        "lab.gpu.numerics:numerics", "first", 80, "messages, means and residuals against the CPU, bit for bit; spills"
    ),
    "passes": Stage("lab.gpu.timing:passes", "first", 60, "the time of every kernel against a copy"),
    "windows": Stage("lab.gpu.timing:windows", "first", 60, "windows of BERT-base: device, host, launches and memory"),
    "precisions": Stage("lab.gpu.steps:precisions", "first", 75, "a loss scaler, and parameters in 16 bits"),
    "waits": Stage("lab.gpu.waits:waits", "second", 40, "where the host waits for the device, each with its stack"),
    "races": Stage("lab.gpu.races:races", "second", 45, "windows whose streams are late at random, some abandoned"),
    "processes": Stage("lab.gpu.processes:processes", "second", 60, "two workers over gloo: replicas, CPU's numbers"),
    "rivals": Stage("lab.gpu.rivals:rivals", "second", 40, "torch's hooks and selection beside a window"),
    "trace": Stage("lab.gpu.trace:trace", "second", 30, "three steps as torch's profiler sees them"),
    "deterministic": Stage(
        "lab.gpu.deterministic:deterministic",
        "second",
        30,
        "a one-element parameter, and torch's deterministic algorithms",
    ),
    "selection": Stage("lab.gpu.selection:selection", "second", 30, "the compressors that torch's operations serve"),
    "tests": Stage("lab.gpu.environment:tests", "second", 70, "the tests that wait for a device"),
    "sanitizer": Stage("lab.gpu.sanitizer:sanitizer", "second", 60, "accesses of a small case, by compute-sanitizer"),
    "links": Stage("lab.gpu.links:links", "links", 345, "the papers' networks and systems behind emulated links"),
    "shaped": Stage("lab.gpu.shaped:shaped", "links", 80, "two processes that share the device, over shaped links"),
    "accuracy": Stage("lab.gpu.accuracy:accuracy", "accuracy", 440, "what 25 and 110 M parameters learn"),
}

#: Sets of stages, each of them a call: ``python3 -m lab gpu --set NAME``.
SETS = tuple(dict.fromkeys(stage.group for stage in STAGES.values() if stage.group))
#: Seconds of a call on a device.
LIMIT = 480.0
#: A rehearsal in Triton's interpreter may take so many times as long.
REHEARSAL_FACTOR = 6.0


def stages_of(group: str) -> tuple[str, ...]:
    """Names of the stages of a set."""
    return tuple(name for name, stage in STAGES.items() if stage.group in ("", group))

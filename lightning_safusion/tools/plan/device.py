"""What an accelerator does in a second, from its maker's specification or measured, and the file of such costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path

from lightning_safusion.fusion.plans.costs import SelectionCost
from lightning_safusion.lookup import check_name
from lightning_safusion.tools.plan.work import STAGES, Work

_FORMAT = "lightning-safusion-device"
_VERSION = 1
_NOT_IN_FILES = ("selection", "decode", "published", "cpu")


@dataclass(frozen=True)
class Device:
    """The speeds by which counted work becomes seconds. A file has the fields below up to ``source``; those that have a
    default may be missing.

    Raises:
        ValueError: If a speed is not positive and finite, a time or factor is negative, or a stage is unknown.
    """

    name: str  # as its driver calls it
    memory: float  # bytes per second, read and written, as a long copy reaches them
    launch: float  # seconds between the beginnings of two short kernels that follow each other on a stream
    instructions: float  # per second of the whole device, each counted once for every thread: 32 for a warp
    pcie: float = 12e9  # bytes per second between device and host
    # by the names of STAGES: measured seconds of a stage, its launches taken off, over those that its bytes and
    # instructions say; 1 where there is none
    factors: Mapping[str, float] = field(default_factory=dict)
    source: str = ""  # where the numbers are from, in words
    # in place of what the counted work says: one selection with packing, and seconds per entry that is added up
    selection: SelectionCost | None = None
    decode: float | None = None
    # these two are published times: decoding is part of an exchange. Else they were measured on processors, which
    # decode when the backward pass has ended
    published: bool = False
    cpu: SelectionCost = SelectionCost(100e-6, 1.0e-9)  # of one selection on the host

    def __post_init__(self) -> None:
        for what in ("memory", "instructions", "pcie"):
            if not getattr(self, what) > 0:
                raise ValueError(f"device {self.name!r}: {what} must be positive, got {getattr(self, what)}")
        if not (isfinite(self.launch) and self.launch >= 0):
            raise ValueError(f"device {self.name!r}: launch must be finite and not negative, got {self.launch}")
        for stage, factor in self.factors.items():
            if stage not in STAGES or not (isfinite(factor) and factor > 0):
                raise ValueError(
                    f"device {self.name!r}: factors are positive numbers of {', '.join(STAGES)}, got {stage}={factor}"
                )

    def seconds(self, work: Mapping[str, Work]) -> float:
        """Seconds of stages that follow each other: each takes as long as its bytes or its instructions, whichever is
        longer, and its launches."""
        total = 0.0
        for stage, part in work.items():
            busy = max(part.nbytes / self.memory, part.instructions / self.instructions)
            total += part.launches * self.launch + busy * self.factors.get(stage, 1.0)
        return total

    @property
    def processors(self) -> bool:
        """Whether the work is done on processors, and measured there."""
        return self.decode is not None and not self.published

    @property
    def described(self) -> str:
        """The speeds in words."""
        speeds = f"{self.memory / 1e12:.2f} TB/s, {self.launch * 1e6:.1f} us per launch, "
        speeds += f"{self.instructions / 1e12:.1f}e12 instructions per second"
        return f"{self.name} ({self.source or 'source not stated'}: {speeds})"

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        content = {name: each for name, each in asdict(self).items() if name not in _NOT_IN_FILES}
        Path(path).write_text(json.dumps({"format": _FORMAT, "version": _VERSION, **content}, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Device:
        """Reads a file of :meth:`save`; a ValueError names a file that does not have the costs of a device."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            head = f"{content.pop('format')} version {content.pop('version')}"
            if head != f"{_FORMAT} version {_VERSION}":
                raise ValueError(f"{path} is {head}, expected {_FORMAT} version {_VERSION}")
            return cls(**content)
        except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} has no costs of a device: {error!r}; python -m lab gpu writes one") from error


# A100: memory from its datasheet. Instructions: the kernels compute with integers, of which a multiprocessor does 64 in
# a clock (CUDA C++ Programming Guide, throughput of arithmetic instructions, compute capability 8.0), half of the 128
# that it can issue: 108 multiprocessors at 1.41 GHz (NVIDIA A100 datasheet: 19.5 TFLOPS = 108 x 64 x 2 x clock). No
# specification has the time of a launch: 4 us is an assumption. Its kernels are taken to miss these speeds by as
# much as an H100's do.
# H100: lab/gpu/results/h100-2026-11-27/device-costs.json, of the kernels before their latest sizes of blocks.
_FACTORS = {
    "compensate": 1.45, "collect": 1.09, "narrow": 1.10, "count_chunks": 1.23, "write": 4.80, "pack": 0.86,
    "decode": 1.07, "commit": 1.46,
}  # fmt: skip
#: By the names that ``safusion plan --device`` takes.
DEVICES: dict[str, Device] = {
    "a100": Device(
        "A100 80GB SXM", 2.039e12, 4e-6, 108 * 64 * 1.41e9, factors=_FACTORS, source="its maker's specification"
    ),
    "h100": Device("H100 80GB HBM3", 2.974e12, 1.78e-6, 16.85e12, 54.5e9, _FACTORS, source="measured, torch 2.11"),
}


def resolve_device(device: str | Path) -> Device:
    """A device by name, or from the JSON file that ``python -m lab gpu`` writes.

    Raises:
        ValueError: If there is neither such a name nor such a file, or the file has no costs of a device.
    """
    known = DEVICES.get(str(device).lower())
    if known is None and not Path(device).is_file():
        check_name("device", str(device), DEVICES, "give the path of a JSON file")
    return known or Device.load(device)

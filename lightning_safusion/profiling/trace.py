"""Traces: the tensors of a job in the order in which their gradients get ready, and the time of each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import isfinite, prod
from pathlib import Path

_FORMAT = "lightning-safusion-trace"
_VERSION = 1


@dataclass(frozen=True)
class TraceTensor:
    """One parameter."""

    name: str  # its name in the model
    shape: tuple[int, ...]
    backward: float  # seconds of backward between the gradient before it and its own
    # seconds of forward that need this parameter, and those of layers without parameters before the next
    forward: float = 0.0

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Trace:
    """One training iteration of one worker, without any exchange.

    Raises:
        ValueError: If there is no tensor, or a time is negative or not finite.
    """

    name: str  # of the job
    # in the order in which their gradients get ready; the forward pass goes the other way
    tensors: tuple[TraceTensor, ...]
    optimizer: float = 0.0  # seconds of the optimizer's step
    source: str = ""  # where the times come from, in words

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError(f"trace {self.name!r} has no tensors")
        times = [("optimizer", self.optimizer)]
        times += [(f"backward of {tensor.name!r}", tensor.backward) for tensor in self.tensors]
        times += [(f"forward of {tensor.name!r}", tensor.forward) for tensor in self.tensors]
        for what, seconds in times:
            if not (isfinite(seconds) and seconds >= 0):
                raise ValueError(f"trace {self.name!r}: the time of {what} must be finite and not negative: {seconds}")

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each tensor [L]."""
        return tuple(tensor.numel for tensor in self.tensors)

    @property
    def seconds(self) -> float:
        """The iteration without any exchange."""
        forward = sum(tensor.forward for tensor in self.tensors)
        return forward + sum(tensor.backward for tensor in self.tensors) + self.optimizer

    def save(self, path: str | Path) -> None:
        """Writes the trace as JSON."""
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        Path(path).write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Reads a file of :meth:`save`; a ValueError names a file that is no trace of this format and version."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if "traceEvents" in content:
                raise ValueError(
                    f"{path} is a timeline of steps for Perfetto (safusion timeline), no trace of a job: "
                    "safusion bench and TraceRecorder write those"
                )
            head = (content.pop("format"), content.pop("version"))
            if head != (_FORMAT, _VERSION):
                raise ValueError(f"{path} has format and version {head}, expected {(_FORMAT, _VERSION)}")
            rows = content.pop("tensors")
            return cls(tensors=tuple(TraceTensor(**row | {"shape": tuple(row["shape"])}) for row in rows), **content)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a trace: {error!r}; write one with Trace.save") from error

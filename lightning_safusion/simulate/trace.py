"""Traces: the tensors of a job in the order in which their gradients get ready, and the time of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, prod
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from lightning_safusion.simulate.architectures import Layer, bert, gpt2, lstm, resnet, vgg19, vit

_FORMAT = "lightning-safusion-trace"
_VERSION = 1


@dataclass(frozen=True)
class TraceTensor:
    """One parameter.

    Args:
        name: Its name in the model.
        shape: Its shape.
        backward: Seconds of backward between the gradient before it and its own.
        forward: Seconds of forward that need this parameter, and those of layers without parameters before the next.
    """

    name: str
    shape: tuple[int, ...]
    backward: float
    forward: float = 0.0

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Trace:
    """One training iteration of one worker, without any exchange.

    Args:
        name: Of the job.
        tensors: In the order in which their gradients get ready; the forward pass goes the other way.
        optimizer: Seconds of the optimizer's step.
        source: Where the times come from, in words.

    Raises:
        ValueError: If there is no tensor, or a time is negative or not finite.
    """

    name: str
    tensors: tuple[TraceTensor, ...]
    optimizer: float = 0.0
    source: str = ""

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
    def forward_seconds(self) -> float:
        """Forward pass (T_f)."""
        return sum(tensor.forward for tensor in self.tensors)

    @property
    def backward_seconds(self) -> float:
        """Backward pass (T_b)."""
        return sum(tensor.backward for tensor in self.tensors)

    @property
    def seconds(self) -> float:
        """The iteration without any exchange."""
        return self.forward_seconds + self.backward_seconds + self.optimizer

    def save(self, path: str | Path) -> None:
        """Writes the trace as JSON."""
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        Path(path).write_text(json.dumps(content, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Reads what :meth:`save` wrote.

        Raises:
            ValueError: If the file is not a trace of this format and version.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            head = (content["format"], content["version"])
            if head != (_FORMAT, _VERSION):
                raise ValueError(f"{path} has format and version {head}, expected {(_FORMAT, _VERSION)}")
            tensors = tuple(
                TraceTensor(
                    str(row["name"]),
                    tuple(int(size) for size in row["shape"]),
                    float(row["backward"]),
                    float(row["forward"]),
                )
                for row in content["tensors"]
            )
            return cls(str(content["name"]), tensors, float(content["optimizer"]), str(content["source"]))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a trace: {error!r}; write one with Trace.save") from error


def model_trace(
    name: str, layers: Sequence[Layer], forward: float, backward: float, optimizer: float = 0.0, source: str = ""
) -> Trace:
    """A trace with times in proportion to the work of each layer.

    Gradients get ready in the reverse order of registration. What a layer computes is charged to its weight; the
    gradient of a bias is there as soon as that of its output is. Layers without parameters delay the gradients after
    them.

    Args:
        name: Of the job.
        layers: In forward order.
        forward: Seconds of the whole forward pass.
        backward: Seconds of the whole backward pass.
        optimizer: Seconds of the optimizer's step.
        source: Where the times come from, in words.
    """
    work = sum(layer.work for layer in layers)
    tensors: list[TraceTensor] = []
    waiting = 0.0  # work of layers without parameters, in backward before the next gradient
    for layer in reversed(layers):
        waiting += layer.work
        if not layer.parameters:
            continue
        weight = max(range(len(layer.parameters)), key=lambda index: prod(layer.parameters[index][1]))
        for index in reversed(range(len(layer.parameters))):
            suffix, shape = layer.parameters[index]
            share = waiting / work if index == weight else 0.0
            full = f"{layer.name}.{suffix}" if suffix else layer.name
            tensors.append(TraceTensor(full, shape, share * backward, share * forward))
        waiting = 0.0
    return Trace(name, tuple(tensors), optimizer, source)


class _Model(NamedTuple):
    layers: Callable[[], list[Layer]]
    batch: int
    sample: str
    rate: float  # operations per second
    forward: float | None = None  # seconds, in place of those at that rate


# Rates that these networks reach on an A100 with mixed precision. BERT-large at 50 + 100 ms and ResNet-50 at 20 + 40 ms
# are the times of the published comparison that tests/simulate/test_published.py repeats.
_TRANSFORMER, _RESNET, _VGG, _LSTM = 110e12, 26e12, 60e12, 20e12
_IMAGE = "images of 224 x 224"
_MODELS: Mapping[str, _Model] = MappingProxyType(
    {
        "resnet-50": _Model(lambda: resnet((3, 4, 6, 3)), 64, _IMAGE, _RESNET, 20e-3),
        "resnet-152": _Model(lambda: resnet((3, 8, 36, 3)), 32, _IMAGE, _RESNET),
        "vgg-19": _Model(vgg19, 32, _IMAGE, _VGG),
        "vit-large": _Model(lambda: vit(1024, 24), 32, _IMAGE, _TRANSFORMER),
        "bert-base": _Model(lambda: bert(768, 12, 384), 24, "sequences of 384 tokens", _TRANSFORMER),
        "bert-large": _Model(lambda: bert(1024, 24, 384), 24, "sequences of 384 tokens", _TRANSFORMER, 50e-3),
        "gpt2-large": _Model(lambda: gpt2(1280, 36, 1024), 4, "sequences of 1024 tokens", _TRANSFORMER),
        "lstm": _Model(lambda: lstm(33278, 500, 2, 35), 128, "sequences of 35 words of WikiText-2", _LSTM),
    }
)

#: Names of the traces that come with the package.
TRACE_NAMES = tuple(_MODELS)


def resolve_trace(trace: str | Path | Trace) -> Trace:
    """A trace itself, one of those that come with the package by name, or a JSON file.

    Raises:
        ValueError: If there is neither such a name nor such a file, or the file is not a trace.
    """
    if isinstance(trace, Trace):
        return trace
    if str(trace) not in _MODELS:
        if not Path(trace).is_file():
            raise ValueError(f"unknown trace {str(trace)!r}: give the path of a JSON file, or one of {TRACE_NAMES}")
        return Trace.load(trace)
    model = _MODELS[str(trace)]
    layers = model.layers()
    forward = model.forward
    how = "a forward pass as published comparisons take it"
    if forward is None:
        forward = model.batch * sum(layer.work for layer in layers) / model.rate
        how = f"a forward pass at {model.rate / 1e12:.0f} TFLOP/s"
    source = f"modelled, not measured: {how}, backward twice that, batches of {model.batch} {model.sample}"
    return model_trace(str(trace), layers, forward, 2 * forward, source=source)

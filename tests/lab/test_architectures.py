"""The networks of the shipped traces, and the traces made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.architectures import MODELS, Layer, model_trace, modelled, resnet, traces, vgg19
from lightning_safusion.profiling.trace import Trace
from lightning_safusion.tools.plan.traces import TRACE_NAMES, resolve_trace


def test_the_shipped_traces_are_those_of_the_networks(tmp_path: Path) -> None:
    assert set(TRACE_NAMES) == set(MODELS)
    traces(tmp_path)
    for name in MODELS:
        assert Trace.load(tmp_path / f"{name}.json") == resolve_trace(name) == modelled(name)


def test_work_of_known_models() -> None:
    # torchvision states multiply-accumulates of one image: 4.09 and 11.51 billion, and 19.63 for VGG-19
    for layers, billions in ((resnet((3, 4, 6, 3)), 4.09), (resnet((3, 8, 36, 3)), 11.51), (vgg19(), 19.63)):
        work = sum(layer.work for layer in layers if any(len(shape) > 1 for _, shape in layer.parameters))
        assert work / 2e9 == pytest.approx(billions, rel=0.01)


def test_gradients_come_in_reverse_and_wait_for_layers_without_parameters() -> None:
    layers = [
        Layer("first", (("weight", (4, 4)), ("bias", (4,))), 1.0),
        Layer("attention", (), 2.0),
        Layer("last", (("weight", (2, 4)),), 1.0),
    ]
    trace = model_trace("small", layers, 4.0, 8.0)
    assert [tensor.name for tensor in trace.tensors] == ["last.weight", "first.bias", "first.weight"]
    assert [tensor.backward for tensor in trace.tensors] == [2.0, 0.0, 6.0]
    assert trace.seconds == 12.0

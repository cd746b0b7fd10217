"""The jobs of a benchmark: sizes, gradients of all parameters, and paced workers that take the time of their trace."""

from __future__ import annotations

import math
import time

import pytest
import torch

from lab.bench.measure import Task
from lab.bench.workload import MODELS, Classifier, Paced, scaled
from lightning_safusion.profiling.trace import Trace, TraceTensor
from lightning_safusion.tools.plan.traces import resolve_trace


@pytest.mark.parametrize(("kind", "millions"), [("conv", 4.6), ("transformer", 22.5), ("lstm", 6.25)])
def test_models_have_the_sizes_that_are_said(kind: str, millions: float) -> None:
    with torch.device("meta"):
        module = Classifier(kind, "base", 1)
    assert sum(param.numel() for param in module.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize("kind", MODELS)
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    module = Classifier(kind, "tiny", 2)
    module.training_step(module.batch(), 0).backward()
    assert all(param.grad is not None and param.grad.any() for param in module.parameters())


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown model 'mlp'. Choose one of 'conv', 'transformer', 'lstm'"):
        Classifier("mlp", "tiny", 2)
    with pytest.raises(ValueError, match="unknown size 'huge'. Choose one of 'tiny', 'small', 'base'"):
        Classifier("conv", "huge", 2)
    with pytest.raises(ValueError, match="batch_size=0"):
        Classifier("conv", "tiny", 0)
    with pytest.raises(ValueError, match="unknown optimizer 'adam'. Did you mean 'adamw'"):
        Classifier("conv", "tiny", 2, "adam")


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_a_benchmark_trains_with_the_optimizer_that_is_named(name: str, kind: type[torch.optim.Optimizer]) -> None:
    assert type(Task("conv", "tiny", 2, optimizer=name).module().configure_optimizers()) is kind


def test_a_scaled_trace_has_the_share_of_the_elements_and_all_of_the_time() -> None:
    trace = resolve_trace("bert-base")
    small = scaled(trace, 0.01)
    assert sum(small.numels) == pytest.approx(0.01 * sum(trace.numels), rel=0.02)
    assert small.seconds == trace.seconds
    assert [len(tensor.shape) for tensor in small.tensors] == [len(tensor.shape) for tensor in trace.tensors]
    assert "sizes x 0.01" in small.source
    assert scaled(trace, 1.0) is trace
    with pytest.raises(ValueError, match="factor in"):
        scaled(trace, 1.5)


def test_in_slow_motion_a_trace_has_the_same_elements_and_longer_times() -> None:
    trace = resolve_trace("bert-base")
    slow = scaled(trace, 1.0, 8.0)
    assert slow.seconds == pytest.approx(8 * trace.seconds)
    assert slow.numels == trace.numels
    assert "times x 8" in slow.source
    for factor in (0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="slow motion"):
            scaled(trace, 1.0, factor)


def test_a_paced_worker_sleeps_through_its_trace_and_has_its_gradients_in_its_order() -> None:
    tensors = tuple(TraceTensor(f"t{i}", (3, i + 1), 0.01 * (i + 1), 0.005) for i in range(4))
    module = Paced(Trace("paced", tensors))
    assert [tuple(param.shape) for param in module.parameters()] == [tensor.shape for tensor in reversed(tensors)]
    ready: dict[int, float] = {}  # by the size of a parameter
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(lambda param: ready.update({param.numel(): time.perf_counter()}))
    begin = time.perf_counter()
    loss = module.training_step(module.batch(), 0)
    forward = time.perf_counter() - begin
    loss.backward()
    assert list(ready) == [3, 6, 9, 12]
    # sleeps are never shorter than asked for, in sum
    assert forward >= 0.0199
    assert ready[12] - begin >= 0.1199
    assert all(param.grad is not None and param.grad.any() for param in module.parameters())


def test_what_a_sleep_takes_too_long_the_next_ones_are_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds + 0.003

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    sleeper = Paced(Trace("paced", (TraceTensor("t", (1,), 0.01, 0.01),)))
    for _ in range(3):
        sleeper.sleep(0.01)
    sleeper.sleep(0.001)
    sleeper.sleep(0.01)
    assert slept == pytest.approx([0.01, 0.007, 0.007, 0.008])
    assert now[0] == pytest.approx(0.041 + 0.003)

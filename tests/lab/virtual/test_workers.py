"""Virtual workers: the engine's averages are those of plain training, and replicas are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from threading import Thread, current_thread
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.convergence.scheme import Scheme
from lab.convergence.training import train
from lab.tasks import TASKS, Digits, Text
from lab.virtual.workers import Dense, Engines
from lightning_safusion.fusion import fused
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.integration.momentum import Pace
from lightning_safusion.sparsify.schedule import BY_GRADIENT, BY_UPDATE
from tests.cluster import specs
from tests.models import equal

SPECS = specs()
ORDER = list(reversed(range(len(SPECS))))


@pytest.fixture
def make() -> Iterator[Callable[..., Engines]]:
    made: list[Engines] = []

    def engines(scheme: Scheme, steps: int = 10) -> Engines:
        made.append(Engines(lambda: scheme.settings(steps), SPECS, ORDER, scheme.workers))
        return made[-1]

    yield engines
    for each in made:
        each.close()


def gradients(workers: int, seed: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(spec.numel, generator=generator) for spec in SPECS] for _ in range(workers)]


@pytest.mark.parametrize(
    ("workers", "options"),
    [(2, {"density": 1.0}), (4, {"density": 1.0, "memory": "none"}), (3, {"dense_start": 1.0})],
)
def test_engines_that_send_everything_average_plainly(
    make: Callable[..., Engines], workers: int, options: dict[str, Any]
) -> None:
    engines, dense = make(Scheme("ahead", workers=workers, **options)), Dense(SPECS)
    for step in range(4):
        means, expected = engines.average(gradients(workers, step)), dense.average(gradients(workers, step))
        torch.testing.assert_close(means, expected, rtol=1e-6, atol=1e-7)


def test_one_thread_does_what_one_per_worker_does(
    make: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, threaded = make(Scheme("pooled", workers=3)), make(Scheme("pooled", workers=3))
    monkeypatch.setattr(threaded, "agrees", lambda: True)
    alone = 0
    for step in range(6):
        alone += not usual.agrees()
        assert equal(usual.average(gradients(3, step)), threaded.average(gradients(3, step)))
    assert alone >= 3  # only plans are agreed on


@pytest.mark.slow
def test_fused_kernels_average_as_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from lightning_safusion.kernels.cuda import launch

    start, launchers = launch.launch, set[Thread]()

    def seen(*arguments: Any, **constants: Any) -> None:
        launchers.add(current_thread())
        start(*arguments, **constants)

    monkeypatch.setattr(launch, "launch", seen)
    monkeypatch.setattr(Engine, "_reviews_at_end", False)  # as on a device: workers agree as a window begins
    monkeypatch.setattr(fused, "serves_buffers", lambda device: True)
    scheme, device = Scheme("auto", density=0.1, memory="auto", wire="q4", workers=3), torch.device("cpu")
    some = specs(((40, 30), (40,), (64, 9)))
    order, generator = [2, 1, 0], torch.Generator().manual_seed(0)
    late = Engines(lambda: scheme.settings(9), some, order, 3, device, deferred=True)
    usual = Engines(lambda: scheme.settings(9), some, order, 3)
    params = [torch.nn.Parameter(torch.zeros(spec.shape)) for spec in some]
    for engine in usual.by_worker:
        engine.fused.serves = False
    for engines in (late, usual):
        engines.carry_momentum([torch.optim.AdamW(params)], params)
    for _ in range(4):
        drawn = [[torch.randn(spec.numel, generator=generator) for spec in some] for _ in range(3)]
        assert equal(late.average([[grad.clone() for grad in mine] for mine in drawn]), usual.average(drawn))
    assert all(engine.ending.defers for engine in late.by_worker)
    assert launchers == {current_thread()}
    late.close()
    usual.close()


def test_exchanges_in_phases_wait_for_each_other(make: Callable[..., Engines]) -> None:
    engines = make(Scheme("auto", density=0.1, memory="auto", wire="q4", workers=3, collective="sharded"))
    for step in range(5):
        engines.average(gradients(3, step))  # compares the replicas
    assert 0 < engines.bytes_sent < sum(4 * spec.numel for spec in SPECS)


def test_a_density_that_changes_in_every_step_is_agreed_on(make: Callable[..., Engines]) -> None:
    engines = make(Scheme("ahead", ramp=1.0, dense_start=0.3), steps=8)
    for step in range(8):
        engines.average(gradients(2, step))
    densities = [engine.space.quotas.density for engine in engines.by_worker]
    assert densities[0] == densities[1] == pytest.approx(0.25 * (0.01 / 0.25) ** (7 / 8))


def test_replicas_that_differ_are_reported(make: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch) -> None:
    engines = make(Scheme("ahead"))
    mine = gradients(2, 0)
    drain = engines.by_worker[1].drain

    def spoiling() -> None:
        drain()
        mine[1][3][0] += 1

    monkeypatch.setattr(engines.by_worker[1], "drain", spoiling)
    with pytest.raises(RuntimeError, match="worker 1 has another mean of t3 than worker 0"):
        engines.average(mine)


def test_bytes_are_those_of_the_messages(make: Callable[..., Engines]) -> None:
    engines = make(Scheme("ahead", density=0.02, memory="none", wire="fp32"))
    for step in range(3):
        engines.average(gradients(2, step))
    entries = sum(max(1, int(0.02 * spec.numel)) for spec in SPECS if spec.numel)
    position = math.log2(1 / 0.02) + 2  # bits, at most
    assert 4 * entries < engines.bytes_sent < (4 + position / 8) * entries + 500  # and headers


@pytest.mark.parametrize("data", [Digits(3, 16), Text(3, 16)], ids=["digits", "text"])
def test_batches_are_the_same_for_any_number_of_workers(data: Any) -> None:
    inputs, classes = data.samples(5)
    for workers in (2, 4):
        shards = data.shards(5, workers)
        assert torch.equal(torch.cat([x for x, _ in shards]), inputs)
        assert torch.equal(torch.cat([y for _, y in shards]), classes)
    assert not torch.equal(data.samples(6)[0], inputs)
    with pytest.raises(ValueError, match="16 samples per step cannot be shared by 3"):
        data.shards(0, 3)


def test_text_is_predicted_one_byte_ahead_and_held_out_by_file() -> None:
    text = Text(0, 4)
    inputs, classes = text.samples(0)
    assert torch.equal(inputs[:, 1:], classes[:, :-1])
    training, held_out = bytes(text._training.tolist()), bytes(text._held_out[0][100].tolist())
    assert training.count(held_out) <= 1  # licences and idioms come twice, whole files do not


@pytest.mark.parametrize("method", ["pooled", "behind"])
def test_only_fusion_before_selection_misses_tensors(method: Any) -> None:
    result = train(replace(TASKS["digits-resnet"], steps=8, batch=16), Scheme(method, dense_below=0), seed=0)
    assert (result.missing > 0.1) if method == "behind" else (result.missing == 0)
    assert result.density == pytest.approx(0.01, rel=0.05)
    assert 0 < result.error < 1
    assert 74 < result.dense_bytes / result.bytes_median < 80


def test_training_at_density_one_is_dense_training() -> None:
    task = replace(TASKS["digits-resnet"], steps=6, batch=16)
    plain, sent = train(task, Scheme("dense"), 1), train(task, Scheme("behind", density=1.0), 1)
    assert sent.curve == pytest.approx(plain.curve, rel=1e-3)
    assert plain.curve != train(task, Scheme("dense"), 2).curve


def test_parts_of_a_batch_are_weighted_by_samples() -> None:
    task = replace(TASKS["digits-vit"], steps=4)
    alone, parts = (train(task, scheme, 0) for scheme in (Scheme("dense", workers=1), Scheme("dense", parts="1|3")))
    assert parts.curve == pytest.approx(alone.curve, abs=2e-5)


def test_training_that_diverges_has_no_metric() -> None:
    result = train(replace(TASKS["bytes-lstm"], steps=10, clip=None, lr=1e38), Scheme("dense"), 0)
    assert result.metric is None


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.SGD])
def test_engines_suit_the_optimizer(make: Callable[..., Engines], optimizer: Any) -> None:
    engines = make(Scheme("auto", density=0.05, memory="auto", wire="q4"))
    params = [torch.nn.Parameter(torch.zeros(spec.shape)) for spec in SPECS]
    engines.carry_momentum([optimizer(params, lr=0.1)], params)
    divides = optimizer is not torch.optim.SGD
    for engine in engines.by_worker:
        assert (engine.space.selector.units is not None) == divides
        assert (engine.space.memory.decay < 1) == divides
        assert engine.first_windows.opening is (BY_UPDATE if divides else BY_GRADIENT)
    engines.average(gradients(2, 0))
    if divides:
        assert Pace.of(engines.by_worker[0]).kept == 0.95  # the optimizer needs its momentum at first


def test_the_optimizers_momentum_falls_after_the_first_windows(make: Callable[..., Engines]) -> None:
    """With all that stands between the engine's clock and the optimizer's step."""
    engines = make(Scheme("auto", density=0.02, memory="auto", wire="q4"))
    params = [torch.nn.Parameter(torch.zeros(spec.shape)) for spec in SPECS]
    optimizer = torch.optim.AdamW(params, betas=(0.9, 0.999))
    engines.carry_momentum([optimizer], params)
    betas: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: betas.append(min(g["betas"][0] for g in optimizer.param_groups)))
    steps = BY_UPDATE.lasts(0.02)
    for step in range(steps + 5):
        for param, mean in zip(params, engines.average(gradients(2, step)), strict=True):
            param.grad = mean.view_as(param)
        optimizer.step()
    first, then, last = betas[: BY_UPDATE.steps], betas[BY_UPDATE.steps : steps], betas[steps:]
    assert first == pytest.approx([0.95 * 0.9] * len(first))
    assert then == sorted(then, reverse=True)
    assert max(a - b for a, b in pairwise(then)) < 0.1  # half an octave of the density
    assert last == [0.0] * 5

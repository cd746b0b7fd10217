"""Costs fitted to steps that were made up from known ones, and collectives timed on a real group."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lab.bench.calibrate import fit_run
from lab.bench.collectives import time_collectives
from lab.bench.measure import Rhythm, Run
from lab.bench.recorders import BufferCost, EngineRecord, EngineStep, FloorRecord, FloorStep
from lab.clock.costs import HostCosts, QueuedSample, QueuedTimes
from lightning_safusion.comm.transport.torch_backend import default_transport
from lightning_safusion.fusion.layout import Layout, TensorSpec
from lightning_safusion.fusion.plans.costs import SelectionCost
from tests.process_group import run_ranks

WORKERS, TENSORS, NUMEL, ENTRIES = 4, 24, 1000, 10
TIMES = QueuedTimes((QueuedSample(64, 1e-3, 5e-4, 4e-4, 2e-4), QueuedSample(4096, 2e-3, 1e-3, 8e-4, 4e-4)))
COLLECTIVES = {"allgather": TIMES, "allreduce": TIMES}


def floor_step(pace: float = 1.0) -> FloorStep:
    """24 gradients, 2 ms each of which half on a core; 6 ms forward, 4 ms on a core; 3 ms afterwards, all on one."""
    ready = pace * np.outer(np.arange(1, TENSORS + 1), (2e-3, 1e-3))
    layers = {"a": pace * np.array((4e-3, 3e-3)), "b": pace * np.array((2e-3, 1e-3))}
    return FloorStep(ready, layers, pace * np.array((3e-3, 3e-3)))


def run_of(
    ahead: Sequence[EngineStep],
    behind: Sequence[EngineStep],
    collectives: Mapping[str, QueuedTimes] = COLLECTIVES,
    paces: Sequence[float] = (0.98, 1.0, 1.02),
) -> Run:
    """Four workers with the same steps; every other one, and those of the first block, are not to count."""
    names = [f"{'ab'[place // 12]}.t{place}" for place in range(TENSORS)]
    layout = Layout(tuple(TensorSpec(name, at, (NUMEL,), NUMEL, torch.float32) for at, name in enumerate(names)))
    steps = tuple(floor_step(each) for pace in (7.0, *paces) for each in (9.0, pace))
    floor = FloorRecord("Job", layout, steps)
    first, second = (EngineRecord(tuple(each), dict(collectives)) for each in (ahead, behind))
    return Run({}, [floor] * WORKERS, [first] * WORKERS, [second] * WORKERS)


def fit(*args: Any, **options: Any) -> HostCosts:
    return fit_run(run_of(*args, **options), Rhythm(block=2))[1]


def engine_step(sizes: Sequence[int], fixed: float = 1e-3) -> EngineStep:
    """Selection: fixed + 0.1 ms per tensor + 2 us per element; decoding: 0.5 ms + 10 us per entry of all workers; a
    hook of 0.2 ms; a drain of 2 ms and 0.3 ms per buffer; collectives as TIMES say, with half as much work again."""

    def cost(place: int, count: int) -> BufferCost:
        elements, entries = count * NUMEL + 100 * place, count * ENTRIES + place
        select, decode = fixed + 1e-4 * count + 2e-6 * elements, 5e-4 + 1e-5 * WORKERS * entries
        return BufferCost(count, elements, entries, 6 * entries, select, decode)

    buffers = tuple(cost(place, count) for place, count in enumerate(sizes))
    select, decode = sum(buffer.select for buffer in buffers), sum(buffer.decode for buffer in buffers)
    backward = TENSORS * (1e-3 + 2e-4) + select - buffers[-1].select
    drain = 2e-3 + 3e-4 * len(sizes) + decode + buffers[-1].select
    others = 1.5 * sum(TIMES.at(buffer.nbytes).processor_queued for buffer in buffers)
    return EngineStep(7, buffers, backward, drain, 3e-3, others)


PLANS = [[8] * 3, [2] * 12, [24], [4] * 6, [1] * 24, [10, 14]]


def test_costs_are_found_again() -> None:
    ahead, behind = ([engine_step(plan, fixed) for plan in PLANS] for fixed in (1e-3, 4e-3))
    found = fit(ahead, behind)
    costs, host = found.calibration, found.host
    assert (host.cores, host.forward, host.backward, host.optimizer) == pytest.approx(
        ((os.cpu_count() or 1) / 4, 2 / 3, 0.5, 1.0)
    )
    assert host.hook == pytest.approx(2e-4)
    assert (host.ahead.fixed, host.ahead.per_tensor, host.ahead.per_element) == pytest.approx((1e-3, 1e-4, 2e-6))
    assert (host.behind.fixed, host.behind.per_tensor, host.behind.per_element) == pytest.approx((4e-3, 1e-4, 2e-6))
    assert (host.decode.fixed, host.decode.per_element) == pytest.approx((5e-4, 1e-5))
    assert (host.drain.fixed, host.drain.per_byte) == pytest.approx((2e-3, 3e-4))
    assert costs.entry_bytes == pytest.approx(6.0)
    assert costs.jitter == pytest.approx(0.04 / 1.349)
    assert costs.select == SelectionCost(host.ahead.fixed + host.decode.fixed, host.ahead.per_element)
    # what the job's collectives took of the processors, not those timed alone
    gather, reduce = costs.allgather.at(64), costs.allreduce.at(64)
    assert gather.processor == gather.processor_queued == pytest.approx(3e-4)
    assert reduce.processor == pytest.approx(4e-4)


def test_a_slow_buffer_in_a_few_windows_changes_nothing() -> None:
    steps = [engine_step(plan) for plan in PLANS for _ in range(7)]
    slow = [buffer._replace(select=50 * buffer.select) for buffer in steps[0].buffers]
    disturbed = [replace(steps[0], buffers=tuple(slow)), *steps[1:]]
    costs = [fit(each, steps).host.ahead for each in (steps, disturbed)]
    assert costs[0].fixed == pytest.approx(costs[1].fixed)
    assert costs[0].per_element == pytest.approx(costs[1].per_element)


def test_more_bytes_never_take_less() -> None:
    seconds = [3e-3, 1e-3, 2e-3, 9e-3]
    noisy = QueuedTimes(tuple(QueuedSample(4**n, s, s, s, s) for n, s in enumerate(seconds, 3)))
    steps = [engine_step(plan) for plan in PLANS]
    costs = fit(steps, steps, {"allgather": noisy, "allreduce": noisy})
    assert [sample.seconds for sample in costs.calibration.allreduce.samples] == pytest.approx([2e-3, 2e-3, 2e-3, 9e-3])


def test_without_sparse_buffers_there_is_nothing_to_fit() -> None:
    dense = [replace(engine_step([24]), buffers=())]
    with pytest.raises(RuntimeError, match="no buffer was sparse"):
        fit(dense, dense)


def test_the_trace_is_the_job_without_any_exchange() -> None:
    steps = [engine_step(plan) for plan in PLANS]
    trace, _ = fit_run(run_of(steps, steps), Rhythm(block=2))
    assert trace.seconds == pytest.approx(57e-3)
    assert [tensor.backward for tensor in trace.tensors] == pytest.approx([2e-3] * TENSORS)
    # a layer's forward pass is charged to the last of its tensors
    assert [tensor.forward for tensor in trace.tensors if tensor.forward] == pytest.approx([4e-3, 2e-3])
    assert trace.optimizer == pytest.approx(3e-3)


def test_all_ranks_time_the_same_and_a_queue_is_no_slower_than_one_after_the_other() -> None:
    def timed(rank: int) -> Sequence[QueuedSample]:
        return time_collectives(default_transport(), budget_s=0.5)["allgather"].samples

    first, second = run_ranks(2, timed)
    assert first == second
    assert len(first) >= 2
    assert [sample.nbytes for sample in first] == sorted(sample.nbytes for sample in first)
    assert all(0 <= sample.queued <= sample.seconds and sample.processor >= 0 for sample in first)

"""The events of a window that observers get."""

from __future__ import annotations

import time
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from lab.virtual.transport import LocalWork
from lightning_safusion.fusion.events import Clock, WindowEvents
from lightning_safusion.sparsify import Segments, Selection, TopK
from tests.cluster import Cluster
from tests.fusion import windows
from tests.fusion.windows import Make, random_window, train
from tests.simulated import SimulatedTime


@pytest.fixture
def make(make: Make) -> Make:
    return partial(make, collective="allgather", fusion="aligned")


def observed(cluster: Cluster, steps: int = 4, **step: Any) -> WindowEvents:
    """The last of some windows, as rank 0 was told."""
    seen = [windows.observed(engine) for engine in cluster.engines]
    for number in range(steps):
        cluster.step(cluster.random_grads(number), **step)
    assert [events.step for events in seen[0]] == list(range(steps))
    return seen[0][-1]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("fusion", ["aligned", "wfbp"])
@pytest.mark.parametrize("collective", ["allgather", "allreduce"])
def test_moments_are_in_order(make: Make, collective: str, fusion: str, deferred: bool) -> None:
    before = time.perf_counter()
    events = observed(make(deferred=deferred, collective=collective, fusion=fusion))
    assert len(events.buffers) == (10 if fusion == "wfbp" else 2)
    assert before < events.ready[0]
    assert (np.diff(events.ready) > 0).all()
    for buffer in events.buffers:
        moments = [buffer.closed, buffer.selected, buffer.launched]
        assert events.ready[buffer.places[-1]] < moments[0]
        assert moments == sorted(moments)
        assert buffer.launched <= buffer.finished
        assert buffer.arrived <= buffer.decoded <= events.drained
        assert buffer.collective == collective
    assert [place for buffer in events.buffers for place in buffer.places] == list(range(10))
    assert sum(buffer.elements for buffer in events.buffers) == events.layout.numel


def test_a_slow_exchange_is_exposed_and_a_slow_selection_is_not(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make()
    time = SimulatedTime().rule(monkeypatch)
    wait = LocalWork.wait

    def slow(work: LocalWork) -> None:
        time.sleep(0.05)
        wait(work)

    monkeypatch.setattr(LocalWork, "wait", slow)
    events = observed(cluster)
    assert [buffer.exposed for buffer in events.buffers] == pytest.approx([0.05, 0.05])
    assert all(buffer.launched == buffer.closed for buffer in events.buffers)


def test_selection_and_packing_are_told_apart(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    time = SimulatedTime().rule(monkeypatch)

    class SlowTopK(TopK):
        """Takes its time."""

        def select(self, x: torch.Tensor, segments: Segments, step: int) -> Selection:
            time.sleep(0.05)
            return super().select(x, segments, step)

    cluster = make(compressor=SlowTopK())
    events = observed(cluster)
    for buffer in events.buffers:
        assert buffer.selected - buffer.closed == pytest.approx(0.05)
        assert buffer.launched == buffer.selected


def test_a_stale_tensor_was_never_ready(make: Make) -> None:
    fresh = [[index != 4 for index in range(10)]] * 2
    events = observed(make(), fresh=fresh)
    names = events.layout.names(np.flatnonzero(np.isnan(events.ready)))
    assert names == ["t4"]


def test_the_report_is_the_sum_of_the_events(make: Make) -> None:
    cluster = make()
    events = observed(cluster)
    figures = cluster.engines[0].record.as_dict()
    assert figures["exposed_s"] == pytest.approx(sum(buffer.exposed for buffer in events.buffers))
    assert figures["select_s"] == pytest.approx(sum(b.launched - b.closed for b in events.buffers))
    assert figures["exchange_s"] == pytest.approx(sum(b.finished - b.launched for b in events.buffers))
    assert figures["bytes_sent"] == sum(buffer.bytes_sent for buffer in events.buffers)


def test_moments_are_those_of_the_engines_clock(make: Make) -> None:
    class Steps(Clock):
        """Counts instead of telling the time, as one of processor time may do."""

        def __init__(self) -> None:
            self.mark = map(float, count(1)).__next__

    cluster = make()
    for engine in cluster.engines:
        engine.clock = Steps()
    events = observed(cluster)
    buffers = [[b.closed, b.selected, b.launched, b.issued, b.awaited, b.arrived, b.decoded] for b in events.buffers]
    moments = sorted([*events.ready.tolist(), *(moment for buffer in buffers for moment in buffer), events.drained])
    assert moments == [moments[0] + step for step in range(len(moments))]  # each was asked for once, and none else


def test_a_clock_that_costs_something_is_asked_only_for_an_observer(make: Make) -> None:
    class Counting(Clock):
        """Knows its moments only later, as a device's clock does."""

        instant, marks = False, 0

        def mark(self) -> float:
            self.marks += 1
            return super().mark()

    cluster = make(deferred=True)
    clocks = [Counting() for _ in cluster.engines]
    for engine, clock in zip(cluster.engines, clocks, strict=True):
        engine.clock = clock
    # the first 64 windows are measured, and every sixteenth one
    train(cluster, 67)
    before = clocks[0].marks
    train(cluster, 70, 67)
    assert clocks[0].marks == before > 0
    seen = windows.observed(cluster.engines[0])
    random_window(cluster, 70)
    assert seen == []  # known when the next window begins
    random_window(cluster, 71)
    assert [events.step for events in seen] == [70]
    assert seen[0].beside
    before = clocks[1].marks  # of the rank without an observer
    for number, measured in ((79, False), (80, True)):
        for engine in cluster.engines:
            engine.windows = number
        random_window(cluster, number)
        assert (clocks[1].marks > before) == measured

"""The clock against timelines worked out by hand, and against the planners' own predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lab.papers.simulated import PUBLISHED
from lab.planner_loss import predict_behind
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.pricing import predict_finish
from lightning_safusion.fusion.plans.ticking import Horovod
from lightning_safusion.profiling.trace import Trace, TraceTensor
from lightning_safusion.tools.plan.cluster import Cluster, CollectiveCost
from lightning_safusion.tools.plan.device import DEVICES
from lightning_safusion.tools.plan.engine import mean_iteration, simulate
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.schedule import Message, Schedule, Stream, Timer

ALONE = Cluster(2)


def job_of(backward: Sequence[float], forward: float = 0.0, optimizer: float = 0.0, numel: int = 1) -> Trace:
    tensors = tuple(TraceTensor(f"t{place}", (numel,), seconds, forward) for place, seconds in enumerate(backward))
    return Trace("job", tensors, optimizer)


def message(*tensors: int, seconds: float, **options: Any) -> Message:
    return Message(tensors, CollectiveCost(seconds, 10.0, 5.0), **options)


def planned(*messages: Message, select: Sequence[float] = ()) -> Schedule:
    return Schedule(messages, select)


def test_the_link_is_first_come_first_served() -> None:
    trace = job_of([1.0, 1.0, 1.0], forward=1.0, optimizer=0.5)
    result = simulate(trace, ALONE, planned(message(0, seconds=5.0), message(1, 2, seconds=2.0, decode=0.25)))
    # forward takes 3 s; the first message leaves at 4 s, the second is ready at 6 s and waits until 9 s
    assert result.seconds == 11.75
    assert result.compute == 6.5
    assert result.exposed == 5.25
    assert (result.nbytes, result.node_bytes, result.collectives) == (20.0, 10.0, 2)


def test_selection_ahead_delays_every_gradient_after_it() -> None:
    result = simulate(job_of([1.0, 1.0]), ALONE, planned(message(0, 1, seconds=1.0), select=[0.5, 0.5]))
    assert result.seconds == 4.0
    assert result.select == 1.0


@pytest.mark.parametrize(("first", "seconds"), [(1.0, 5.0), (1.5, 5.5), (2.5, 6.5)])
def test_selection_behind_delays_the_gradients_after_the_buffer(first: float, seconds: float) -> None:
    # the first leaves at 3 s, the second is ready at 4 s
    messages = message(0, seconds=first, select=2.0), message(1, seconds=1.0)
    result = simulate(job_of([1.0, 1.0]), ALONE, planned(*messages))
    assert result.seconds == seconds
    assert result.select == 2.0


def test_parts_of_a_tensor_leave_while_the_next_part_is_selected() -> None:
    part = message(0, seconds=2.0, select=1.0)
    assert simulate(job_of([1.0]), ALONE, planned(part, part, part)).seconds == 8.0


def test_the_host_selects_one_tensor_after_the_other_beside_backward() -> None:
    trace = job_of([1.0, 1.0], numel=100)
    cluster = replace(ALONE, device=replace(DEVICES["a100"], pcie=400.0 / 3.0))  # copying takes 3 s
    first, second = message(0, seconds=1.0), message(1, seconds=1.0)

    def seconds(*host: float) -> float:
        return simulate(trace, cluster, Schedule([first, second], host_select=host)).seconds

    # copied from 1 to 4 s and from 4 to 7 s
    assert seconds(4.0, 4.0) == 13.0
    assert seconds(1.0, 4.0) == 12.0
    assert seconds(4.0, 0.0) == 10.0  # the link takes them in order
    assert seconds(0.0, 4.0) == 10.0  # copied from 2 s on


def test_late_parameters_hold_up_the_next_forward_pass() -> None:
    trace = Trace("job", tuple(TraceTensor(f"t{place}", (1,), 1.0, 2.0) for place in range(3)))
    settle = CollectiveCost(3.0, 7.0)
    first = Message([0], CollectiveCost(0.5, 10.0), settle=settle)
    second = Message([1, 2], CollectiveCost(0.5, 10.0), settle=settle)
    result = simulate(trace, ALONE, planned(first, second))
    # the second group comes first in forward: settled at 3 s, its forward ends at 7 s; the first group is launched when
    # that begins, settled at 6 s, and does not wait; backward begins at 9 s
    assert result.seconds == 12.5
    assert result.nbytes == 34.0
    assert result.collectives == 4


@pytest.mark.parametrize(("settle", "end"), [(1.0, 7.0), (2.0, 8.0), (3.0, 11.0)])
def test_a_second_phase_is_launched_when_the_group_before_it_begins_its_forward_pass(settle: float, end: float) -> None:
    trace = job_of([1.0, 1.0, 1.0], forward=2.0)
    messages = [Message([place], CollectiveCost(0.5), settle=CollectiveCost(settle)) for place in range(3)]
    # with a second phase of 1 s, forward passes begin at 1, 3 and 5 s
    assert simulate(trace, ALONE, planned(*messages)).seconds == end + 3.5


def test_a_timer_sends_ready_tensors_at_its_ticks() -> None:
    sent: list[list[int]] = []

    def noted(places: Sequence[int]) -> Message:
        sent.append(list(places))
        return message(*places, seconds=0.5)

    timer = Timer(noted, (10.0,) * 4, Horovod(2.0, 20), negotiate=0.25, launch=0.25)
    result = simulate(job_of([1.0, 1.5, 1.0, 4.0]), ALONE, Schedule(timer))
    # ready at 1, 2.5, 3.5 and 7.5 s; ticks at 2, 4, 6 and 8 s
    assert sent == [[0], [1, 2], [3]]
    assert result.seconds == 9.0


def test_a_timer_keeps_its_threshold_and_its_thread_waits_for_the_exchange() -> None:
    timer = Timer(
        lambda places: message(*places, seconds=2.0),
        (10.0, 10.0, 30.0, 5.0),
        Horovod(1.0, 20),
        negotiate=0.0,
        launch=0.0,
    )
    result = simulate(job_of([1.0, 0.0, 0.0, 2.0]), ALONE, Schedule(timer))
    # at 1 s: two that fit, and one that is larger than the threshold; the fourth is ready at 3 s, the thread at 5 s
    assert result.seconds == 7.0
    assert result.collectives == 3


@pytest.mark.parametrize(("round_s", "end"), [(0.25, 3.5), (0.5, 4.0), (1.0, 5.0), (2.0, 8.0)])
def test_streams_send_full_buffers_until_all_workers_have_finished(round_s: float, end: float) -> None:
    stream = Stream((40.0, 40.0, 40.0), 50.0, message(0, seconds=round_s), spread=0.0)
    result = simulate(job_of([1.0, 1.0, 1.0], numel=100), ALONE, Schedule(stream))
    # 50 entries are there at 2 s, 100 at 3 s, the last 20 at 3 s
    assert result.seconds == end
    assert result.collectives == 3


def test_streams_wait_for_each_other_where_workers_keep_different_numbers() -> None:
    trace = job_of([1.0] * 50, numel=100)
    even = Stream((40.0,) * 50, 80.0, message(0, seconds=0.0), spread=0.0)
    uneven = replace(even, spread=0.5)
    cluster = Cluster(8)
    assert simulate(trace, cluster, Schedule(even)).waited == 0
    assert simulate(trace, cluster, Schedule(uneven)).waited > 1.0


@pytest.mark.parametrize("segmented", [True, False])
def test_the_clock_agrees_with_the_planners(segmented: bool) -> None:
    rng = np.random.default_rng(4)
    tensors = tuple(
        TraceTensor(f"t{place}", (int(rng.integers(1000, 10**6)),), float(rng.uniform(0, 1e-3)), 1e-4)
        for place in range(12)
    )
    job = Job(Trace("job", tensors), Cluster(8, device=PUBLISHED["exact"]), 0.05, 8, segmented=segmented)
    costs, forward = job.group_costs(), sum(tensor.forward for tensor in tensors)
    for _ in range(20):
        cuts = np.sort(rng.choice(np.arange(1, 12), int(rng.integers(0, 11)), replace=False))
        plan = Plan.from_stops([*cuts.tolist(), 12])
        ahead = simulate(job.trace, job.cluster, job.schedule(plan)).seconds - forward
        merged = simulate(job.trace, job.cluster, job.schedule(plan, behind=True)).seconds - forward
        assert merged == pytest.approx(predict_behind(plan, costs))
        assert ahead == pytest.approx(merged if segmented else predict_finish(plan, costs))


def test_jitter_repeats_with_its_seed_and_differs_between_iterations() -> None:
    trace = job_of([1.0] * 20, forward=0.1)
    cluster = Cluster(4, jitter=0.2, seed=3)
    schedule = planned(message(*range(20), seconds=1.0))
    one = simulate(trace, cluster, schedule)
    assert simulate(trace, cluster, schedule).seconds == one.seconds
    assert simulate(trace, cluster, schedule, iteration=1).seconds != one.seconds
    assert simulate(trace, replace(cluster, seed=4), schedule).seconds != one.seconds


def test_jitter_makes_the_slowest_worker_count() -> None:
    trace = job_of([1.0] * 50)
    schedule = planned(message(*range(50), seconds=1.0))
    means = [mean_iteration(trace, Cluster(n, jitter=0.1), schedule, 40) for n in (2, 8, 32)]
    seconds = [result.seconds for result in means]
    assert 51.0 < seconds[0] < seconds[1] < seconds[2]
    assert means[0].waited > 0
    assert mean_iteration(trace, Cluster(32), schedule).seconds == 51.0


def test_factors_of_jitter_have_mean_one() -> None:
    trace = job_of([1.0] * 10)
    alone = planned()
    seconds = [simulate(trace, Cluster(1, jitter=0.2), alone, number).seconds for number in range(2000)]
    assert np.mean(seconds) == pytest.approx(10.0, rel=0.02)
    # the worker's factor, and a tenth of the variance of the gradients'
    assert np.std(seconds) / np.mean(seconds) == pytest.approx(0.2 * np.sqrt(1.1), rel=0.1)


def test_workers_agree_on_the_slowest_one() -> None:
    trace = job_of([1.0] * 30)
    assert Job(trace, Cluster(8)).backward.tolist() == [1.0] * 30
    agreed = Job(trace, Cluster(8, jitter=0.2)).backward
    assert (agreed >= 0).all()
    assert 30.0 < agreed.sum() < 40.0


def test_first_busy_is_the_tensor_after_the_last_idle_moment() -> None:
    trace = job_of([1.0, 5.0, 1.0])
    result = simulate(trace, ALONE, planned(*(message(place, seconds=2.0) for place in range(3))))
    assert result.first_busy == 1

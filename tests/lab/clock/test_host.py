"""Workers on the cores of one machine, against timelines worked out by hand and against the clock without sharing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lab.clock.cores import TIMESLICE, mean_iteration, run_system, simulate
from lab.clock.costs import (
    Host,
    HostCluster,
    HostCost,
    HostCosts,
    HostJob,
    QueuedSample,
    QueuedTimes,
    StageCost,
    planned_costs,
)
from lab.papers.simulated import PUBLISHED
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.profiling.trace import Trace, TraceTensor
from lightning_safusion.tools.plan import engine
from lightning_safusion.tools.plan.calibration import Calibration
from lightning_safusion.tools.plan.cluster import Cluster, CollectiveCost
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.schedule import Message, Schedule, Stream
from lightning_safusion.tools.plan.systems import build_schedule
from tests.tools.plan.test_engine import job_of

ROOMY = HostCluster(2, host=Host(cores=math.inf))


def seconds(trace: Trace, cluster: HostCluster, *messages: Message, engine: bool = True) -> float:
    return simulate(trace, cluster, Schedule(messages, engine=engine)).seconds


@pytest.mark.parametrize("name", ["ddp", "powersgd", "dear", "easgd", "wfbp", "omgs", "syncea", "adtopk", "safusion"])
def test_with_cores_for_all_it_is_the_clock_without_sharing(name: str) -> None:
    trace = Trace("job", tuple(TraceTensor(f"t{i}", (300, 100 + i), 1e-3 * (i % 3), 5e-4) for i in range(20)), 2e-3)
    # decoding is free: on the host it waits for the end of backward
    alone = Cluster(4, device=replace(PUBLISHED["threshold"], decode=0.0))
    shared = HostCluster(4, device=alone.device, host=Host(cores=math.inf))
    schedule = build_schedule(name, Job(trace, alone, 0.01))
    expected, result = engine.simulate(trace, alone, schedule), simulate(trace, shared, schedule)
    assert result.seconds == pytest.approx(expected.seconds)
    assert (result.nbytes, result.collectives) == pytest.approx((expected.nbytes, expected.collectives))


def test_two_workers_on_one_core_compute_at_half_speed() -> None:
    trace = job_of([1.0, 1.0], forward=0.5, optimizer=0.5)
    assert seconds(trace, HostCluster(2, host=Host(cores=1))) == pytest.approx(3.5)
    assert seconds(trace, HostCluster(2, host=Host(cores=0.5))) == pytest.approx(7.0, abs=TIMESLICE)


def test_paced_computation_takes_no_core() -> None:
    trace = job_of([1.0, 1.0], forward=0.5, optimizer=0.5)
    asleep = Host(cores=0.5, forward=0.0, backward=0.0, optimizer=0.0)
    assert seconds(trace, HostCluster(2, host=asleep)) == pytest.approx(3.5)
    # a tenth of the backward pass is on half a core
    assert seconds(trace, HostCluster(2, host=replace(asleep, backward=0.1))) == pytest.approx(3.7, abs=3 * TIMESLICE)


def test_a_worker_that_waited_for_a_core_after_sleep_sleeps_less_the_next_time() -> None:
    # one worker has the core from 8 to 10 ms, the other from 10 to 12 ms; then both sleep until 20 ms
    asleep = Host(cores=0.5, forward=0.0, backward=0.2, optimizer=0.0)
    assert seconds(job_of([0.01], optimizer=0.01), HostCluster(2, host=asleep)) == pytest.approx(0.02)
    # made up for once: the steps after a sleep without any work are as long as they should be
    late = Host(cores=0.5, forward=0.2, backward=0.0, optimizer=0.0)
    trace = job_of([0.01, 0.01], forward=0.005, optimizer=0.01)
    assert seconds(trace, HostCluster(2, host=late)) == pytest.approx(0.04)


def test_a_collective_takes_processor_time_from_computation() -> None:
    trace = job_of([1.0, 3.0])
    message = Message((0,), HostCost(2.0, processor=1.0))
    # one core for each worker: half of it for the threads of the collective for 2 s, in which backward does 1 s of work
    assert seconds(trace, HostCluster(2, host=Host(cores=1)), message) == pytest.approx(1.0 + 2.0 + 2.0)
    assert seconds(trace, HostCluster(2, host=Host(cores=2)), message) == pytest.approx(4.0)


def test_latency_hides_in_a_queue() -> None:
    trace = job_of([1.0, 0.0, 0.0])
    cost = HostCost(3.0, hidden=2.0)
    assert seconds(trace, ROOMY, Message((0,), cost)) == pytest.approx(4.0)
    assert seconds(trace, ROOMY, *(Message((place,), cost) for place in range(3))) == pytest.approx(1.0 + 2.0 + 3 * 1.0)


def test_costs_of_the_engine_are_charged_to_its_systems_only() -> None:
    trace = job_of([1.0, 1.0])
    cluster = HostCluster(2, host=Host(cores=math.inf, hook=0.1, drain=LinearCost(0.5, 0.25)))
    messages = [Message((place,), CollectiveCost(0.01)) for place in range(2)]
    assert seconds(trace, cluster, *messages, engine=False) == pytest.approx(2.01)
    assert seconds(trace, cluster, *messages) == pytest.approx(2.2 + 0.01 + 0.5 + 2 * 0.25)


def test_selection_on_a_second_thread_takes_a_core_from_backward() -> None:
    trace = job_of([1.0, 1.0])
    schedule = Schedule([Message([0, 1], CollectiveCost(1.0))], host_select=[2.0, 0.0])
    assert simulate(trace, ROOMY, schedule).seconds == pytest.approx(1.0 + 2.0 + 1.0)
    # both threads have half a core from 1 s to 3 s, in which backward ends; one second of selection is left
    shared = simulate(trace, HostCluster(2, host=Host(cores=1)), schedule)
    assert shared.seconds == pytest.approx(3.0 + 1.0 + 1.0, abs=2 * TIMESLICE)


def test_a_message_before_the_iteration_is_awaited_at_its_end() -> None:
    trace = job_of([1.0], forward=1.0, optimizer=0.5)
    late = Schedule([Message([], CollectiveCost(5.0), decode=0.25)], engine=False)
    assert simulate(trace, ROOMY, late).seconds == pytest.approx(5.75)


def test_jitter_repeats_with_its_seed_and_makes_workers_wait() -> None:
    trace = job_of([1.0] * 20)
    schedule = Schedule([Message(range(20), CollectiveCost(1.0))])
    cluster = HostCluster(4, jitter=0.1, seed=3, host=Host(cores=math.inf))
    one = simulate(trace, cluster, schedule)
    assert simulate(trace, cluster, schedule).seconds == one.seconds
    assert simulate(trace, cluster, schedule, iteration=1).seconds != one.seconds
    mean = mean_iteration(trace, cluster, schedule, 30)
    assert mean.seconds > 21.0
    assert mean.waited > 0


def test_messages_that_are_not_known_before_are_refused() -> None:
    with pytest.raises(ValueError, match="known before"):
        simulate(job_of([1.0]), ROOMY, Schedule(Stream([1.0], 1.0, Message((0,), CollectiveCost(1.0)))))


def test_costs_of_processors_are_the_job_s() -> None:
    times = QueuedTimes(tuple(QueuedSample(n, 3e-3 + 3e-6 * n, 0.0, 1e-3, 1e-3) for n in (100, 10_000)))
    host = Host(
        100.0, ahead=StageCost(3e-3, 0.0, 3e-8), behind=StageCost(1e-3, 0.0, 1e-8), decode=StageCost(2e-3, 0.0, 1e-7)
    )
    costs = HostCosts(Calibration(4, times, times, 6.0, **planned_costs(host)), host)
    trace = Trace("job", tuple(TraceTensor(f"t{i}", (1000, 10), 0.01) for i in range(3)), 0.005)
    job = HostJob(trace, HostCluster.of(costs, 4), 0.01, 6.0)
    # one buffer of 30 000 elements, of which 300 are sent by each of four workers
    expected = 0.03 + (1e-3 + 3e-4) + (3e-3 + 1800 * 3e-6) + (2e-3 + 1200 * 1e-7) + 0.005
    assert run_system("syncea", job).seconds == pytest.approx(expected)

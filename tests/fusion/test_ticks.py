"""Timer-driven fusion: what ranks agree on at ticks, and that nothing is lost, hangs or differs between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lab.virtual.transport import LocalTransport, local_transports
from lightning_safusion.fusion.build import JobTraits
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.launching.ticking import Ticking, Ticks
from lightning_safusion.fusion.plans.ticking import Horovod, fuse_ready
from tests.cluster import Cluster, assert_conserved, specs
from tests.fusion.windows import Clock, Make, engine_on, observed, push, random_window, train
from tests.models import equal
from tests.quick import slow


def ticking(transport: LocalTransport, start: float, cycle: float = 1.0) -> tuple[Ticks, Clock]:
    """Ticks by a clock of their own."""
    clock = Clock(start)
    return Ticks(transport, cycle, clock.now, clock.pause), clock


def test_ranks_agree_on_what_the_slower_one_has_at_its_tick() -> None:
    (fast, early), (slow, late) = map(ticking, local_transports(2), (0.25, 100.5))
    fast.begin()
    slow.begin()
    assert fast.poll(3) == 0  # before its first tick
    early.seconds = 1.1
    assert fast.poll(4) == 0  # asks
    late.seconds = 100.9
    assert slow.poll(1) == 0  # before its first tick
    late.seconds = 101.0
    assert slow.poll(2) == 0  # asks, and the answer comes
    assert (fast.poll(5), slow.poll(2)) == (2, 2)
    early.seconds = late.seconds = 200.0
    assert (fast.poll(6), slow.poll(2)) == (2, 2)  # the slow one has nothing new, and does not ask
    assert slow.poll(9) == 2
    assert (fast.poll(9), slow.poll(9)) == (6, 6)  # what the fast one had when it asked


def test_no_question_before_the_next_cycle() -> None:
    alone, clock = ticking(local_transports(1)[0], 0.5)
    alone.begin()
    clock.seconds = 1.0
    assert alone.poll(1) == 0
    assert alone.poll(2) == 1
    clock.seconds = 1.9
    assert [alone.poll(3), alone.poll(4)] == [1, 1]
    clock.seconds = 2.0
    assert [alone.poll(5), alone.poll(6)] == [1, 5]
    assert list(alone.rest(9)) == [9]
    assert clock.seconds == 3.0  # it has waited for the tick


@pytest.mark.parametrize(("world_size", "seed"), [(1, 0), (2, 1), (3, 2), (5, 3)])
def test_all_ranks_hear_the_same_answers_at_any_pace(make: Make, world_size: int, seed: int) -> None:
    total, cycle = 40, 1e-4
    cluster = make(world_size)
    made = [ticking(each, float(rank), cycle) for rank, each in enumerate(cluster.transports)]

    def window(rank: int) -> list[int]:
        rng, (ticks, clock) = np.random.default_rng([seed, rank]), made[rank]
        ticks.begin()
        heard = []
        for ready in range(1, total + 1):
            clock.pause(float(rng.exponential(cycle)))
            heard.append(ticks.poll(ready))
        heard += ticks.rest(total)
        return [answer for answer in dict.fromkeys(heard) if answer]  # each once, however often it was looked at

    for _ in range(3):
        answers = cluster.each(window)
        assert all(each == answers[0] for each in answers)
        assert answers[0] == sorted(answers[0])
        assert answers[0][-1] == total


def test_tensors_fill_buffers_front_to_back() -> None:
    assert fuse_ready([4, 4, 4, 20, 1, 1], 0, 6, 8) == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert fuse_ready([4, 4, 4, 20, 1, 1], 1, 3, 8) == [(1, 3)]
    assert fuse_ready([4, 4], 0, 2, 0) == [(0, 1), (1, 2)]
    assert fuse_ready([4, 4], 1, 1, 8) == []


# --- in the engine --------------------------------------------------------------------------------------------------

SPARSE: dict[str, Any] = {"collective": "allgather"}
DENSE: dict[str, Any] = {"compressor": "none", "collective": "allreduce", "own_buffers": True}


@pytest.fixture
def timed(make: Make) -> Make:
    def build(world_size: int, cycle_s: float = 2e-4, **options: Any) -> Cluster:
        return make(world_size, fusion=Horovod(cycle_s, 1 << 20), **options)

    return build


def hurry(cluster: Cluster, seed: int) -> None:
    """Makes every rank push at a pace of its own, which changes, and by a clock of its own."""
    for rank, engine in enumerate(cluster.engines):
        rng, clock = np.random.default_rng([seed, rank]), Clock()
        engine.launching.ticks.now, engine.launching.ticks.pause = clock.now, clock.pause

        def slow(
            index: int, grad: Any, fresh: bool = True, rng: Any = rng, clock: Clock = clock, to: Any = engine
        ) -> None:
            clock.pause(float(rng.exponential(3e-4)))
            Engine.push(to, index, grad, fresh)

        engine.push = slow  # a worker's pace is what is varied


@pytest.mark.parametrize(("world_size", "options"), [(3, SPARSE), (2, DENSE), *slow([(5, SPARSE), (1, DENSE)])])
def test_nothing_is_lost_and_all_ranks_send_the_same_buffers(
    timed: Make, world_size: int, options: dict[str, Any]
) -> None:
    cluster = timed(world_size, **options)
    hurry(cluster, seed=world_size)
    seen = [observed(engine) for engine in cluster.engines]
    assert_conserved(cluster, steps=12)
    first, *others = [[[(b.places.start, b.places.stop) for b in events.buffers] for events in each] for each in seen]
    assert all(each == first for each in others)
    assert len(first) == 12
    assert len(set(map(tuple, first[2:]))) > 1  # each step has other buffers
    assert all(len(engine.space.buffers) <= 10 for engine in cluster.engines)  # and keeps no old ones


def test_buffers_change_no_number(make: Make, timed: Make) -> None:
    ours, planned = timed(3, **SPARSE), make(3, fusion="aligned", **SPARSE)
    hurry(ours, seed=1)
    for step in range(6):
        assert equal(random_window(ours, step), random_window(planned, step))


def test_a_lost_rank_is_named_by_the_agreement(timed: Make) -> None:
    cluster = timed(2, **SPARSE)
    train(cluster, 3)
    engine = cluster.engines[0]
    engine.launching.ticks.transport._exchange.timeout = 0.2  # of the virtual workers
    push(engine, *cluster.order)
    with pytest.raises(RuntimeError, match="rank 0: the agreement on which tensors are ready on all ranks failed"):
        engine.drain()


def test_an_abandoned_backward_pass_cannot_be_gone_on_from(timed: Make) -> None:
    cluster = timed(1, cycle_s=0.0, **SPARSE)
    train(cluster, 3)
    push(cluster.engines[0], *cluster.order[:4])
    with pytest.raises(RuntimeError, match="backward pass did not finish.*checkpoint.*'aligned'"):
        push(cluster.engines[0], cluster.order[0])


def test_gradients_out_of_order_leave_when_all_have_come(make: Make, timed: Make) -> None:
    clusters = timed(2, cycle_s=0.0, **SPARSE), make(2, fusion="aligned", **SPARSE)
    for step in range(6):
        grads = clusters[0].random_grads(step)
        order = clusters[0].order[::-1] if step == 4 else None
        assert equal(*(cluster.step(grads, order=order) for cluster in clusters))


def test_where_nothing_may_leave_early_nothing_is_asked() -> None:
    fusion, traits = Horovod(threshold_bytes=4000), JobTraits(measure=False, overlap=False)
    engine = engine_on(torch.device("cpu"), tensors=specs(), traits=traits, fusion=fusion, **SPARSE)
    for _ in range(4):
        push(engine, *reversed(range(len(specs()))))
        assert not isinstance(engine.launching, Ticking)
        engine.drain()
    planned = fusion.plan(engine.planner.costs(engine.space.shape)).groups
    assert len(engine.record.events.buffers) == len(planned) > 1

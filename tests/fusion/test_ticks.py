"""Timer-driven fusion: what ranks agree on at ticks, and that nothing is lost, hangs or differs between them.

Covers: questions and answers on ranks whose clocks and speeds differ; buffers of a step; conservation and equality with
    planned buffers on 1, 2, 3 and 5 workers; ranks out of step; errors of one rank; abandoned and unplanned windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lab.virtual.transport import local_transports
from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.fusion.launching.ticking import Ticking, Ticks
from lightning_safusion.fusion.plans.ticking import Horovod, fuse_ready
from lightning_safusion.sparsify.selection.survey import Selector
from tests.cluster import Cluster, conserved, settings, specs
from tests.fusion.test_hard_windows import Failing
from tests.quick import slow


class Clock:
    """A clock that is moved by hand."""

    def __init__(self, start: float = 0.0) -> None:
        self.seconds = start

    def now(self) -> float:
        return self.seconds

    def pause(self, seconds: float) -> None:
        self.seconds += seconds


def pair(cycle: float = 1.0) -> tuple[list[Ticks], list[Clock]]:
    clocks = [Clock(0.25), Clock(100.5)]
    transports = local_transports(2)
    return [Ticks(each, cycle, clock.now, clock.pause) for each, clock in zip(transports, clocks, strict=True)], clocks


def test_ranks_agree_on_what_the_slower_one_has_at_its_tick() -> None:
    (fast, slow), clocks = pair()
    fast.begin()
    slow.begin()
    assert fast.poll(3) == 0  # before its first tick
    clocks[0].seconds = 1.1
    assert fast.poll(4) == 0  # asks
    clocks[1].seconds = 100.9
    assert slow.poll(1) == 0  # before its first tick
    clocks[1].seconds = 101.0
    assert slow.poll(2) == 0  # asks, and the answer comes
    assert (fast.poll(5), slow.poll(2)) == (2, 2)
    clocks[0].seconds = clocks[1].seconds = 200.0
    assert (fast.poll(6), slow.poll(2)) == (2, 2)  # the slow one has nothing new, and does not ask
    assert slow.poll(9) == 2
    assert (fast.poll(9), slow.poll(9)) == (6, 6)  # what the fast one had when it asked


def test_no_question_before_the_next_cycle() -> None:
    (alone,), clock = [Ticks(local_transports(1)[0], 1.0, (clock := Clock(0.5)).now, clock.pause)], clock
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
def test_all_ranks_hear_the_same_answers_at_any_pace(world_size: int, seed: int) -> None:
    total, cycle = 40, 1e-4
    cluster = Cluster(world_size, settings)
    clocks = [Clock(float(rank)) for rank in range(world_size)]
    tickers = [
        Ticks(each, cycle, clock.now, clock.pause) for each, clock in zip(cluster.transports, clocks, strict=True)
    ]

    def window(rank: int) -> list[int]:
        rng = np.random.default_rng([seed, rank])
        tickers[rank].begin()
        heard = []
        for ready in range(1, total + 1):
            clocks[rank].pause(float(rng.exponential(cycle)))
            heard.append(tickers[rank].poll(ready))
        heard += tickers[rank].rest(total)
        return [answer for answer in dict.fromkeys(heard) if answer]  # each once, however often it was looked at

    for _ in range(3):
        answers = cluster.each(window)
        assert all(each == answers[0] for each in answers)
        assert answers[0] == sorted(answers[0])
        assert answers[0][-1] == total
    cluster.close()


def test_tensors_fill_buffers_front_to_back() -> None:
    assert fuse_ready([4, 4, 4, 20, 1, 1], 0, 6, 8) == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert fuse_ready([4, 4, 4, 20, 1, 1], 1, 3, 8) == [(1, 3)]
    assert fuse_ready([4, 4], 0, 2, 0) == [(0, 1), (1, 2)]
    assert fuse_ready([4, 4], 1, 1, 8) == []


# --- in the engine --------------------------------------------------------------------------------------------------

SPARSE: dict[str, Any] = {"collective": "allgather"}
DENSE: dict[str, Any] = {"compressor": "none", "collective": "allreduce", "own_buffers": True}


@pytest.fixture
def make(make: Callable[..., Cluster]) -> Callable[..., Cluster]:
    def build(world_size: int, cycle_s: float = 2e-4, **options: Any) -> Cluster:
        return make(world_size, fusion=Horovod(cycle_s, 1 << 20), **options)

    return build


def hurry(cluster: Cluster, seed: int) -> None:
    """Makes every rank push at a pace of its own, which changes, and by a clock of its own."""
    for rank, engine in enumerate(cluster.engines):
        rng, clock = np.random.default_rng([seed, rank]), Clock()
        assert engine.launching.ticks is not None
        engine.launching.ticks.now, engine.launching.ticks.pause = clock.now, clock.pause

        def slow(
            index: int, grad: Any, fresh: bool = True, rng: Any = rng, clock: Clock = clock, to: Any = engine
        ) -> None:
            clock.pause(float(rng.exponential(3e-4)))
            Engine.push(to, index, grad, fresh)

        engine.push = slow  # type: ignore[method-assign] # a worker's pace is what is varied


class Seen:
    """Records the buffers of every window."""

    def __init__(self) -> None:
        self.windows: list[list[tuple[int, int]]] = []

    def observe(self, events: WindowEvents) -> None:
        self.windows.append([(each.places.start, each.places.stop) for each in events.buffers])


@pytest.mark.parametrize(("world_size", "options"), [(3, SPARSE), (2, DENSE), *slow([(5, SPARSE), (1, DENSE)])])
def test_nothing_is_lost_and_all_ranks_send_the_same_buffers(
    make: Callable[..., Cluster], world_size: int, options: dict[str, Any]
) -> None:
    cluster = make(world_size, **options)
    hurry(cluster, seed=world_size)
    seen = [Seen() for _ in cluster.engines]
    for engine, each in zip(cluster.engines, seen, strict=True):
        engine.observers.append(each)
    done, given = conserved(cluster, steps=12)
    for result, total in zip(done, given, strict=True):
        torch.testing.assert_close(result, total, rtol=0, atol=2e-5 * float(total.abs().max()) if len(total) else 0)
    assert all(each.windows == seen[0].windows for each in seen)
    assert len(seen[0].windows) == 12
    assert len(set(map(tuple, seen[0].windows[2:]))) > 1  # each step has other buffers
    assert all(len(engine.space.buffers) <= 10 for engine in cluster.engines)  # and keeps no old ones


def test_buffers_change_no_number(make: Callable[..., Cluster]) -> None:
    timed, planned = make(3, **SPARSE), Cluster(3, lambda: settings(fusion="aligned", **SPARSE))
    hurry(timed, seed=1)
    for step in range(6):
        grads = timed.random_grads(step)
        for ours, theirs in zip(timed.step(grads), planned.step(grads), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    planned.close()


def test_an_error_on_one_rank_is_raised_on_all(make: Callable[..., Cluster]) -> None:
    cluster = make(3, **SPARSE)
    for step in range(3):
        cluster.step(cluster.random_grads(step))
    hurry(cluster, seed=2)
    failing = Failing()
    failing.fail = True
    cluster.engines[1].space.selector = Selector(failing)

    def attempt(rank: int, grads: Any) -> str:
        try:
            for index in cluster.order:
                cluster.engines[rank].push(index, grads[rank][index].clone())
            cluster.engines[rank].drain()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return "none"

    grads = cluster.random_grads(4)
    errors = cluster.each(lambda rank: attempt(rank, grads))
    assert errors[1] == "no selection in step 3"
    assert all("another rank could not select" in errors[rank] for rank in (0, 2))
    # the window has ended on all ranks: the next one is in step again
    failing.fail = False
    for rank in (1, 2):
        again = cluster.step(cluster.random_grads(5))
        assert all(torch.equal(a, b) for a, b in zip(again[0], again[rank], strict=True))


def test_a_lost_rank_is_named_by_the_agreement(make: Callable[..., Cluster]) -> None:
    cluster = make(2, **SPARSE)
    for step in range(3):
        cluster.step(cluster.random_grads(step))
    ticks = cluster.engines[0].launching.ticks
    assert ticks is not None
    ticks.transport._exchange.timeout = 0.2  # type: ignore[attr-defined] # of the virtual workers
    grads = cluster.random_grads(3)[0]
    for index in cluster.order:
        cluster.engines[0].push(index, grads[index].clone())
    with pytest.raises(RuntimeError, match="rank 0: the agreement on which tensors are ready on all ranks failed"):
        cluster.engines[0].drain()


def test_an_abandoned_backward_pass_cannot_be_gone_on_from(make: Callable[..., Cluster]) -> None:
    cluster = make(1, cycle_s=0.0, **SPARSE)
    for step in range(3):
        cluster.step(cluster.random_grads(step))
    engine, grads = cluster.engines[0], cluster.random_grads(3)[0]
    for index in cluster.order[:4]:
        engine.push(index, grads[index].clone())
    with pytest.raises(RuntimeError, match="backward pass did not finish.*checkpoint.*'aligned'"):
        engine.push(cluster.order[0], grads[cluster.order[0]].clone())


def test_gradients_out_of_order_leave_when_all_have_come(make: Callable[..., Cluster]) -> None:
    cluster = make(2, cycle_s=0.0, **SPARSE)
    planned = Cluster(2, lambda: settings(fusion="aligned", **SPARSE))
    backwards = cluster.order[::-1]
    for step in range(6):
        grads, order = cluster.random_grads(step), backwards if step == 4 else None
        ours, theirs = cluster.step(grads, order=order), planned.step(grads, order=order)
        assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[0], strict=True))
    planned.close()


def test_where_nothing_may_leave_early_nothing_is_asked() -> None:
    engines = []
    for transport in local_transports(1):
        made = settings(fusion=Horovod(threshold_bytes=4000), **SPARSE)
        engines.append(
            build_engine(made, specs(), transport, torch.device("cpu"), JobTraits(measure=False, overlap=False))
        )
    (engine,) = engines
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for spec in reversed(specs()):
            engine.push(spec.index, torch.randn(spec.numel, generator=generator))
        assert not isinstance(engine.launching, Ticking)
        engine.drain()
    assert engine.record is not None
    assert (
        len(engine.record.events.buffers)
        == len(Horovod(threshold_bytes=4000).plan(engine.planner.costs(engine.space.shape)).groups)
        > 1
    )


@pytest.mark.parametrize(
    "options",
    [{"scope": "group"}, {"offload": True}, *({"collective": name} for name in ("hierarchical", "oktopk", "gtopk"))],
    ids=str,
)
def test_what_learns_from_buffers_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="fusion='horovod' has other buffers in every step"):
        settings(fusion="horovod", **options)


@pytest.mark.parametrize("options", [{"cycle_s": -1.0}, {"cycle_s": float("inf")}, {"threshold_bytes": -1}])
def test_impossible_timers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must .* got {next(iter(options.values()))}"):
        Horovod(**options)

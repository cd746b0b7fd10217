"""Selection on a thread of the host: the same numbers as in place, to the last bit, whatever goes wrong.

Covers: every sparsifier, with the thread taking all tensors it may; messages that leave when they close and one buffer
    later; which tensors it takes; the hook returns while the thread selects; bad numbers, missing gradients, gradients
    that come again; errors on the thread; abandoned windows; the end of the thread; measured costs; a CUDA device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_safusion import Segments, Selection, SIDCo, TopK
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.comm.transport.torch_backend import SoloTransport
from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.launching import offloaded
from lightning_safusion.fusion.launching.offloaded import Offloaded, selection_costs
from lightning_safusion.fusion.plans.selective import Selective, choose_offloaded
from lightning_safusion.sparsify import resolve_sparsifier
from lightning_safusion.sparsify.registry import available_sparsifiers
from lightning_safusion.sparsify.selection.survey import History, Selector
from tests.cluster import Cluster, settings, specs
from tests.cuda import fake_cuda, read_nothing
from tests.quick import slow

SHAPES = ((90, 70), (90,), (70, 40), (40,), (7, 11), (64, 9, 3), (64,), (30, 30), (9,), (1,), (0,))
FREE = LinearCost(0.0, 0.0)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    # a thread that costs nothing takes everything
    monkeypatch.setattr(offloaded, "NOMINAL_HOST", FREE)
    made: list[Cluster] = []

    def build(world_size: int, late: bool = False, deferred: bool = False, **options: Any) -> Cluster:
        options = {"fusion": "aligned", "collective": "allgather", "offload": True} | options
        made.append(Cluster(world_size, lambda: settings(**options), specs(SHAPES, dense=(3,)), deferred=deferred))
        for engine in made[-1].engines:
            if isinstance(engine.launching, Offloaded):
                engine.launching.late_by_one = late
        return made[-1]

    yield build
    for cluster in made:
        for engine in cluster.engines:
            engine.release()
        cluster.close()


def offloader(cluster: Cluster, rank: int = 0) -> Offloaded:
    found = cluster.engines[rank].launching
    assert isinstance(found, Offloaded)
    return found


def assert_same(ours: Cluster, theirs: Cluster, steps: int = 5) -> None:
    """The same means and residuals, to the last bit, in ordinary and in odd windows."""
    for step in range(steps):
        grads = ours.random_grads(step)
        fresh = [[True] * len(SHAPES) for _ in grads]
        if step == 3:
            fresh[0][2] = fresh[-1][5] = False
            for flags in fresh:
                flags[7] = False
        if step == 4:
            grads[-1][0][7] = float("inf")
            grads[0][2][0] = float("nan")
        for a, b in zip(ours.step(grads, fresh), theirs.step(grads, fresh), strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
        for rank in range(len(grads)):
            assert all(torch.equal(ours.residual(rank, i), theirs.residual(rank, i)) for i in range(len(SHAPES)))


_QUICK = [("topk", False), ("gaussiank", True), ("oktopk", True), ("randomk", False)]
_ALL = [(name, i % 2 == 0) for i, name in enumerate(available_sparsifiers()) if name != "none"]


@pytest.mark.parametrize(("compressor", "late"), [*_QUICK, *slow(each for each in _ALL if each not in _QUICK)])
def test_numbers_are_those_of_selection_in_place(make: Callable[..., Cluster], compressor: str, late: bool) -> None:
    ours = make(2, late, compressor=compressor)
    assert_same(ours, make(2, compressor=compressor, offload=False))
    assert offloader(ours)._thread is not None


_PARTS: list[dict[str, Any]] = [
    {"fusion": Selective(2), "collective": "hybrid"},
    {"fusion": "wfbp", "collective": "auto"},
    {"fusion": "single", "memory": "dgc"},
    {"fusion": "aligned", "memory": "none", "wire": "bf16"},
]


@pytest.mark.parametrize(
    ("options", "late", "world_size"),
    [
        (_PARTS[0], True, 3),
        (_PARTS[2], False, 3),
        *slow([(_PARTS[0], False, 1), (_PARTS[1], True, 5), (_PARTS[2], True, 2), (_PARTS[3], False, 5)]),
    ],
    ids=str,
)
def test_so_they_are_in_every_combination(
    make: Callable[..., Cluster], options: dict[str, Any], late: bool, world_size: int
) -> None:
    assert_same(make(world_size, late, **options), make(world_size, **options, offload=False))


@pytest.mark.parametrize("late", [False, True])
def test_so_they_are_where_the_device_decides(make: Callable[..., Cluster], late: bool) -> None:
    ours, theirs = make(3, late, deferred=True), make(3, offload=False)
    for step in range(5):
        for a, b in zip(ours.step(ours.random_grads(step)), theirs.step(theirs.random_grads(step)), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_state_of_a_sparsifier_is_that_of_selection_in_place(make: Callable[..., Cluster]) -> None:
    compressor = SIDCo(adapt=True, adapt_every=2)
    ours, theirs = make(2, compressor=compressor), make(2, compressor=compressor, offload=False)
    for step in range(7):
        ours.step(ours.random_grads(step))
        theirs.step(theirs.random_grads(step))
    a, b = (cluster.engines[0].space.selector.sparsifier.state_dict() for cluster in (ours, theirs))
    rows = [dict(zip(state["keys"], state["stages"].tolist(), strict=True)) for state in (a, b)]
    assert len({tuple(row) for row in rows[0].values()}) > 1
    assert rows[0] == rows[1]


@pytest.mark.parametrize("cost", [FREE, LinearCost(0.0, 1e-9), LinearCost(1.0, 0.0)])
def test_it_takes_what_the_rule_says(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, cost: LinearCost
) -> None:
    monkeypatch.setattr(offloaded, "NOMINAL_HOST", cost)
    cluster = make(1, fusion="single")
    for step in range(3):
        cluster.step(cluster.random_grads(step))
    engine = cluster.engines[0]
    layout = engine.space.layout
    numels = [spec.numel for spec in layout.specs]
    sparse = [spec.index != 3 and spec.numel > 1 for spec in layout.specs]
    seconds = [cost(4 * n) for n in numels]
    ready = engine.planner.costs(engine.space.shape).ready
    expected = choose_offloaded(ready, sparse, seconds, seconds)
    assert [place in offloader(cluster)._groups for place in range(len(layout))] == expected
    # some of them, unless the thread costs nothing
    assert sum(expected) == sum(sparse) if cost is FREE else 0 < sum(expected) < sum(sparse)


class Gated(TopK):
    """On a thread of its own it waits for a signal; raises if told to."""

    name = "gated"

    def __init__(self) -> None:
        self.gate: Any = None
        self.fails = False

    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:
        if threading.current_thread().name.startswith("safusion-select"):
            if self.gate is not None:
                assert self.gate.wait(20)
            if self.fails:
                raise ArithmeticError("cannot select")
        return super().select(x, segments, step)


def gated(cluster: Cluster, rank: int) -> Gated:
    found = cluster.engines[rank].space.selector.sparsifier
    assert isinstance(found, Gated)
    return found


@pytest.mark.parametrize("late", [False, True])
def test_the_hook_returns_while_the_thread_selects(make: Callable[..., Cluster], late: bool) -> None:
    cluster, plain = make(1, late, compressor=Gated(), fusion="aligned"), make(1, offload=False)
    for step in range(3):
        cluster.step(cluster.random_grads(step))
        plain.step(plain.random_grads(step))
    grads = cluster.random_grads(3)[0]
    engine, gate = cluster.engines[0], threading.Event()
    gated(cluster, 0).gate = gate
    plan = engine.planner.current
    assert plan is not None
    first = plan.groups[0].stop
    for index in cluster.order[: first - 1]:  # returns, although nothing has been selected
        engine.push(index, grads[index])
    if late:
        engine.push(cluster.order[first - 1], grads[cluster.order[first - 1]])
        assert engine._window is not None
        assert not engine._window.shipments
    assert offloader(cluster)._selections
    gate.set()
    for index in cluster.order[first - (not late) :]:
        engine.push(index, grads[index])
    engine.drain()
    expected = plain.step(plain.random_grads(3))[0]
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize(("options", "late"), [({}, True), (_PARTS[0], False)], ids=str)
def test_an_error_on_the_thread_is_raised_on_all_ranks(
    make: Callable[..., Cluster], options: dict[str, Any], late: bool
) -> None:
    cluster = make(3, late, compressor=Gated(), **options)
    for step in range(3):
        cluster.step(cluster.random_grads(step))
    gated(cluster, 1).fails = True
    grads = cluster.random_grads(3)
    held = [[cluster.residual(rank, i).clone() for i in range(len(SHAPES))] for rank in range(3)]

    def run(rank: int) -> str:
        engine = cluster.engines[rank]
        for index in cluster.order:
            engine.push(index, grads[rank][index].clone())
        with pytest.raises((ArithmeticError, RuntimeError)) as caught:
            engine.drain()
        return str(caught.value)

    told = cluster.each(run)
    assert told[1] == "cannot select"
    assert "another rank could not select" in told[0]
    assert "another rank could not select" in told[2]
    for rank in (0, 2):  # the gradients of that step are still there
        for i in range(len(SHAPES)):
            torch.testing.assert_close(cluster.residual(rank, i), held[rank][i] + grads[rank][i])
    gated(cluster, 1).fails = False
    cluster.each(lambda rank: cluster.engines[rank].reset())
    means = cluster.step(cluster.random_grads(4))
    assert all(torch.equal(a, b) for mean in means for a, b in zip(means[0], mean, strict=True))


def test_a_window_that_never_completes_is_forgotten(make: Callable[..., Cluster]) -> None:
    cluster = make(1, fusion="single")
    for step in range(3):
        cluster.step(cluster.random_grads(step))
    before = [cluster.residual(0, i).clone() for i in range(len(SHAPES))]
    grads = cluster.random_grads(3)[0]
    for index in cluster.order[:5]:
        cluster.engines[0].push(index, grads[index].clone())
    assert offloader(cluster)._selections
    cluster.engines[0].reset()
    assert not offloader(cluster)._selections
    for place, index in enumerate(cluster.order):
        numel = cluster.specs[index].numel
        taken = place < 5 and numel > 1 and index != 3
        expected = before[index] + grads[index] if taken else before[index]
        torch.testing.assert_close(cluster.residual(0, index), expected)
    cluster.step(cluster.random_grads(4))


def test_a_gradient_that_comes_again_is_not_taken(make: Callable[..., Cluster]) -> None:
    ours, theirs = make(2), make(2, offload=False)
    for cluster in (ours, theirs):
        for engine in cluster.engines:
            engine.steps.tracked[:] = True
    for step in range(5):
        means = [cluster.step(cluster.random_grads(step)) for cluster in (ours, theirs)]
        assert all(torch.equal(a, b) for a, b in zip(means[0][0], means[1][0], strict=True))
        for cluster in (ours, theirs):
            for engine in cluster.engines:
                engine.steps.unstepped[[1, 4] if step == 2 else slice(None)] = False


def test_the_hook_never_waits_for_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    read_nothing(monkeypatch)  # nor do the numbers exist that the thread would select from
    monkeypatch.setattr(offloaded, "NOMINAL_HOST", FREE)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    in_place, on_host = Selector.select, []

    def select(self: Selector, x: Tensor, history: History, step: int, *known: Any, **more: Any) -> Selection:
        if x.device.type == "cuda":
            return in_place(self, x, history, step, *known, **more)
        on_host.append(threading.current_thread().name)
        count = history.segments.capacity
        return Selection(torch.arange(count), torch.zeros(count), count)

    monkeypatch.setattr(Selector, "select", select)
    with fake_cuda(monkeypatch) as device:
        chosen = settings(collective="hybrid", fusion=Selective(3), offload=True)
        tensors = specs(SHAPES, dense=(3,))
        engine = build_engine(chosen, tensors, SoloTransport(), device, JobTraits(measure=False, deferred=True))
        for _ in range(4):
            for spec in reversed(tensors):
                engine.push(spec.index, torch.zeros(spec.numel, device=device))
            engine.drain()
        engine.release()
    assert len(on_host) > 4
    assert all(name.startswith("safusion-select") for name in on_host)


def test_the_thread_ends_with_the_job(make: Callable[..., Cluster]) -> None:
    cluster = make(1)
    before = set(threading.enumerate())
    for step in range(3):
        cluster.step(cluster.random_grads(step))
    begun = [t for t in threading.enumerate() if t not in before and t.name.startswith("safusion-select")]
    assert len(begun) == 1
    cluster.engines[0].release()
    assert not begun[0].is_alive()
    cluster.step(cluster.random_grads(3))  # another begins
    assert offloader(cluster)._thread is not None


def test_costs_are_measured_or_nominal(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert selection_costs(TopK(), cpu, False) == (offloaded.NOMINAL_HOST, offloaded.NOMINAL_HOST)
    moments = iter([0.0, 3.0, 10.0, 12.0, 20.0, 23.0, 30.0, 40.0, 50.0, 58.0, 60.0, 69.0])
    monkeypatch.setattr(offloaded.time, "perf_counter", lambda: next(moments))
    device, host = selection_costs(resolve_sparsifier("topk"), cpu, True)
    assert device == host
    assert (host(4 << 12), host(4 << 20)) == (pytest.approx(2.0), pytest.approx(8.0))  # the best of three each


def test_what_cannot_be_selected_tensor_by_tensor_is_refused() -> None:
    for options in ({"scope": "group"}, {"quota": "pooled"}, {"fusion": "naive"}):
        with pytest.raises(ValueError, match="offload=True selects from each tensor alone"):
            settings(offload=True, **options)

"""Selection on a thread of the host: the same numbers as in place, to the last bit, whatever goes wrong."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_safusion import Segments, Selection, SIDCo, TopK
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion.launching import offloaded
from lightning_safusion.fusion.launching.offloaded import Offloaded, selection_costs
from lightning_safusion.fusion.plans.selective import Selective, choose_offloaded
from lightning_safusion.sparsify import resolve_sparsifier
from lightning_safusion.sparsify.registry import available_sparsifiers
from lightning_safusion.sparsify.selection.survey import History, Selector
from tests.cluster import Cluster, specs
from tests.fusion.windows import Make, attempt, engine_on, flat, random_window, train, windows
from tests.models import equal
from tests.quick import slow

SHAPES = ((90, 70), (90,), (70, 40), (40,), (7, 11), (64, 9, 3), (64,), (30, 30), (9,), (1,), (0,))
FREE = LinearCost(0.0, 0.0)
TENSORS = specs(SHAPES, dense=(3,))


@pytest.fixture
def make(make: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(offloaded, "NOMINAL_HOST", FREE)  # a thread that costs nothing takes everything

    def build(world_size: int, late: bool = False, **options: Any) -> Cluster:
        options = {"fusion": "aligned", "collective": "allgather", "offload": True} | options
        cluster = make(world_size, TENSORS, **options)
        for engine in cluster.engines:
            engine.launching.late_by_one = late
        return cluster

    return build


def offloader(cluster: Cluster, rank: int = 0) -> Offloaded:
    return cluster.engines[rank].launching


_PARTS: list[dict[str, Any]] = [
    {"fusion": Selective(2), "collective": "hybrid"},
    {"fusion": "wfbp", "collective": "auto"},
    {"fusion": "single", "memory": "dgc"},
    {"fusion": "aligned", "memory": "none", "wire": "bf16"},
]
_QUICK = [("topk", False), ("gaussiank", True), ("oktopk", True), ("randomk", False)]
_ALL = [(name, i % 2 == 0) for i, name in enumerate(available_sparsifiers()) if name != "none"]


@pytest.mark.parametrize(
    ("options", "late", "world_size"),
    [
        *(({"compressor": name}, late, 2) for name, late in _QUICK),
        (_PARTS[0], True, 3),
        (_PARTS[2], False, 3),
        *(({"deferred": True}, late, 3) for late in (False, True)),
        *slow(({"compressor": name}, late, 2) for name, late in _ALL if (name, late) not in _QUICK),
        *slow([(_PARTS[0], False, 1), (_PARTS[1], True, 5), (_PARTS[2], True, 2), (_PARTS[3], False, 5)]),
    ],
    ids=str,
)
def test_numbers_are_those_of_selection_in_place(
    make: Make, options: dict[str, Any], late: bool, world_size: int
) -> None:
    """Means and residuals, to the last bit, in ordinary and in odd windows; a device knows no odd ones."""
    ours = make(world_size, late, **options)
    theirs = make(world_size, **(options | {"offload": False, "deferred": False}))
    for step in range(3 if "deferred" in options else 5):
        grads = ours.random_grads(step)
        fresh = [[True] * len(SHAPES) for _ in grads]
        if step == 3:
            fresh[0][2] = fresh[-1][5] = False
            for flags in fresh:
                flags[7] = False
        if step == 4:
            grads[-1][0][7] = float("inf")
            grads[0][2][0] = float("nan")
        means = [cluster.step(grads, fresh) for cluster in (ours, theirs)]
        torch.testing.assert_close(*means, rtol=0, atol=0, equal_nan=True)
        assert equal(ours.residuals(), theirs.residuals())
    assert offloader(ours)._thread is not None


def test_the_state_of_a_sparsifier_is_that_of_selection_in_place(make: Make) -> None:
    compressor = SIDCo(adapt=True, adapt_every=2)
    ours, theirs = make(2, compressor=compressor), make(2, compressor=compressor, offload=False)
    for cluster in (ours, theirs):
        train(cluster, 7)
    a, b = (cluster.engines[0].space.selector.sparsifier.state_dict() for cluster in (ours, theirs))
    rows = [dict(zip(state["keys"], state["stages"].tolist(), strict=True)) for state in (a, b)]
    assert len({tuple(row) for row in rows[0].values()}) > 1
    assert rows[0] == rows[1]


@pytest.mark.parametrize("cost", [FREE, LinearCost(0.0, 1e-9), LinearCost(1.0, 0.0)])
def test_it_takes_what_the_rule_says(make: Make, monkeypatch: pytest.MonkeyPatch, cost: LinearCost) -> None:
    monkeypatch.setattr(offloaded, "NOMINAL_HOST", cost)
    cluster = make(1, fusion="single")
    train(cluster, 3)
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
    return cluster.engines[rank].space.selector.sparsifier


@pytest.mark.parametrize("late", [False, True])
def test_the_hook_returns_while_the_thread_selects(make: Make, late: bool) -> None:
    cluster, plain = make(1, late, compressor=Gated(), fusion="aligned"), make(1, offload=False)
    train(cluster, 3)
    train(plain, 3)
    grads = cluster.random_grads(3)[0]
    engine, gate = cluster.engines[0], threading.Event()
    gated(cluster, 0).gate = gate
    first = engine.planner.current.groups[0].stop
    for index in cluster.order[: first - 1]:  # returns, although nothing has been selected
        engine.push(index, grads[index])
    if late:
        engine.push(cluster.order[first - 1], grads[cluster.order[first - 1]])
        assert not engine._window.shipments
    assert offloader(cluster)._selections
    gate.set()
    for index in cluster.order[first - (not late) :]:
        engine.push(index, grads[index])
    engine.drain()
    assert equal(grads, random_window(plain, 3)[0])


@pytest.mark.parametrize(("options", "late"), [({}, True), (_PARTS[0], False)], ids=str)
def test_an_error_on_the_thread_is_raised_on_all_ranks(make: Make, options: dict[str, Any], late: bool) -> None:
    cluster = make(3, late, compressor=Gated(), **options)
    train(cluster, 3)
    gated(cluster, 1).fails = True
    grads, held = cluster.random_grads(3), cluster.residuals()
    told = attempt(cluster, grads)
    assert told[1] == "cannot select"
    assert "another rank could not select" in told[0]
    assert told[2] == told[0]
    after, before = (flat(residuals).view(3, -1) for residuals in (cluster.residuals(), held))
    for rank in (0, 2):  # the gradients of that step are still there
        torch.testing.assert_close(after[rank], before[rank] + flat(grads[rank]))
    gated(cluster, 1).fails = False
    cluster.each(lambda rank: cluster.engines[rank].reset())
    first, *others = random_window(cluster, 4)
    assert all(equal(first, mean) for mean in others)


def test_a_window_that_never_completes_is_forgotten(make: Make) -> None:
    cluster = make(1, fusion="single")
    train(cluster, 3)
    before, grads = cluster.residuals(), cluster.random_grads(3)[0]
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
    random_window(cluster, 4)


def test_a_gradient_that_comes_again_is_not_taken(make: Make) -> None:
    ours, theirs = make(2), make(2, offload=False)
    for cluster in (ours, theirs):
        for engine in cluster.engines:
            engine.steps.tracked[:] = True
    for step in range(5):
        assert equal(random_window(ours, step), random_window(theirs, step))
        for cluster in (ours, theirs):
            for engine in cluster.engines:
                engine.steps.unstepped[[1, 4] if step == 2 else slice(None)] = False


def test_the_hook_never_waits_for_a_cuda_device(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(offloaded, "NOMINAL_HOST", FREE)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    in_place, on_host = Selector.select, []

    def select(self: Selector, x: Tensor, history: History, step: int, *known: Any, **more: Any) -> Selection:
        if x.device.type == "cuda":
            return in_place(self, x, history, step, *known, **more)
        on_host.append(threading.current_thread().name)  # it has no numbers to select from
        count = history.segments.capacity
        return Selection(torch.arange(count), torch.zeros(count), count)

    monkeypatch.setattr(Selector, "select", select)
    engine = engine_on(device, tensors=TENSORS, collective="hybrid", fusion=Selective(3), offload=True)
    windows(engine)
    engine.release()
    assert len(on_host) > 4
    assert all(name.startswith("safusion-select") for name in on_host)


def test_the_thread_ends_with_the_job(make: Make) -> None:
    cluster = make(1)
    before = set(threading.enumerate())
    train(cluster, 3)
    begun = [t for t in threading.enumerate() if t not in before and t.name.startswith("safusion-select")]
    assert len(begun) == 1
    cluster.engines[0].release()
    assert not begun[0].is_alive()
    random_window(cluster, 3)  # another begins
    assert offloader(cluster)._thread is not None


def test_costs_are_measured_or_nominal(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert selection_costs(TopK(), cpu, False) == (offloaded.NOMINAL_HOST, offloaded.NOMINAL_HOST)
    moments = iter([0.0, 3.0, 10.0, 12.0, 20.0, 23.0, 30.0, 40.0, 50.0, 58.0, 60.0, 69.0])
    monkeypatch.setattr(offloaded.time, "perf_counter", lambda: next(moments))
    device, host = selection_costs(resolve_sparsifier("topk"), cpu, True)
    assert device == host
    assert (host(4 << 12), host(4 << 20)) == (pytest.approx(2.0), pytest.approx(8.0))  # the best of three each

"""Gradients that are finite but huge: the windows in which they overflow are lost, later ones are not."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_safusion.sparsify import available_sparsifiers
from lightning_safusion.sparsify.memory.residual import ResidualMemory
from tests.cluster import Cluster, specs
from tests.fusion import windows
from tests.fusion.windows import Make, finite
from tests.models import equal
from tests.quick import slow

HUGE = 6  # the tensor t6
SHAPES = ((40, 30), (40,), (1,), (0,), (64,), (7, 11), (100, 70), (3,))


@pytest.fixture
def make(make: Make) -> Make:
    return partial(make, tensors=specs(SHAPES), collective="allgather")


def with_huge(cluster: Cluster, seed: int, values: dict[int, float]) -> list[list[Tensor]]:
    """Gradients of all ranks; on some of them the first elements of one tensor are huge."""
    grads = cluster.random_grads(seed)
    for rank, value in values.items():
        grads[rank][HUGE][:600] = value
    return grads


def train(cluster: Cluster, bad: list[dict[int, float]]) -> list[bool]:
    """Windows before the bad ones, these, and some behind them: whether each of the latter was finite."""
    for step in range(3):
        assert finite(windows.random_window(cluster, step))
    outcomes = [finite(cluster.step(with_huge(cluster, 10 + step, values))) for step, values in enumerate(bad)]
    assert not all(outcomes), "nothing has overflowed"
    later = []
    for step in range(4):
        first, *others = windows.random_window(cluster, 20 + step)
        later.append(finite(first))
        assert all(equal(first, other) for other in others)
    for engine in cluster.engines:
        engine.settle()
    assert finite(cluster.residuals())
    return later


ADDED = [{0: 2e38}, {0: 2e38}, {0: 2e38}]  # the residual overflows
ONCE = [{0: 3.4e38}]  # the scale of a few bits does
TURNED = [{0: 3e38}, {0: 3e38}, {0: 3e38}, {0: -3.4e38}, {0: -3.4e38}]  # the difference from an average does
SUMMED = [{0: 3e38, 1: 3e38}]  # the sum over workers does


NODES: dict[str, Any] = {"world_size": 4, "nodes": [0, 0, 1, 1]}
Case = tuple[dict[str, Any], list[dict[int, float]], bool]
CASES: list[Case] = [
    ({"compressor": "topk", "wire": "q4"}, ADDED, False),
    ({"compressor": "gaussiank"}, ADDED, True),
    ({"wire": "q4"}, ONCE, True),
    ({"wire": "bitmap-q4"}, ONCE, False),
    ({"memory": "ef21"}, TURNED, True),
    ({"collective": "oktopk"}, SUMMED, False),
    ({"collective": "hierarchical-sharded"} | NODES, SUMMED, True),
    ({"fusion": "naive"}, ADDED, False),
]
MORE: list[Case] = [
    *(({"compressor": name}, ADDED, i % 2 == 0) for i, name in enumerate(available_sparsifiers()) if name != "none"),
    ({"wire": "q2"}, ONCE, True),
    ({"wire": "sign"}, ONCE, False),
    ({"memory": "ef21"}, TURNED, False),
    ({"memory": "auto"}, ADDED, True),
    ({"scope": "group"}, ADDED, False),
    ({"fusion": "adaptive", "collective": "auto", "density": 0.01}, ADDED, True),
    ({"collective": "hybrid", "wire": "q4"}, ONCE, False),
    ({"collective": "gtopk"}, SUMMED, True),
    ({"collective": "hierarchical"} | NODES, SUMMED, False),
    ({"collective": "hierarchical-sharded", "world_size": 4, "nodes": [0, 1, 0, 1], "wire": "q4"}, SUMMED, False),
]


@pytest.mark.parametrize(("options", "bad", "deferred"), [*CASES, *slow(MORE)])
@pytest.mark.filterwarnings("ignore:rank . gradients of t6")
def test_later_windows_commit_again(
    make: Make, options: dict[str, Any], bad: list[dict[int, float]], deferred: bool
) -> None:
    assert all(train(make(deferred=deferred, **options), bad))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.filterwarnings("ignore:rank . gradients of t6")
def test_a_momentum_may_overflow_once_more(make: Make, deferred: bool) -> None:
    assert all(train(make(deferred=deferred, memory="dgc"), ADDED)[1:])


@pytest.mark.parametrize("deferred", [False, True])
def test_it_is_named_once_on_the_rank_that_has_it(make: Make, deferred: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(make(deferred=deferred), [*ADDED, *ADDED])
    (said,) = [str(each.message) for each in caught if "overflowed" in str(each.message)]
    assert said.startswith("rank 0: gradients of t6 were so large")


def test_only_what_overflowed_is_reset(make: Make) -> None:
    cluster = make()
    windows.random_window(cluster, 0)
    for engine in cluster.engines:
        engine.steps.tracked[:] = True  # and no optimizer steps
    held = cluster.residuals()[: len(SHAPES)]
    grads = with_huge(cluster, 1, {0: 3e38})
    layout = cluster.engines[0].space.layout
    start = int(layout.edges[layout.places[HUGE]])
    cluster.settings[0].memory.add(start, start + 600, torch.full((600,), 2e38))
    assert not finite(cluster.step(grads))
    with pytest.warns(UserWarning, match=r"rank 0: gradients of t6 were so large"):
        cluster.each(lambda rank: cluster.engines[rank].settle())
    held[HUGE][:600] = grads[0][HUGE][:600] = 0
    for index, (before, grad) in enumerate(zip(held, grads[0], strict=True)):
        torch.testing.assert_close(cluster.residual(0, index), before + grad.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("deferred", [False, True])
def test_ordinary_windows_do_not_look_for_it(make: Make, monkeypatch: pytest.MonkeyPatch, deferred: bool) -> None:
    def look(*_: Any) -> None:
        raise AssertionError("an ordinary window looked through the memory")

    cluster = make(deferred=deferred)
    monkeypatch.setattr(ResidualMemory, "beyond", look)
    for step in range(4):
        assert finite(windows.random_window(cluster, step))

"""Gradients that are finite but huge: the windows in which they overflow are lost, later ones are not.

Covers: a residual that overflows, a scale of a few bits that does, and sums over workers that do; every compressor,
    memory and collective; the end of a window on the host and on the device; one warning with the tensor's name;
    replicas bitwise equal; the rest of the residual as it was; ordinary windows do not look at the memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_safusion.sparsify import available_sparsifiers
from lightning_safusion.sparsify.memory.residual import ResidualMemory
from tests.cluster import Cluster, specs
from tests.quick import slow

HUGE = 6  # the tensor t6
SHAPES = ((40, 30), (40,), (1,), (0,), (64,), (7, 11), (100, 70), (3,))


@pytest.fixture
def make(make: Callable[..., Cluster]) -> Callable[..., Cluster]:
    return partial(make, tensors=specs(SHAPES), collective="allgather")


def finite(means: list[list[Tensor]]) -> bool:
    return all(bool(torch.isfinite(mean).all()) for mine in means for mean in mine)


def with_huge(cluster: Cluster, seed: int, values: dict[int, float], elements: int = 600) -> list[list[Tensor]]:
    """Gradients of all ranks; on some of them the first elements of one tensor are huge."""
    grads = cluster.random_grads(seed)
    for rank, value in values.items():
        grads[rank][HUGE][:elements] = value
    return grads


def train(cluster: Cluster, bad: list[dict[int, float]], after: int = 4) -> list[bool]:
    """Windows before the bad ones, these, and some behind them: whether each of the latter was finite."""
    for step in range(3):
        assert finite(cluster.step(cluster.random_grads(step)))
    outcomes = [finite(cluster.step(with_huge(cluster, 10 + step, values))) for step, values in enumerate(bad)]
    assert not all(outcomes), "nothing has overflowed"
    later = []
    for step in range(after):
        means = cluster.step(cluster.random_grads(20 + step))
        later.append(finite(means))
        for mine in means[1:]:
            assert all(torch.equal(a, b) for a, b in zip(mine, means[0], strict=True))
    for engine in cluster.engines:
        engine.settle()
    for rank in range(len(cluster.transports)):
        assert all(bool(torch.isfinite(cluster.residual(rank, i)).all()) for i in range(len(cluster.specs)))
    return later


ADDED = [{0: 2e38}, {0: 2e38}, {0: 2e38}]  # the residual overflows
ONCE = [{0: 3.4e38}]  # the scale of a few bits does
TURNED = [{0: 3e38}, {0: 3e38}, {0: 3e38}, {0: -3.4e38}, {0: -3.4e38}]  # the difference from an average does
SUMMED = [{0: 3e38, 1: 3e38}]  # the sum over workers does


NODES: dict[str, Any] = {"world_size": 4, "nodes": [0, 0, 1, 1]}
CASES: list[tuple[dict[str, Any], list[dict[int, float]], bool]] = [
    ({"compressor": "topk", "wire": "q4"}, ADDED, False),
    ({"compressor": "gaussiank"}, ADDED, True),
    ({"wire": "q4"}, ONCE, True),
    ({"wire": "bitmap-q4"}, ONCE, False),
    ({"memory": "ef21"}, TURNED, True),
    ({"collective": "oktopk"}, SUMMED, False),
    ({"collective": "hierarchical-sharded"} | NODES, SUMMED, True),
    ({"fusion": "naive"}, ADDED, False),
]
MORE: list[tuple[dict[str, Any], list[dict[int, float]], bool]] = [
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
    make: Callable[..., Cluster], options: dict[str, Any], bad: list[dict[int, float]], deferred: bool
) -> None:
    assert all(train(make(deferred=deferred, **options), bad))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.filterwarnings("ignore:rank . gradients of t6")
def test_a_momentum_may_overflow_once_more(make: Callable[..., Cluster], deferred: bool) -> None:
    assert all(train(make(deferred=deferred, memory="dgc"), ADDED)[1:])


@pytest.mark.parametrize("deferred", [False, True])
def test_it_is_named_once_on_the_rank_that_has_it(make: Callable[..., Cluster], deferred: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(make(deferred=deferred), [*ADDED, *ADDED])
    (said,) = [str(each.message) for each in caught if "overflowed" in str(each.message)]
    assert said.startswith("rank 0: gradients of t6 were so large")


def test_only_what_overflowed_is_reset(make: Callable[..., Cluster]) -> None:
    cluster = make()
    cluster.step(cluster.random_grads(0))
    for engine in cluster.engines:
        engine.steps.tracked[:] = True  # and no optimizer steps
    held = [cluster.residual(0, i).clone() for i in range(len(cluster.specs))]
    grads = with_huge(cluster, 1, {0: 3e38})
    layout = cluster.engines[0].space.layout
    start = int(layout.edges[layout.places[HUGE]])
    cluster.settings[0].memory.add(start, start + 600, torch.full((600,), 2e38))
    assert not finite(cluster.step(grads))
    with pytest.warns(UserWarning, match=r"rank 0: gradients of t6 were so large"):
        cluster.each(lambda rank: cluster.engines[rank].settle())
    for i, (before, grad) in enumerate(zip(held, grads[0], strict=True)):
        expected = before + grad.double()
        if i == HUGE:
            expected[:600] = 0
        torch.testing.assert_close(cluster.residual(0, i), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("deferred", [False, True])
def test_ordinary_windows_do_not_look_for_it(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    def look(*_: Any) -> None:
        raise AssertionError("an ordinary window looked through the memory")

    cluster = make(deferred=deferred)
    monkeypatch.setattr(ResidualMemory, "beyond", look)
    for step in range(4):
        assert finite(cluster.step(cluster.random_grads(step)))

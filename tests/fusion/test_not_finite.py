"""Windows with gradients that are not finite: each tensor goes by what its optimizer did."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cluster import Cluster
from tests.fusion.windows import Make, finite, train

BAD = 3  # the tensor t3
STEPPED, SKIPPED = (0, 6), (1, 7)  # of an optimizer that steps all the same; of one that does not


@pytest.fixture
def make(make: Make) -> Make:
    def build(**options: Any) -> Cluster:
        cluster = make(**({"collective": "allgather", "wire": "fp32"} | options))
        train(cluster, 2)
        for engine in cluster.engines:
            engine.settle()
            engine.steps.tracked[:] = True
        return cluster

    return build


def by_rank(cluster: Cluster) -> list[list[Tensor]]:
    """What each rank holds back."""
    number, residuals = len(cluster.specs), cluster.residuals()
    return [residuals[:number], residuals[number:]]


def window(cluster: Cluster, seed: int, elements: slice = slice(2, 3)) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """One that is not finite on the first rank, after which some optimizers step: gradients and means."""
    grads = cluster.random_grads(seed)
    grads[0][BAD][elements] = float("nan")
    means = cluster.step(grads)
    for engine in cluster.engines:
        engine.steps.unstepped[list(STEPPED)] = False
        engine.settle()
        assert not engine.steps.unstepped.any()  # the next gradients are not taken for thrown away
    return grads, means


@pytest.mark.filterwarnings("ignore:gradients of t3 were not finite")
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"collective": "sharded"}, {"density": 1.0, "collective": "allreduce"}, {"scope": "group"}]
)
def test_what_was_sent_leaves_the_residual_where_an_optimizer_has_stepped(
    make: Make, options: dict[str, Any], deferred: bool
) -> None:
    cluster = make(deferred=deferred, **options)
    before = by_rank(cluster)
    grads, means = window(cluster, 5)
    after = by_rank(cluster)
    for index in range(len(cluster.specs)):
        if index == BAD:
            continue
        given = sum(before[rank][index] + grads[rank][index].double() for rank in range(2))
        left = sum(after[rank][index] for rank in range(2))
        used = 2 * means[0][index].double() if index in STEPPED else 0.0
        torch.testing.assert_close(left + used, given, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:gradients of t3 were not finite")
@pytest.mark.parametrize("options", [{}, {"collective": "sharded"}, {"memory": "decoupled"}])
def test_later_gradients_of_steps_that_were_not_made_leave_the_residual(make: Make, options: dict[str, Any]) -> None:
    cluster = make(**options)
    window(cluster, 5)
    before = by_rank(cluster)
    window(cluster, 6)
    after = by_rank(cluster)
    for rank in range(2):
        for index in SKIPPED:
            torch.testing.assert_close(after[rank][index], before[rank][index], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:gradients of t3 were not finite")
@pytest.mark.parametrize("deferred", [False, True])
def test_later_tensors_are_averaged_element_by_element(make: Make, deferred: bool) -> None:
    cluster = make(deferred=deferred)
    _, means = window(cluster, 5)
    assert not finite(means[1][BAD])
    before = by_rank(cluster)
    grads, means = window(cluster, 6)
    expected = (grads[0][BAD] + grads[1][BAD]) / 2
    for rank in range(2):
        torch.testing.assert_close(means[rank][BAD], expected, equal_nan=True)
        torch.testing.assert_close(cluster.residual(rank, BAD), before[rank][BAD], rtol=1e-4, atol=1e-4)


def test_it_is_said_once_which_tensors_were_not_finite(make: Make) -> None:
    cluster = make()
    with pytest.warns(UserWarning, match="gradients of t3 were not finite in step 2"):
        window(cluster, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        window(cluster, 6)


def test_where_nobody_knows_it_is_taken_that_an_optimizer_steps(make: Make) -> None:
    cluster = make(density=1.0)
    for engine in cluster.engines:
        engine.steps.tracked[:] = False
    with pytest.warns(UserWarning, match="were not finite"):
        window(cluster, 5)
    assert not any(tensor.any() for own in by_rank(cluster) for i, tensor in enumerate(own) if i != BAD)

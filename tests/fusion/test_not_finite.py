"""Windows with gradients that are not finite: each tensor goes by what its optimizer did."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cluster import Cluster
from tests.fusion.windows import Make, finite, train

BAD = 3  # the tensor t3
OTHERS = (0, 1, 2, 4, 5, 6, 7, 8, 9)
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


def held(cluster: Cluster, tensors: Iterable[int]) -> list[Tensor]:
    """What the ranks hold back of some tensors, by tensor and rank."""
    return [cluster.residual(rank, index).clone() for index in tensors for rank in range(2)]


def window(cluster: Cluster, seed: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """One that is not finite on the first rank, after which some optimizers step: gradients and means."""
    grads = cluster.random_grads(seed)
    grads[0][BAD][2] = float("nan")
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
    before = held(cluster, OTHERS)
    grads, means = window(cluster, 5)
    after = held(cluster, OTHERS)
    for place, index in enumerate(OTHERS):
        given = sum(before[2 * place + rank] + grads[rank][index].double() for rank in range(2))
        used = 2 * means[0][index].double() if index in STEPPED else 0.0
        torch.testing.assert_close(sum(after[2 * place : 2 * place + 2]) + used, given, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:gradients of t3 were not finite")
@pytest.mark.parametrize("options", [{}, {"collective": "sharded"}, {"memory": "decoupled"}])
def test_later_gradients_of_steps_that_were_not_made_leave_the_residual(make: Make, options: dict[str, Any]) -> None:
    cluster = make(**options)
    window(cluster, 5)
    before = held(cluster, SKIPPED)
    window(cluster, 6)
    torch.testing.assert_close(held(cluster, SKIPPED), before, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:gradients of t3 were not finite")
@pytest.mark.parametrize("deferred", [False, True])
def test_later_tensors_are_averaged_element_by_element(make: Make, deferred: bool) -> None:
    cluster = make(deferred=deferred)
    _, means = window(cluster, 5)
    assert not finite(means[1][BAD])
    before = held(cluster, [BAD])
    grads, means = window(cluster, 6)
    expected = (grads[0][BAD] + grads[1][BAD]) / 2
    torch.testing.assert_close([own[BAD] for own in means], [expected] * 2, equal_nan=True)
    torch.testing.assert_close(held(cluster, [BAD]), before, rtol=1e-4, atol=1e-4)


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
    assert not any(tensor.any() for tensor in held(cluster, OTHERS))

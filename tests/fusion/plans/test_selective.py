"""Selective sparsification (SSFusion, ADTopk): which tensors are dense, at whose expense, on which lane."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lightning_safusion.fusion.plans.costs import GroupCosts, JobShape
from lightning_safusion.fusion.plans.plan import Group
from lightning_safusion.fusion.plans.profile import job_costs
from lightning_safusion.fusion.plans.selective import Selective, selective_counts
from lightning_safusion.sparsify.base import element_quota
from tests.cluster import assert_conserved, specs
from tests.fusion.jobs import counts
from tests.fusion.windows import Make, random_window, train
from tests.quick import slow

# two buffers of five: each has small tensors that fit into a twentieth of it
SHAPES = ((90, 70), (90,), (70, 40), (40,), (7, 11), (64, 9, 3), (64,), (30, 30), (9,), (1,))
ROWS: list[dict[str, Any]] = [
    {"fusion": Selective(2), "collective": "allgather"},
    {"fusion": Selective(2), "collective": "hybrid"},
    {"fusion": "wfbp", "collective": "hybrid", "compressor": "adtopk"},
    {"fusion": Selective(2), "collective": "hybrid", "compressor": "adtopk"},
    {"fusion": Selective(3), "collective": "hybrid", "compressor": "gaussiank", "wire": "bf16"},
    {"fusion": Selective(2), "collective": "hybrid", "quota": "pooled"},
]


@pytest.fixture
def make(make: Make) -> Make:
    return partial(make, tensors=specs(SHAPES))


def costs_of(numels: list[int], density: float, hybrid: bool = False) -> GroupCosts:
    quotas = tuple(element_quota(n, density) for n in numels)
    shape = JobShape(tuple(numels), (4,) * len(numels), quotas, 4, 6.0, hybrid)
    return job_costs(shape, "allgather", profile=None, prior=None)


@pytest.mark.parametrize("hybrid", [False, True])
def test_the_size_is_the_best_of_those_that_the_budget_permits(hybrid: bool) -> None:
    rng = np.random.default_rng(1)
    chosen = 0
    for _ in range(30):
        numels = rng.lognormal(6, 2, 6).astype(int).tolist()
        # start-up costs on both sides of what an all-reduce of its own saves
        costs = replace(costs_of(numels, 0.1, hybrid), dense=(float(rng.choice([1e-7, 1e-3])), 1e-9))
        (group,) = Selective(1).plan(costs).groups
        sizes, counts = np.array(numels), np.array(costs.quotas)
        chosen += group.dense_upto > 0

        def seconds(upto: int, sizes: Any = sizes, counts: Any = counts, costs: Any = costs) -> float | None:
            result = selective_counts(sizes, counts, upto)
            if result is None:
                return None
            dense = result == sizes
            entries = sum(np.array(costs.sparse_bytes)[counts < sizes]) / counts[counts < sizes].sum()
            nbytes, kept = 4 * sizes[dense].sum(), result[~dense].sum()
            if not hybrid:
                return costs.sparse[0] + costs.sparse[1] * (entries * kept + nbytes)
            fixed = max(costs.sparse[0], costs.dense[0]) if dense.any() else costs.sparse[0]
            return fixed + costs.sparse[1] * entries * kept + costs.dense[1] * nbytes

        possible = [s for s in map(seconds, [0, *numels]) if s is not None]
        assert seconds(group.dense_upto) == pytest.approx(min(possible))
    assert chosen > 5


@pytest.mark.parametrize(
    ("dense", "upto"),
    [
        ((0.9e-3, 1e-6), 100),  # the all-reduce starts while the all-gather does
        ((1.1e-3, 1e-6), 100),  # it starts 0.1 ms later, and what it takes over saves 0.2 ms
        ((1.3e-3, 1e-6), 0),
        ((0.0, 2e-6), 0),  # a quick start of the all-reduce does not shorten that of the all-gather
    ],
)
def test_lanes_start_together_and_share_the_link(dense: tuple[float, float], upto: int) -> None:
    # of 210 entries of 6 bytes, 100 and their 601 bytes give way to 400 bytes
    costs = replace(costs_of([100, 2000], 0.1, hybrid=True), sparse=(1e-3, 1e-6), dense=dense)
    assert Selective(1).plan(costs).groups == (Group(0, 2, "allgather", upto),)


def test_buffers_have_equally_many_tensors_and_the_budget_of_the_others() -> None:
    numels = [64, 64, 256, 1024] * 5 + [700]
    plan = Selective(5).plan(costs_of(numels, 0.1))
    assert counts(plan) == [4] * 5 + [1]
    # a tenth of 1408 pays for the 64s, not for the 256: section 7.2 of the specification
    assert [group.dense_upto for group in plan.groups] == [64] * 5 + [0]
    assert Selective(40).plan(costs_of(numels, 0.1)).groups[0] == Group(0, 1)


def some(step: int, workers: int) -> list[list[bool]]:
    """Which gradients there are: in one step two are missing on some ranks only, if there are others, one on all."""
    fresh = [[step != 3 or index != 5 for index in range(len(SHAPES))] for _ in range(workers)]
    fresh[0][2] = fresh[-1][6] = step != 3
    return fresh


@pytest.mark.parametrize(
    ("options", "world_size"),
    [(ROWS[1], 3), (ROWS[2], 1), (ROWS[4], 3), *slow([(ROWS[0], 1), (ROWS[1], 5), (ROWS[3], 5), (ROWS[5], 5)])],
    ids=str,
)
def test_nothing_is_lost(make: Make, options: dict[str, Any], world_size: int) -> None:
    for dense in ((), (0, 3, 6)):
        cluster = make(world_size, tensors=specs(SHAPES, dense=dense), **options)
        assert_conserved(cluster, fresh=partial(some, workers=world_size))


@pytest.mark.parametrize("collective", ["allgather", "hybrid"])
def test_a_buffer_sends_as_much_as_it_would_otherwise(make: Make, collective: str) -> None:
    tensors = specs(SHAPES, dense=(3, 6))  # which are dense in any case
    cluster = make(3, tensors=tensors, fusion=Selective(2), collective=collective, density=0.05)
    plain = make(3, tensors=tensors, fusion="aligned", collective="allgather", density=0.05)
    train(cluster, 3)
    train(plain, 3)
    reports = [cluster.engines[0].record, plain.engines[0].record]
    selected, otherwise = (report.sent_counts for report in reports)
    plan = cluster.engines[0].planner.current
    layout = cluster.engines[0].space.layout
    sizes = np.diff(layout.edges)
    for group in plan.groups:
        part = slice(group.start, group.stop)
        assert group.dense_upto > 0
        assert selected[part].sum() == otherwise[part].sum()
        small = sizes[part] <= group.dense_upto
        assert (selected[part][small] == sizes[part][small]).all()
        assert selected[part][small].sum() > otherwise[part][small].sum()
        large = ~small & (otherwise[part] < sizes[part])
        assert (selected[part][large] < otherwise[part][large]).all()


def test_a_lane_of_its_own_gives_the_same_gradients_and_fewer_bytes(make: Make) -> None:
    one = make(5, tensors=specs(SHAPES, dense=(0, 3)), fusion=Selective(2), collective="allgather")
    two = make(5, tensors=specs(SHAPES, dense=(0, 3)), fusion=Selective(2), collective="hybrid")
    for step in range(4):
        first, second = random_window(one, step), random_window(two, step)
        for a, b in zip(first[0], second[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(a.abs().max()))
    received = [cluster.engines[0].record.as_dict()["bytes_received"] for cluster in (one, two)]
    assert received[1] < 0.5 * received[0]

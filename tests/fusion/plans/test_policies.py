"""What each policy decides, alike in every process; names resolve to policies."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_safusion.fusion.plans.adaptive import Adaptive
from lightning_safusion.fusion.plans.costs import GroupCosts, JobShape
from lightning_safusion.fusion.plans.merging import MGWFBP, OMGS
from lightning_safusion.fusion.plans.per_tensor import Espresso, HiPress
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.policy import WFBP, Aligned, Cupcake, FusionPolicy, Naive, Single
from lightning_safusion.fusion.plans.profile import job_costs
from lightning_safusion.fusion.plans.registry import resolve_fusion
from lightning_safusion.fusion.plans.selective import Selective
from lightning_safusion.fusion.plans.ticking import Horovod
from tests.fusion.jobs import counts

POLICIES: list[FusionPolicy] = [
    WFBP(),
    Single(),
    Naive(),
    Aligned(),
    Aligned(3),
    Aligned(5, max_elements=1000),
    Adaptive(),
    Adaptive(rule="paper"),
    Adaptive(max_last_share=1.0),
    MGWFBP(),
    OMGS(),
    Cupcake(),
    Horovod(threshold_bytes=4096),
    HiPress(),
    Espresso(),
]


def costs_of(numels: list[int], density: float = 0.01, world_size: int = 4) -> GroupCosts:
    """Modelled costs of float32 tensors, with entries of 8 bytes."""
    quotas = tuple(min(n, max(1, int(density * n))) for n in numels)
    shape = JobShape(tuple(numels), (4,) * len(numels), quotas, world_size, 8.0)
    return job_costs(shape, "auto", profile=None, prior=None)


@pytest.mark.parametrize(
    ("policy", "numels", "tensors"),
    [
        (WFBP(), [5, 6, 7], [1, 1, 1]),
        (Single(), [5, 6, 7], [3]),
        (Naive(), [3, 4], [2]),
        (Aligned(3), [1] * 8, [3, 3, 2]),
        (Aligned(3), [10**6] * 8, [3, 3, 2]),
        (Aligned(8), [1] * 8, [8]),
        # a bound closes early, and gives a large tensor a buffer of its own
        (Aligned(4, max_elements=10), [4, 4, 4, 100, 1, 1, 0, 10, 0], [2, 1, 1, 3, 2]),
        (Cupcake(3), [1] * 10, [3, 3, 4]),
        (Cupcake(5), [1] * 2, [1, 1]),
    ],
    ids=repr,
)
def test_tensors_of_each_buffer(policy: FusionPolicy, numels: list[int], tensors: list[int]) -> None:
    assert counts(policy.plan(costs_of(numels))) == tensors


def test_only_the_naive_system_streams_and_others_measure() -> None:
    assert [policy.name for policy in POLICIES if policy.streams] == ["naive"]
    without = {policy.name for policy in POLICIES if not policy.needs_costs}
    assert without == {"wfbp", "single", "naive", "aligned", "horovod"}


def test_names_resolve() -> None:
    named = [WFBP, Aligned, Adaptive, Naive, Single, MGWFBP, OMGS, Cupcake, Horovod, HiPress, Espresso, Selective]
    assert {type(resolve_fusion(kind.name)) for kind in named} == {*named}
    assert type(resolve_fusion("behind")) is Aligned


def test_a_policy_resolves_to_itself() -> None:
    class Halves(FusionPolicy):
        name = "halves"

        def plan(self, costs: GroupCosts) -> Plan:
            return Plan.from_stops([len(costs.numels) // 2, len(costs.numels)])

    policy = Halves()
    assert resolve_fusion(policy) is policy
    assert counts(policy.plan(costs_of([1] * 5))) == [2, 3]
    assert policy.schedule() is None


def test_unknown_names_and_types_are_refused() -> None:
    with pytest.raises(ValueError, match="'adaptve'.*'adaptive', 'aligned', 'behind', .*'single', 'wfbp'"):
        resolve_fusion("adaptve")
    with pytest.raises(TypeError, match="got 8"):
        resolve_fusion(8)  # type: ignore[arg-type]  # what is refused


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Adaptive, {"rule": "greedy"}, "'greedy'.*'optimal', 'paper'"),
        (Adaptive, {"max_last_share": 0.0}, "max_last_share is .* got 0.0"),
        (Adaptive, {"max_last_share": 1.5}, "max_last_share is .* got 1.5"),
        (Aligned, {"tensors_per_buffer": 0}, "tensors_per_buffer must be .* got 0"),
        (Aligned, {"max_elements": 0}, "max_elements must be .* got 0"),
        (Naive, {"buffer_elements": 0}, "buffer_elements must be .* got 0"),
        (Selective, {"buffers": 0}, "buffers must be 1 or more, got 0"),
        (Cupcake, {"groups": 0}, "groups must be .* got 0"),
        (Cupcake, {"tolerance": 1.0}, "tolerance is .* got 1.0"),
        (Cupcake, {"windows": 0}, "windows must be 1 or more, got 0"),
        (MGWFBP, {"min_elements": -1}, "min_elements must .* got -1"),
        (Horovod, {"cycle_s": -1.0}, "cycle_s must .* got -1.0"),
        (Horovod, {"cycle_s": float("inf")}, "cycle_s must .* got inf"),
        (Horovod, {"threshold_bytes": -1}, "threshold_bytes must .* got -1"),
        (HiPress, {"bulk_bytes": -1}, "bulk_bytes must .* got -1"),
        (HiPress, {"windows": 2}, "windows must be 3 or more, .* got 2"),
        (Espresso, {"fabric": "tin"}, "unknown fabric 'tin'"),
    ],
)
def test_bad_options_are_refused_by_value(kind: type[FusionPolicy], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_repr_shows_the_options() -> None:
    assert repr(Aligned(4)) == "Aligned(tensors_per_buffer=4, max_elements=None)"

"""Plans cover every tensor exactly once, and their digest identifies them in every process."""

from __future__ import annotations

import json

import pytest

from lightning_safusion.fusion.plans.plan import Group, Plan


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 3), (4, 2), (-1, 2)])
def test_group_needs_a_tensor(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"places {start} to {stop}"):
        Group(start, stop)


@pytest.mark.parametrize(
    "groups",
    [
        (Group(1, 3),),  # the first tensor is missing
        (Group(0, 2), Group(3, 4)),  # a hole
        (Group(0, 2), Group(1, 4)),  # a tensor twice
        (Group(2, 4), Group(0, 2)),  # not in ready order
    ],
)
def test_plan_refuses_anything_but_a_partition(groups: tuple[Group, ...]) -> None:
    with pytest.raises(ValueError, match="missing or comes twice"):
        Plan(groups)


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        (Plan(()), []),
        (Plan((Group(0, 3), Group(3, 5))), [[3, "allgather"], [2, "allgather"]]),
        (Plan((Group(0, 3, "allgather", 64), Group(3, 5))), [[3, "allgather", 64], [2, "allgather"]]),
        (
            Plan((Group(0, 2, "allgather", 7), Group(2, 3, "allreduce", 0, True))),
            [[2, "allgather", 7], [1, "allreduce", 0, 1]],
        ),
    ],
)
def test_a_checkpoint_gives_the_plan_back(plan: Plan, rows: list[list[object]]) -> None:
    assert plan.to_list() == rows
    again = Plan.from_list(json.loads(json.dumps(rows)))
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.digest == plan.digest
    assert again.num_tensors == sum(row[0] for row in rows)  # type: ignore[misc]  # tensors of a group


def test_digest_tells_plans_apart() -> None:
    plans = [
        Plan(()),
        Plan.from_stops([1, 12]),
        Plan.from_stops([11, 12]),
        Plan.from_stops([12]),
        Plan.from_stops([1, 2, 12]),
        Plan.from_stops([1, 12], "allreduce"),
        Plan((Group(0, 1, "allreduce"), Group(1, 12))),
        Plan((Group(0, 1, "allreduce", half=True), Group(1, 12))),
        Plan((Group(0, 1), Group(1, 12, dense_upto=64))),
        Plan((Group(0, 1), Group(1, 12, dense_upto=65))),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)
    # Compared as an int64 tensor across ranks.
    assert all(0 <= plan.digest < 2**63 for plan in plans)


def test_digest_depends_on_nothing_but_the_plan() -> None:
    assert Plan.from_stops([3, 4, 8], "allreduce").digest == 2137832420264740237

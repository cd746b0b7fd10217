"""What plain DDP would take, from agreed costs."""

from __future__ import annotations

import pytest

from lightning_safusion.fusion.plans.costs import GroupCosts, predict_plain_ddp

MIB = 2**20


def costs(arrivals: tuple[float, ...], megabytes: tuple[float, ...]) -> GroupCosts:
    return GroupCosts(
        numels=tuple(int(size * MIB / 4) for size in megabytes),
        ready=tuple(9.0 + arrival for arrival in arrivals),  # with selection: does not matter here
        sparse_bytes=(1.0,) * len(megabytes),
        dense_bytes=tuple(size * MIB for size in megabytes),
        world_size=2,
        sparse=(0.0, 0.0),
        dense=(0.5, 1.0 / MIB),
        arrivals=arrivals,
    )


def test_an_all_reduce_waits_for_its_gradients_and_for_the_one_before_it() -> None:
    # buckets of 1, 26 and 4 MiB: 1 to 2.5; from 4, for 26.5; from 30.5, for 4.5
    assert predict_plain_ddp(costs((1.0, 2.0, 4.0, 5.0), (1, 20, 6, 4))) == pytest.approx(35.0)
    # the last gradient comes after everything else has gone
    assert predict_plain_ddp(costs((1.0, 100.0), (1, 2))) == pytest.approx(102.5)


def test_a_model_without_tensors_takes_no_time() -> None:
    assert predict_plain_ddp(costs((), ())) == 0.0

"""The table of collectives. New rows: tests/contributing."""

from __future__ import annotations

import pytest

from lightning_safusion.comm.catalogue import BYTES_ALONE, find_collective, shards_pay
from lightning_safusion.comm.cost import LinearCost


def test_unknown_collective() -> None:
    with pytest.raises(ValueError, match="unknown collective 'algather'. Did you mean 'allgather'"):
        find_collective("algather")


@pytest.mark.parametrize(
    ("workers", "gather", "pay"),
    [
        # the number alone
        (15, None, False),
        (16, None, True),
        # one worker has nothing to gather
        (1, BYTES_ALONE, False),
        # by bytes an all-gather takes (P - 1) / (4 (P - 1) / P) times as long
        (5, BYTES_ALONE, False),
        (6, BYTES_ALONE, True),
        (8, LinearCost(1e-3, 1e-6), True),
        # latency counts twice
        (8, LinearCost(1e-3, 1e-10), False),
        (64, LinearCost(1e-3, 0.0), True),
    ],
)
def test_shards_pay_where_bytes_take_the_time(workers: int, gather: LinearCost | None, pay: bool) -> None:
    assert shards_pay(workers, gather, 100_000) is pay

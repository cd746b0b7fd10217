"""The tables of collectives and value formats. New rows: tests/contributing."""

from __future__ import annotations

import pytest
import torch

from lightning_safusion.comm.catalogue import BYTES_ALONE, find_collective, shards_pay
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.comm.wire.formats import value_format


def test_unknown_collective() -> None:
    with pytest.raises(ValueError, match="unknown collective 'algather'. Did you mean 'allgather'"):
        find_collective("algather")


@pytest.mark.parametrize(
    ("name", "few_bits", "stream_ordered", "selects_itself", "conserves"),
    [
        ("auto", True, True, False, True),
        ("allgather", True, True, False, True),
        ("hybrid", True, True, False, True),
        ("hierarchical", True, False, True, True),
        ("hierarchical-sharded", True, False, True, True),
        ("allreduce", False, True, False, True),
        ("oktopk", False, False, False, True),
        ("sharded", True, True, False, True),
        ("gtopk", False, False, False, False),
    ],
)
def test_what_each_can_do(
    name: str, few_bits: bool, stream_ordered: bool, selects_itself: bool, conserves: bool
) -> None:
    row = find_collective(name)
    found = row.few_bits, row.stream_ordered, row.exchange.ability.selects_itself, row.exchange.ability.conserves
    assert found == (few_bits, stream_ordered, selects_itself, conserves)


@pytest.mark.parametrize(("wire", "name", "width", "few_bits"), [
    ("auto", "fp32", 32, False), ("bf16", "bf16", 16, False), ("eliasfano-fp16", "fp16", 16, False),
    ("q4", "q4", 4, True), ("bitmap-q2", "q2", 2, True), ("coo-sign", "sign", 1, True),
])  # fmt: skip
def test_what_each_format_of_values_is(wire: str, name: str, width: int, few_bits: bool) -> None:
    values = value_format(wire)
    assert (values.name, values.width, values.few_bits) == (name, width, few_bits)
    assert value_format("auto", torch.bfloat16).name == "bf16"
    with pytest.raises(ValueError, match="unknown wire format 'list-q4'"):
        value_format("list-q4")


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

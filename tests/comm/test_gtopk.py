"""gTop-k against its definition, with dictionaries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_safusion.comm.collectives.gtopk import GTopKExchange
from lightning_safusion.comm.exchange import aligned
from tests.comm.exchanges import Workers, gradients, gtopk, lost, part_of, same, span

WORLDS = [1, 2, 3, 5, 8]
List = dict[int, np.float32]


def merged(first: List, second: List, capacity: int) -> List:
    sums = {i: first.get(i, np.float32(0)) + second.get(i, np.float32(0)) for i in first | second}
    order = sorted((i for i in sums if sums[i] != 0), key=lambda i: (-abs(sums[i]), i))
    return {i: sums[i] for i in order[:capacity]}


def by_tree(lists: list[List], capacity: int) -> List:
    while len(lists) > 1:
        lists = [
            merged(lists[i], lists[i + 1], capacity) if i + 1 < len(lists) else lists[i]
            for i in range(0, len(lists), 2)
        ]
    return lists[0]


@pytest.mark.parametrize("world_size", WORLDS)
def test_equals_the_definition(world_size: int) -> None:
    for numel, capacity in [(600, 40), (600, 1), (30, 29), (2, 2)]:
        spec = span(numel, capacity)
        workers = Workers(world_size, spec, gtopk())
        for step in range(3):
            xs = gradients(world_size, numel, seed=step)
            if step == 2:
                xs = [x.sign() for x in xs]  # ties and sums that cancel
            selections = [part_of(x, spec).selection for x in xs]
            lists: list[List] = [
                dict(zip(s.indices.tolist(), s.values.numpy(), strict=True)) for s in selections if s is not None
            ]
            expected = torch.zeros(numel)
            result = by_tree(lists, capacity)
            for index, value in result.items():
                expected[index] = float(value)
            results = workers.step(xs)
            assert same(results)
            assert torch.equal(results[0].mean, expected * (1.0 / world_size))
            for mine, got in zip(lists, results, strict=True):
                assert set(got.sent.nonzero().view(-1).tolist()) == set(mine) & set(result)


def test_mass_is_lost() -> None:
    """Three ranks cancel what the fourth has carried to the end, and are cut on their way: nobody holds their part."""
    assert GTopKExchange.ability.conserves is False
    spec = span(4, 1)
    xs = [torch.zeros(4) for _ in range(4)]
    xs[0][0], xs[1][0] = 5.0, 5.0
    xs[2][0], xs[3][1] = 4.0, 9.0  # 4 at position 0 is cut by 9 at position 1, which is cut by 10
    results = Workers(4, spec, gtopk()).step(xs)
    assert (results[0].mean * 4).tolist() == [10.0, 0.0, 0.0, 0.0]
    assert results[2].sent.tolist() == [4.0, 0.0, 0.0, 0.0]  # gone: neither delivered nor in the residual
    assert results[3].sent.tolist() == [0.0] * 4  # goes back to its residual
    assert lost(results) == 4.0


@pytest.mark.parametrize("world_size", WORLDS)
def test_bytes_are_those_of_the_formula(world_size: int) -> None:
    n, size = world_size, aligned(4 + 8 * 25)
    workers = Workers(n, span(1000, 25), gtopk(wire="coo-fp32"))
    workers.step(gradients(n, 1000))
    received = [e.bytes_received - e.lane.bytes_received for e in workers.exchanges]
    assert sum(received) == 2 * (n - 1) * size
    assert received[0] == (n - 1).bit_length() * size
    assert {e.bytes_sent - e.lane.bytes_sent for e in workers.exchanges} == {size}

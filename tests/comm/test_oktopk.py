"""Ok-Topk against its definition, computed from all selections in one place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import SpanSpec
from tests.comm.exchanges import Received, Workers, conserved, gradients, oktopk, part_of, same, span
from tests.quick import quick_of

WORLDS = [2, 3, 5, 8]


def total(xs: list[Tensor], spec: SpanSpec) -> Tensor:
    """Sum of the selections of all ranks, in rank order."""
    result = torch.zeros(spec.numel)
    for x in xs:
        selection = part_of(x, spec).selection
        assert selection is not None
        result[selection.indices] += selection.values
    return result


def strongest(sums: Tensor, count: int) -> Tensor:
    """The ``count`` largest of all sums, the first ones among equals; zero elsewhere."""
    order = sums.abs().argsort(descending=True, stable=True)[:count]
    kept = torch.zeros_like(sums)
    kept[order] = sums[order]
    return kept


def delivered(results: list[Received]) -> Tensor:
    assert same(results)
    return results[0].mean * len(results)


@pytest.mark.parametrize("world_size", [2, 5])
def test_refreshed_in_every_step_it_is_the_top_k_of_the_sum(world_size: int) -> None:
    for numel, capacity in [(3000, 64), (500, 2), (40, 39), (3, 3), (1, 1)]:
        spec = span(numel, capacity)
        workers = Workers(world_size, spec, oktopk(refresh=1, repartition=2))
        for step in range(4):
            xs = gradients(world_size, numel, seed=step)
            if step == 3:
                xs = [x.sign() * x.abs().clamp(max=1.0) for x in xs]  # many of equal magnitude
            torch.testing.assert_close(delivered(workers.step(xs)), strongest(total(xs, spec), capacity))


@pytest.mark.parametrize("world_size", quick_of(WORLDS, (3,)))
@pytest.mark.parametrize("balance", [1.0, 4.0, float("inf")])
def test_between_refreshes_what_reaches_the_threshold_is_delivered(world_size: int, balance: float) -> None:
    spec = span(3000, 90)
    workers = Workers(world_size, spec, oktopk(refresh=8, repartition=3, balance=balance))
    counts = []
    for step in range(12):
        state = workers.exchanges[0].state_dict()
        assert all(exchange.state_dict() == state for exchange in workers.exchanges)
        xs = gradients(world_size, 3000, seed=step)
        results = workers.step(xs)
        sums = total(xs, spec)
        refreshed = step % 8 == 0 or state["threshold"] is None
        expected = strongest(sums, 90) if refreshed else torch.where(sums.abs() >= state["threshold"], sums, 0.0)
        torch.testing.assert_close(delivered(results), expected)
        counts.append(int(expected.count_nonzero()))
        for x, result in zip(xs, results, strict=True):
            mine = total([x], spec)
            assert torch.equal(result.sent, torch.where(expected != 0, mine, 0.0))
    assert counts[0] == counts[8] == 90
    assert len(set(counts)) > 2


def test_the_threshold_follows_the_number_found() -> None:
    workers = Workers(2, span(1000, 100), oktopk(refresh=1000))
    base = gradients(2, 1000)

    def threshold_after(scale: float) -> Any:
        workers.step([scale * x for x in base])
        return workers.exchanges[1].state_dict()["threshold"]

    exact = threshold_after(1.0)
    assert exact == strongest(total(base, workers.spec), 100).abs().unique()[1]
    assert threshold_after(1.0) == exact  # 100 found again
    assert threshold_after(0.5) == pytest.approx(exact / 1.008)  # too few
    assert threshold_after(4.0) == pytest.approx(exact)  # too many
    assert threshold_after(0.0) is None  # nothing found: found anew
    assert threshold_after(0.01) == pytest.approx(0.01 * exact)


@pytest.mark.parametrize("world_size", [5, 8])
def test_regions_are_balanced_and_the_volume_does_not_grow_with_the_workers(world_size: int) -> None:
    spec = span(20_000, 1000)
    workers = Workers(world_size, spec, oktopk(refresh=1000, wire="coo-fp32"))
    slope = torch.linspace(3.0, 0.1, 20_000) ** 3  # most of what is large lies at the front
    message = 4 + 8 * 1000
    for step in range(4):
        results = workers.step([slope * x for x in gradients(world_size, 20_000, seed=step)])
        assert conserved(results)
        received = max(e.bytes_received - e.lane.bytes_received for e in workers.exchanges)
        # equal regions of the span would give the first rank more than two messages by themselves
        assert step == 0 or received < 2.5 * message < (world_size - 1) * message
    edges = workers.exchanges[0].state_dict()["edges"]
    share = [high - low for low, high in zip(edges, edges[1:], strict=False)]
    assert share[0] < share[-1] / 4


def test_lists_are_balanced_only_where_one_is_much_longer() -> None:
    """All that survives lies in the last region: with balance every rank passes on a quarter of it."""
    spec = span(4000, 200)
    xs = gradients(4, 4000)
    volumes = {}
    for balance in (2.0, float("inf")):
        workers = Workers(4, spec, oktopk(refresh=1000, balance=balance, wire="coo-fp32"))
        workers.step(xs)
        lopsided = [x.clone() for x in xs]
        for x in lopsided:
            x[:3400] *= 1e-3
            x[3400:] *= 10
        before = [transport.bytes_sent for transport in workers.transports]
        results = workers.step(lopsided)
        sent = [t.bytes_sent - b for t, b in zip(workers.transports, before, strict=True)]
        volumes[balance] = delivered(results), sent
    assert torch.equal(volumes[2.0][0], volumes[float("inf")][0])
    assert max(volumes[2.0][1]) < 0.8 * max(volumes[float("inf")][1])


def test_fewer_entries_than_workers() -> None:
    workers = Workers(8, span(1000, 3), oktopk())
    for step in range(3):
        xs = gradients(8, 1000, seed=step)
        xs[3].zero_()
        assert conserved(workers.step(xs))
    edges = workers.exchanges[0].state_dict()["edges"]
    assert edges == [125 * j for j in range(9)]


def test_its_state_goes_on_where_it_stopped() -> None:
    build, spec = oktopk(refresh=4, repartition=3), span(2000, 50)
    straight, stopped = Workers(3, spec, build), Workers(3, spec, build)
    for step in range(6):
        xs = gradients(3, 2000, seed=step)
        expected = straight.step(xs)
        if step in (2, 5):
            resumed = Workers(3, spec, build)
            for old, new in zip(stopped.exchanges, resumed.exchanges, strict=True):
                new.load_state_dict(old.state_dict())
            stopped = resumed
        assert torch.equal(stopped.step(xs)[0].mean, expected[0].mean)
    for changed in (Workers(2, spec, build), Workers(3, span(1999, 50), build)):  # other ranks, another span
        (fresh, *_) = [exchange.state_dict() for exchange in changed.exchanges]
        changed.exchanges[0].load_state_dict(straight.exchanges[0].state_dict())
        assert changed.exchanges[0].state_dict() == fresh

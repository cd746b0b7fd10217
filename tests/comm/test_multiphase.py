"""What every collective of several phases must do, whatever it delivers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_safusion.comm.collectives.hierarchical import NodeExchange
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.exchange import Notice, Part, TensorFlag
from lightning_safusion.comm.transport.torch_backend import default_transport
from tests.comm.exchanges import (
    Build,
    Received,
    Workers,
    allgather,
    conserved,
    end,
    failed_part,
    gradients,
    gtopk,
    hierarchical,
    hierarchical_sharded,
    hybrid,
    oktopk,
    part_of,
    same,
    sharded,
    span,
    through,
)
from tests.process_group import run_ranks

ALL: dict[str, Build] = {
    "oktopk": oktopk(),
    "oktopk-reused": oktopk(refresh=3, repartition=2),
    "oktopk-balanced": oktopk(refresh=1000, balance=1.0),
    "oktopk-bf16": oktopk(refresh=3, wire="bf16"),
    "hierarchical": hierarchical(),
    "hierarchical-bf16": hierarchical(wire="bf16"),
    "hierarchical-fp16": hierarchical(wire="fp16"),
    "hierarchical-q4": hierarchical(wire="q4"),
    "hierarchical-sharded": hierarchical_sharded(),
    "hierarchical-sharded-bf16": hierarchical_sharded(wire="bf16"),
    "hierarchical-sharded-q4": hierarchical_sharded(wire="q4"),
    "hierarchical-sharded-one-node": hierarchical_sharded([0] * 8),
    "hierarchical-sharded-one-each": hierarchical_sharded(range(8)),
    "sharded": sharded(),
    "sharded-bf16": sharded("bf16", scattered=1.0, gathered=1.0),
    "sharded-q4": sharded("q4"),
    "gtopk": gtopk(),
    "gtopk-bf16": gtopk(wire="bf16"),
}
#: One of each kind, with different values on the wire.
KINDS = ["oktopk-reused", "hierarchical-bf16", "hierarchical-sharded-q4", "sharded", "gtopk-bf16"]
# elements, capacity
SHAPES = [(1000, 60), (1000, 999), (3, 2), (1, 1), (0, 0)]


each_kind = pytest.mark.parametrize("build", [ALL[name] for name in KINDS], ids=KINDS)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *((name, 3) for name in ALL),
        *((name, 1) for name in KINDS),
        *(pytest.param(name, (2, 5, 8)[place % 3], marks=pytest.mark.slow) for place, name in enumerate(ALL)),
    ],
)
def test_ranks_get_the_same_bits_and_nothing_is_lost(name: str, world_size: int) -> None:
    build = ALL[name]
    for shape, (numel, capacity) in enumerate(SHAPES):
        workers = Workers(world_size, span(numel, capacity), build)
        for step in range(3):
            xs = gradients(world_size, numel, seed=10 * shape + step)
            results = workers.step(xs)
            assert same(results)
            assert all(result.finite for result in results)
            assert results[0].verdict.fresh.tolist() == [world_size]
            if workers.exchanges[0].ability.conserves:
                assert conserved(results)
            if step == 0:
                assert bool(results[0].mean.any()) is (numel > 0)


@each_kind
def test_bytes_are_those_that_the_transport_has_moved(build: Build) -> None:
    world_size = 5
    workers = Workers(world_size, span(5000, 100, dense=(1000, 1300)), build)
    for step in range(4):
        before = [moved(workers, rank) for rank in range(world_size)]
        workers.step(gradients(world_size, 5000, seed=step))
        for rank, exchange in enumerate(workers.exchanges):
            assert exchange.bytes_received == pytest.approx(moved(workers, rank) - before[rank], abs=1.5)


def moved(workers: Workers, rank: int) -> float:
    transports: list[Any] = [workers.transports[rank]]
    exchange = workers.exchanges[rank]
    if isinstance(exchange, NodeExchange):
        transports += [exchange.transports.inside, exchange.transports.between]
    if isinstance(exchange, ShardedExchange):
        transports.append(exchange._beside)
    return sum(transport.bytes_received for transport in transports)


@each_kind
@pytest.mark.parametrize(("numel", "capacity", "dense"), [(2000, 20, (500, 900)), (100, 0, (0, 100))])
def test_dense_pieces_are_averaged(build: Build, numel: int, capacity: int, dense: tuple[int, int]) -> None:
    workers, piece = Workers(3, span(numel, capacity, dense), build), slice(*dense)
    for step in range(2):
        xs = gradients(3, numel, seed=step)
        results = workers.step(xs)
        assert same(results)
        torch.testing.assert_close(results[0].mean[piece], torch.stack(xs).mean(0)[piece])
        assert all(torch.equal(result.sent[piece], x[piece]) for result, x in zip(results, xs, strict=True))
        results[0].mean[piece] = 0
        assert bool(results[0].mean.any()) is (capacity > 0)


@pytest.mark.parametrize("build", [*(ALL[name] for name in KINDS), allgather(), allgather(wire="q4"), hybrid()])
def test_of_an_absent_tensor_nothing_is_sent(build: Build) -> None:
    spec = span(2000, 20, dense=(500, 900))
    workers = Workers(3, spec, build)
    xs = gradients(3, 2000)
    parts = [part_of(x, spec) for x in xs]
    workers.step(xs, parts)  # what was sent then is not sent again
    parts[1] = Part(parts[1].selection, parts[1].flags, (1,))
    results = workers.step(xs, parts)
    torch.testing.assert_close(results[0].mean[500:900], (xs[0] + xs[2])[500:900] / 3)


@each_kind
def test_flags_and_notices_of_every_rank_reach_all(build: Build) -> None:
    spec = span(900, 30, dense=(300, 350))
    workers = Workers(3, spec, build)
    xs = gradients(3, 900)
    parts = [part_of(x, spec) for x in xs]
    flags = parts[2].flags.clone()
    flags[0] = TensorFlag.BYPASS | TensorFlag.FRESH
    flags[2] = TensorFlag.BAD | TensorFlag.FRESH
    parts[2] = Part(parts[2].selection, flags, (), int(Notice.TERMINATE))
    results = workers.step(xs, parts)
    for result in results:
        assert result.verdict.fresh.tolist() == [3, 3, 3]
        assert result.verdict.bad.tolist() == [False, False, True]
        assert result.verdict.bypass.tolist() == [True, False, False]
        assert result.verdict.notices == Notice.TERMINATE
    assert workers.step(xs)[0].verdict.is_regular(3)


@each_kind
def test_a_bad_tensor_is_spoiled_and_the_scratch_clean_afterwards(build: Build) -> None:
    workers = Workers(2, span(900, 30, dense=(300, 350)), build)
    xs = gradients(2, 900)

    def spoiled(rank: int) -> torch.Tensor:
        exchange = workers.exchanges[rank]
        exchange.encode(xs[rank], part_of(xs[rank], exchange.spec))
        exchange.start().wait()
        scratch = torch.zeros(900)
        mean = exchange.decode(scratch)
        exchange.poison(mean, torch.tensor([False, True, True]))
        finite = [bool(torch.isfinite(piece).all()) for piece in (mean[:300], mean[300:350], mean[350:])]
        exchange.release(scratch)
        assert not scratch.any()
        return torch.tensor(finite)

    assert workers.each(spoiled)[1].tolist() == [True, False, False]


@each_kind
def test_a_rank_that_could_not_select_takes_part(build: Build) -> None:
    spec = span(900, 30, dense=(300, 350))
    workers = Workers(3, spec, build)
    xs = [*gradients(2, 900), torch.zeros(900)]
    for _ in range(2):
        results = workers.step(xs, [*(part_of(x, spec) for x in xs[:2]), failed_part(spec)])
        assert same(results)
        assert all(result.verdict.notices & Notice.FAILED for result in results)
        if not isinstance(workers.exchanges[2], ShardedExchange):  # an owner keeps what it does not deliver
            assert not results[2].sent.any()
        assert results[0].mean.any()


@each_kind
def test_zeros_and_equals(build: Build) -> None:
    workers = Workers(5, span(100, 10), build)
    for xs in ([torch.zeros(100)] * 5, [torch.ones(100)] * 5, [torch.full((100,), -2.0)] * 5, gradients(5, 100)):
        results = workers.step(xs)
        assert same(results)
        assert conserved(results) or not workers.exchanges[0].ability.conserves
    assert results[0].mean.any()


@each_kind
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_every_rank_sees_a_sum_that_is_not_finite(build: Build, bad: float) -> None:
    workers = Workers(3, span(400, 20), build)
    for step in range(4):
        xs = gradients(3, 400, seed=step)
        if step in (0, 2):  # Ok-Topk has a threshold in the second one
            xs[step // 2][17] = bad
        results = workers.step(xs)
        assert [result.finite for result in results] == [step not in (0, 2)] * 3
        if results[0].finite and workers.exchanges[0].ability.conserves:
            assert conserved(results)


@each_kind
def test_two_are_under_way_at_once(build: Build) -> None:
    spec = span(1000, 40)
    workers = Workers(3, spec, build)
    xs = [gradients(3, 1000, seed=seed) for seed in range(2)]
    alone = [Workers(3, spec, build).step(each) for each in xs]
    second = workers.each(lambda rank: build(spec, workers.transports[rank]))

    def both(rank: int) -> list[Received]:
        pair = [workers.exchanges[rank], second[rank]]
        works = []
        for exchange, x in zip(pair, xs, strict=True):
            exchange.encode(x[rank], part_of(x[rank], spec))
            works.append(exchange.start())
        return [end(exchange, work, x[rank]) for exchange, work, x in zip(pair, works, xs, strict=True)]

    for results in workers.each(both):
        for result, expected in zip(results, alone, strict=True):
            assert torch.equal(result.mean, expected[0].mean)


def real(rank: int) -> list[list[float]]:
    transport = default_transport()
    means = []
    for name in KINDS:
        exchange = ALL[name](span(1000, 50, dense=(100, 130)), transport)
        for step in range(2):
            means.append(through(exchange, gradients(3, 1000, seed=step)[rank]).mean.tolist())
    transport.close()
    return means


def test_real_ranks_get_what_virtual_ones_do() -> None:
    first, *others = run_ranks(3, real)
    assert all(other == first for other in others)
    expected = []
    for name in KINDS:
        workers = Workers(3, span(1000, 50, dense=(100, 130)), ALL[name])
        expected += [workers.step(gradients(3, 1000, seed=step))[0].mean for step in range(2)]
    for mean, virtual in zip(first, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mean), virtual)  # gloo adds the dense pieces in another order

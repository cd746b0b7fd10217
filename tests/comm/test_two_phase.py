from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_safusion.comm import Transport, default_transport
from lightning_safusion.comm.collectives.allreduce import DenseAllReduce
from lightning_safusion.comm.collectives.two_phase import TwoPhaseAllReduce
from lightning_safusion.comm.exchange import Exchange, Notice, Part, SpanSpec, TensorFlag
from tests.comm.exchanges import CPU, Workers, end, gradients, through
from tests.process_group import run_ranks


def dense(numel: int, dtype: torch.dtype = torch.float32, tensors: int = 1) -> SpanSpec:
    edges = tuple(numel * t // tensors for t in range(tensors + 1))
    return SpanSpec(numel, 0, edges, ((0, numel, dtype),) if numel else ())


def two_phase(spec: SpanSpec, transport: Transport) -> Exchange:
    return TwoPhaseAllReduce(spec, transport, CPU)


def one_phase(spec: SpanSpec, transport: Transport) -> Exchange:
    return DenseAllReduce(spec, transport, CPU)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_all_reduce_bit_for_bit(world_size: int, dtype: torch.dtype) -> None:
    for numel in (0, 1, 2, 7, 1000):
        spec = dense(numel, dtype, tensors=min(2, numel) or 1)
        pair = [Workers(world_size, spec, build) for build in (two_phase, one_phase)]
        for step in range(2):
            xs = gradients(world_size, numel, seed=step)
            ours, theirs = (workers.step(xs) for workers in pair)
            for mine, other in zip(ours, theirs, strict=True):
                assert torch.equal(mine.mean, other.mean)
                assert torch.equal(mine.sent, other.sent)
                assert mine.verdict.fresh.tolist() == [world_size] * spec.num_tensors


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_bytes_are_those_of_a_ring_and_padding_is_only_where_needed(world_size: int) -> None:
    n = world_size
    header = 3 + len(Notice)  # flags of one tensor, and notices
    for numel in (n * 20 - header % n, n * 20 - header % n + 1):
        padded = -(-(numel + header) // n) * n
        assert (padded == numel + header) == ((numel + header) % n == 0)
        workers = Workers(n, dense(numel), two_phase)
        workers.step(gradients(n, numel))
        for transport, exchange in zip(workers.transports, workers.exchanges, strict=True):
            assert transport.bytes_received == exchange.bytes_received == 2 * (n - 1) * padded * 4 // n
            assert exchange.bytes_sent == 4 * padded


def test_flags_and_notices_reach_all() -> None:
    spec = dense(100, tensors=2)
    workers = Workers(3, spec, two_phase)
    flags = torch.tensor([TensorFlag.FRESH, TensorFlag.BAD], dtype=torch.uint8)
    regular = torch.full((2,), int(TensorFlag.FRESH), dtype=torch.uint8)
    parts = [Part(None, regular), Part(None, flags, (1,), int(Notice.REQUEUE)), Part(None, regular)]
    for result in workers.step(gradients(3, 100), parts):
        assert result.verdict.fresh.tolist() == [3, 2]
        assert result.verdict.bad.tolist() == [False, True]
        assert result.verdict.notices == Notice.REQUEUE


def test_the_second_phase_may_wait_until_others_have_begun() -> None:
    """All first phases, then all second ones, each awaited when it is needed."""
    spec = dense(50)
    workers = Workers(3, spec, two_phase)
    more = workers.each(lambda rank: two_phase(spec, workers.transports[rank]))
    xs = [gradients(3, 50, seed=seed) for seed in range(2)]

    def run(rank: int) -> list[Any]:
        pair = [workers.exchanges[rank], more[rank]]
        flags = torch.ones(1, dtype=torch.uint8)
        for exchange, x in zip(pair, xs, strict=True):
            exchange.encode(x[rank], Part(None, flags))
            exchange.start()
        for exchange in reversed(pair):
            exchange.start_second()
        return [end(exchange, x[rank]).mean for exchange, x in zip(pair, xs, strict=True)]

    for means in workers.each(run):
        for mean, x in zip(means, xs, strict=True):
            torch.testing.assert_close(mean, torch.stack(x).mean(0))


def test_the_second_phase_needs_a_first() -> None:
    workers = Workers(1, dense(4), two_phase)
    with pytest.raises(RuntimeError, match="call start first"):
        workers.exchanges[0].start_second()


def real(rank: int, world_size: int) -> list[Any]:
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        exchange = two_phase(dense(1001, dtype), default_transport())
        x = gradients(world_size, 1001)[rank]
        result = through(exchange, x, Part(None, torch.ones(1, dtype=torch.uint8)))
        results.append((result.mean.float().tolist(), result.verdict.fresh.tolist()))
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_real_ranks(world_size: int) -> None:
    first, *others = run_ranks(world_size, real, world_size)
    assert all(other == first for other in others)
    mean = torch.stack(gradients(world_size, 1001)).mean(0)
    for (values, fresh), tolerance in zip(first, (1e-5, 0.05), strict=True):
        torch.testing.assert_close(torch.tensor(values), mean, atol=tolerance, rtol=tolerance)
        assert fresh == [world_size]

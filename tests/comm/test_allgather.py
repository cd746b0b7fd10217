"""Decoding into the gradients: the same bits as through a buffer, and only where that is possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.exchange import SpanSpec
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.kernels import cpu as native
from tests.cluster import Cluster, settings, specs
from tests.comm.exchanges import Workers, allgather, gradients, part_of
from tests.sparsify.oracle import needs_kernels

EDGES = (0, 70_000, 70_000, 70_040, 120_000)  # an empty tensor and a small one among others
LARGE = ((200, 250), (40,), (0,), (300, 230), (1,))


def garbage(spec: SpanSpec) -> list[Tensor]:
    """Flat gradients of a span, all of them wrong."""
    return [torch.full((stop - start,), torch.nan) for start, stop in zip(spec.edges, spec.edges[1:], strict=False)]


def both(workers: Workers, xs: Sequence[Tensor]) -> list[tuple[list[Tensor], bool | None, Tensor, bool]]:
    """What each rank gets from one exchange, in both ways, and whether it is finite."""

    def run(rank: int) -> tuple[list[Tensor], bool | None, Tensor, bool]:
        exchange = workers.exchanges[rank]
        exchange.encode(xs[rank], part_of(xs[rank], workers.spec))
        exchange.start().wait()
        direct, scratch = garbage(workers.spec), torch.zeros(workers.spec.numel)
        finite = exchange.decode_into(direct)
        mean = exchange.decode(scratch)
        result = direct, finite, mean.clone(), exchange.is_finite(mean)
        exchange.release(scratch)
        assert not scratch.any()
        return result

    return workers.each(run)


@needs_kernels
@pytest.mark.parametrize(("dense", "world_size"), [(None, 1), ((70_000, 120_000), 2), ((0, 70_000), 3)])
@pytest.mark.parametrize("wire", ["eliasfano-fp32", "bitmap-bf16", "coo-fp32", "q4"])
def test_the_mean_is_that_of_the_buffer(wire: str, dense: tuple[int, int] | None, world_size: int) -> None:
    runs = () if dense is None else ((*dense, torch.float32),)
    workers = Workers(world_size, SpanSpec(EDGES[-1], 3000, EDGES, runs), allgather(wire=wire))
    for step in range(2):
        results = both(workers, gradients(world_size, EDGES[-1], step))
        for direct, finite, mean, _ in results:
            assert finite is True
            assert torch.equal(torch.cat(direct), mean)
            assert torch.equal(mean, results[0][2])
        assert mean.count_nonzero() >= 1000


@needs_kernels
@pytest.mark.parametrize(("wire", "least"), [("eliasfano-fp16", 1000), ("bitmap-sign", 40_000), ("coo-bf16", 1000)])
def test_what_kernels_cannot_read_is_decoded_piece_by_piece(
    wire: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparseAllGather, "least_piece", least)
    monkeypatch.setattr(SparseAllGather, "decoded_together", 1)
    workers = Workers(3, SpanSpec(EDGES[-1], 9000, EDGES, ()), allgather(wire=wire))
    pieces: list[int] = []
    kind = type(workers.exchanges[0].codec)
    reader = kind.reader

    def recorded(self: Codec, message: Tensor) -> Any:
        read = reader(self, message)

        def noted(start: int, stop: int) -> Any:
            pieces.append(stop - start)
            return read(start, stop)

        return noted

    monkeypatch.setattr(kind, "reader", recorded)
    results = both(workers, gradients(3, EDGES[-1]))
    for direct, finite, mean, otherwise in results:
        assert finite is otherwise is True
        assert torch.equal(torch.cat(direct), mean)
    pieces = [piece for piece in pieces if piece < EDGES[-1]]  # through a buffer a message is read at once
    assert max(pieces) <= least
    assert sum(pieces) == 3 * 3 * EDGES[-1]  # each rank reads three messages


@needs_kernels
@pytest.mark.parametrize("value", [3e38, torch.inf, torch.nan])
@pytest.mark.parametrize("dense", [None, (70_000, 120_000)])
def test_a_sum_that_is_not_finite_is_seen(value: float, dense: tuple[int, int] | None) -> None:
    runs = () if dense is None else ((*dense, torch.float32),)
    workers = Workers(3, SpanSpec(EDGES[-1], 30_000, EDGES, runs), allgather(wire="eliasfano-fp32"))
    xs = gradients(3, EDGES[-1])
    for x in xs:
        x[[5, -5]] = value
    for direct, finite, mean, otherwise in both(workers, xs):
        assert finite is otherwise is (value == 3e38)  # whose mean fits
        torch.testing.assert_close(torch.cat(direct), mean, rtol=0, atol=0, equal_nan=True)


def test_without_compiled_kernels_the_mean_goes_through_a_buffer() -> None:
    workers = Workers(2, SpanSpec(EDGES[-1], 3000, EDGES, ()), allgather(wire="auto"))
    with native.unused():
        results = both(workers, gradients(2, EDGES[-1]))
    for direct, finite, mean, otherwise in results:
        assert finite is None
        assert otherwise
        assert torch.cat(direct).isnan().all()
        assert mean.any()


@pytest.mark.parametrize(
    ("dtype", "memory", "asked"),
    [
        (torch.float32, "residual", 2),
        (torch.bfloat16, "residual", 0),
        (torch.float64, "residual", 0),
        (torch.float32, "ef21", 0),
    ],
)
def test_what_the_gradients_get_is_not_always_the_mean(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, memory: str, asked: int
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(SparseAllGather, "decode_into", lambda *given: seen.append(given))
    options = {"collective": "allgather", "memory": memory, "fusion": "single"}
    cluster = Cluster(2, lambda: settings(**options), specs(LARGE, dtype))
    cluster.step(cluster.random_grads(0))
    assert len(seen) == asked
    cluster.close()

"""Buffers that every worker fills at its own pace: all that was sent is in the mean, whatever others have sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lightning_safusion.comm.collectives.negotiated import Stream, StreamedTensor
from lightning_safusion.comm.exchange import Notice, SpanSpec
from lightning_safusion.comm.wire.values import VALUES
from tests.comm.exchanges import CPU, Received, Workers, end, gradients, part_of, span

SIZES = (300, 700)


def test_rounds_are_added_up_until_all_ranks_are_done() -> None:
    workers = Workers(3, span(1, 1), lambda spec, transport: streamed(transport))  # type: ignore[arg-type]  # two spans
    for window in range(2):
        results: list[list[Received]] = workers.each(lambda rank, seed=window: one(workers.exchanges[rank], rank, seed))
        for place, size in enumerate(SIZES):
            mine = [own[place] for own in results]
            assert all(torch.equal(each.mean, mine[0].mean) for each in mine)
            torch.testing.assert_close(mine[0].mean, torch.stack([each.sent for each in mine]).sum(0) / 3)
            assert [int(each.sent.count_nonzero()) for each in mine] == [2, 32, 62]
            assert len(mine[0].mean) == size
            verdict = mine[0].verdict
            assert verdict.fresh.tolist() == [3]
            assert verdict.notices == (Notice.TERMINATE if window == 0 else 0)
        assert results[2][0].sent[7] == (65504.0 if window == 0 else results[2][0].sent[7])


def streamed(transport: Any) -> list[StreamedTensor]:
    """Both tensors of a worker."""
    stream = Stream(transport, np.cumsum([0, *SIZES]), 40, VALUES["fp16"], CPU)
    return [StreamedTensor(SpanSpec(size, 50, (0, size), ()), stream, place) for place, size in enumerate(SIZES)]


def one(exchanges: list[StreamedTensor], rank: int, window: int) -> list[Received]:
    """One window of a rank, which sends more than those before it, and has a notice beside its first tensor."""
    xs = [gradients(3, size, seed=window)[rank] for size in SIZES]
    if window == 0 and rank == 2:
        xs[0][7] = 1e6
    works = []
    for place, (exchange, x) in enumerate(zip(exchanges, xs, strict=True)):
        notices = int(Notice.TERMINATE) if window == 0 and rank == 1 and place == 0 else 0
        exchange.encode(x, part_of(x, span(len(x), 2 + 30 * rank), notices=notices))
        works.append(exchange.start())
    return [end(exchange, work, x) for exchange, work, x in zip(exchanges, works, xs, strict=True)]

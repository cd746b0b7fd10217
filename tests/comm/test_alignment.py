"""Every message begins where devices and their libraries read best, in every collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.virtual.transport import LocalTransport, local_transports
from lightning_safusion.comm.collectives.allreduce import DenseAllReduce, TwoPhaseSum
from lightning_safusion.comm.collectives.negotiated import Stream, StreamedTensor
from lightning_safusion.comm.exchange import Exchange, SpanSpec
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.comm.wire.values import VALUES
from tests.comm.exchanges import (
    CPU,
    Build,
    Workers,
    allgather,
    gradients,
    gtopk,
    hierarchical,
    hierarchical_sharded,
    hybrid,
    oktopk,
    same,
    sharded,
    span,
)

LINE = 128


class Seen:
    """Where the messages of all workers began, in bytes of their buffers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: dict[str, list[int]] = {}
        for name in ("all_gather", "all_reduce", "broadcast", "all_to_all", "reduce_scatter", "permute"):
            monkeypatch.setattr(LocalTransport, name, self._watched(name, getattr(LocalTransport, name)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(transport: LocalTransport, *args: Any) -> Any:
            tensors = [each for each in args if isinstance(each, Tensor)]
            sizes = [each for each in args if isinstance(each, Sequence) and name == "all_to_all"]
            if tensors[0].dtype != torch.int64:  # numbers that ranks agree on
                for tensor, pieces in zip(tensors, sizes or self._pieces(tensors), strict=True):
                    starts = np.cumsum([0, *pieces]) + tensor.storage_offset()
                    self.places.setdefault(name, []).extend((starts * tensor.itemsize).tolist())
            return call(transport, *args)

        return watched

    @staticmethod
    def _pieces(tensors: Sequence[Tensor]) -> list[list[int]]:
        """Elements that each rank writes."""
        least = min(map(len, tensors))
        return [[least] * (len(tensor) // max(1, least)) for tensor in tensors]


def allreduce(spec: SpanSpec, transport: Transport) -> Exchange:
    runs = ((0, spec.numel, torch.bfloat16),)
    return DenseAllReduce(SpanSpec(spec.numel, 0, spec.edges, runs), transport, CPU)


@pytest.mark.parametrize(
    ("build", "calls"),
    [
        (allgather(wire="bf16"), {"all_gather"}),
        (allreduce, {"all_reduce"}),
        (hybrid(wire="bitmap-fp16"), {"all_gather", "all_reduce"}),
        (hierarchical(wire="bf16"), {"all_to_all", "all_gather", "all_reduce"}),
        (sharded("q4"), {"all_to_all", "all_gather", "all_reduce"}),
        (hierarchical_sharded(wire="q4"), {"all_to_all", "all_gather", "all_reduce"}),
        (gtopk(wire="coo-bf16"), {"permute", "broadcast", "all_reduce"}),
        (oktopk(wire="coo-bf16"), {"all_to_all", "all_reduce"}),
    ],
)
def test_messages_begin_at_lines(monkeypatch: pytest.MonkeyPatch, build: Build, calls: set[str]) -> None:
    workers = Workers(4, span(1003, 57, dense=(301, 438)), build)
    seen = Seen(monkeypatch)
    for step in range(3):
        assert same(workers.step(gradients(4, 1003, seed=step)))
    assert set(seen.places) == calls
    assert {name: [place % LINE for place in places if place % LINE] for name, places in seen.places.items()} == {
        name: [] for name in calls
    }


def test_rounds_of_a_stream_begin_at_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = np.array([0, 1003])

    def build(spec: SpanSpec, transport: Transport) -> Exchange:
        return StreamedTensor(spec, Stream(transport, edges, 19, VALUES["fp32"], CPU), 0)

    workers = Workers(3, span(1003, 57), build)
    seen = Seen(monkeypatch)
    workers.step(gradients(3, 1003))
    assert len(seen.places["all_gather"]) > 3 * 4
    assert not any(place % LINE for place in seen.places["all_gather"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares_of_a_sum_in_two_phases_begin_at_lines(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    transports = local_transports(3)
    seen = Seen(monkeypatch)
    sums = [TwoPhaseSum(1003, dtype, transport, CPU) for transport in transports]
    for each in sums:
        each.start()
    for each in sums:
        each.start_second()
    assert set(seen.places) == {"reduce_scatter", "all_gather"}
    assert not any(place % LINE for places in seen.places.values() for place in places)

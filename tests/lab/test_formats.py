"""The study of message formats."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from lab.convergence import plan
from lab.formats import LAYOUTS, formats, quotas, size
from lab.virtual.transport import local_transports
from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.exchange import SpanSpec
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.kernels import cpu as native
from lightning_safusion.tools.plan.traces import resolve_trace


@pytest.mark.skipif(not native.usable(), reason="no compiled kernels")
def test_the_fewest_bits_are_those_of_elias_and_fano(capsys: pytest.CaptureFixture[str]) -> None:
    formats(densities=(0.05,), trace="lstm", repetitions=1)
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1] for row in rows] == [f"`{layout}-q4`" for layout in LAYOUTS]
    bits = [float(row[2]) for row in rows]
    assert min(bits) == bits[-1] == pytest.approx(10.5, abs=0.2)
    assert all(float(row[4]) > 0 and float(row[5]) > 0 for row in rows)


@pytest.mark.parametrize(("density", "ratio"), [(0.1, 33.7), (0.05, 61.0), (0.02, 136.1), (0.01, 250.7)])
def test_what_a_message_of_bert_base_saves(density: float, ratio: float) -> None:
    """As docs/guide/exchange.md says."""
    sizes = [tensor.numel for tensor in resolve_trace("bert-base").tensors]
    assert 4 * sum(sizes) / size("eliasfano", "q4", sizes, density) == pytest.approx(ratio, abs=0.05)


@pytest.mark.parametrize(("density", "ratio"), [(0.1, 33.7), (0.05, 60.5), (0.01, 241.1)])
def test_what_a_message_of_a_small_model_saves(density: float, ratio: float) -> None:
    """As docs/guide/exchange.md says: the whole message, with its header and the bytes that round it up."""
    sizes = [parameter.numel() for parameter in plan.TASKS["bytes-transformer"].model().parameters()]
    edges, entries = list(accumulate(sizes, initial=0)), quotas(sizes, density)
    capacity = sum(entries)
    codec = resolve_codec("eliasfano-q4", edges[-1], capacity, torch.float32, edges, entries)
    (transport,) = local_transports(1)
    spec = SpanSpec(edges[-1], capacity, tuple(edges), ())
    sent = SparseAllGather(spec, transport, torch.device("cpu"), codec).bytes_sent
    assert sent % 128 == 0
    assert sent > codec.nbytes + len(sizes)
    assert 4 * edges[-1] / sent == pytest.approx(ratio, abs=0.05)

"""With deterministic algorithms CUDA stores to, and adds to, one element one after the other: there are few of each.

Messages and selections have padding where an estimator has found less than its quota: here nearly all of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.exchange import Part, SpanSpec, TensorFlag
from lightning_safusion.comm.transport.torch_backend import SoloTransport
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.fusion.launching.offloaded import _merged
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Selection
from lightning_safusion.sparsify.memory.residual import ResidualMemory

CPU = torch.device("cpu")
NUMEL, CAPACITY, FOUND = 20_000, 4000, 100


class Repeats(TorchDispatchMode):
    """Refuses indices that have an element many times, in operations that order what is stored there."""

    ORDERED = ("scatter", "scatter_", "scatter_add_", "index_add", "index_add_", "index_copy_", "index_put_")

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name in self.ORDERED:
            (index,) = args[1] if name == "index_put_" else (args[2],)
            most = int(torch.bincount(index).max()) if len(index) else 0
            assert most <= self.most, f"{name} has {most} of {len(index)} elements at one place"
        return func(*args, **(kwargs or {}))


def padded() -> Selection:
    """What an estimator has found on a device: padding is at the first position."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randperm(NUMEL, generator=generator)[:FOUND].sort().values
    values = torch.randn(FOUND, generator=generator)
    rest = CAPACITY - FOUND
    return Selection(
        torch.cat([indices, indices[:1].expand(rest)]), torch.cat([values, torch.zeros(rest)]), torch.tensor([FOUND])
    )


@pytest.mark.parametrize("wire", ["eliasfano-q4", "eliasfano-fp32", "coo-sign", "bitmap-fp16"])
def test_a_message_with_padding_is_written_and_read(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "serves", lambda *_, **__: False)  # as on a device
    codec, selection = resolve_codec(wire, NUMEL, CAPACITY, torch.float32), padded()
    message = torch.zeros(codec.nbytes, dtype=torch.uint8)
    # a single level is the mean of a part, of so many elements
    with Repeats(NUMEL // CAPACITY * 256 if wire.endswith("sign") else 2):
        codec.encode(selection, message)
        indices, values = codec.decode_padded(message)
        torch.zeros(NUMEL).scatter_add_(0, indices, values)
    expected = torch.zeros(NUMEL).index_copy_(0, selection.indices[:FOUND], values[values != 0])
    assert torch.equal(torch.zeros(NUMEL).index_add_(0, indices, values), expected)


def test_what_was_sent_is_taken_out_of_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "serves", lambda *_, **__: False)
    codec, selection = resolve_codec("eliasfano-fp32", NUMEL, CAPACITY, torch.float32), padded()
    exchange = SparseAllGather(SpanSpec(NUMEL, CAPACITY, (0, NUMEL), ()), SoloTransport(), CPU, codec)
    exchange._reads_again = False
    memory = ResidualMemory()
    memory.bind([0, NUMEL], CPU)
    memory.add(0, NUMEL, torch.ones(NUMEL))
    exchange.encode(torch.zeros(NUMEL), Part(selection, torch.tensor([int(TensorFlag.FRESH)], dtype=torch.uint8)))
    with Repeats(2):
        memory.commit(0, *exchange.sent())
    expected = torch.ones(NUMEL).index_add_(0, selection.indices, selection.values, alpha=-1)
    assert torch.equal(memory.accumulated(0, NUMEL), expected)


def test_selections_of_a_thread_and_of_the_device_are_merged() -> None:
    first, second = padded(), Selection(torch.tensor([0, 7]), torch.ones(2), 2)
    merged = _merged([first, second], NUMEL)
    found = FOUND + 2
    assert int(merged.count) == found
    assert torch.equal(merged.indices[:found], torch.cat([first.indices[:FOUND], second.indices]).sort().values)
    assert merged.indices.bincount().max() <= 2
    assert not merged.values[found:].any()

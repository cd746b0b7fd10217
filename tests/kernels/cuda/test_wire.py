"""The kernels of the wire formats against the CPU path, byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lightning_safusion.comm.wire import codec as codec_module
from lightning_safusion.comm.wire import formats as wire_module
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.sparsify.base import Selection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SPANS = [(0, 0), (1, 1), (1000, 37), (9000, 2100), (65_537, 100)]
LAYOUTS, VALUES = ("coo", "block16", "bitmap"), ("fp32", "bf16", "fp16")
CASES = [  # each layout with each span and, in turn, with each kind of values
    pytest.param(layout, VALUES[(i + j) % 3], *span, marks=() if span[1] == 37 else pytest.mark.slow)
    for i, layout in enumerate(LAYOUTS)
    for j, span in enumerate(SPANS)
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages in host memory are written and read by the kernels, too."""
    for module in (codec_module, wire_module):
        monkeypatch.setattr(module, "serves", lambda device: True)


def drawn(numel: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Positions and values, some of which no 16-bit format can hold, and some halfway between two of its numbers."""
    generator = torch.Generator().manual_seed(numel)
    indices = torch.randperm(numel, generator=generator)[:capacity].sort().values
    values = torch.randn(capacity, generator=generator) * 1000
    awkward = torch.tensor(
        [1e30, 7e4, -3.4e38, torch.inf, -torch.inf, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1e-40]
    )
    if capacity > len(awkward):
        values[: len(awkward)] = awkward
    return indices, values


@pytest.mark.parametrize(("layout", "values", "numel", "capacity"), CASES)
def test_messages_are_those_of_the_cpu(
    request: pytest.FixtureRequest, layout: str, values: str, numel: int, capacity: int
) -> None:
    codec = resolve_codec(f"{layout}-{values}", numel, capacity, torch.float32)
    indices, numbers = drawn(numel, capacity)
    counts = sorted({capacity, capacity // 2, 0})
    cases = []
    for count in counts:
        written = torch.full((codec.nbytes,), 7, dtype=torch.uint8)
        sent = codec.encode(Selection(indices[:count], numbers[:count], count), written)
        cases.append((count, written, sent, codec.decode(written)))

    request.getfixturevalue("kernels")
    for count, written, sent, (expected, decoded) in cases:
        padded, padding = indices.clone(), numbers.clone()
        padded[count:], padding[count:] = 0, 0
        for known in (count, torch.tensor(count, device=DEVICE)):
            out = torch.full((codec.nbytes,), 9, dtype=torch.uint8, device=DEVICE)
            ours = codec.encode(Selection(padded.to(DEVICE), padding.to(DEVICE), known), out)
            assert torch.equal(out.cpu(), written)
            assert torch.equal(ours.cpu()[:count].view(torch.int32), sent.view(torch.int32))
            assert (ours.cpu()[count:] == 0).all()
        positions, received = (part.cpu() for part in codec.decode_padded(out))
        assert torch.equal(positions[:count], expected)
        assert torch.equal(received[:count].view(torch.int32), decoded.view(torch.int32))
        assert (received[count:] == 0).all()
        assert ((positions >= 0) & (positions < max(numel, 1))).all()


@pytest.mark.usefixtures("kernels")
def test_nan_travels_as_nan() -> None:
    for values in ("fp32", "bf16", "fp16"):
        codec = resolve_codec(f"coo-{values}", 10, 3, torch.float32)
        out = torch.empty(codec.nbytes, dtype=torch.uint8, device=DEVICE)
        selection = Selection(torch.arange(3, device=DEVICE), torch.tensor([1, torch.nan, 2.0], device=DEVICE), 3)
        assert codec.encode(selection, out).isnan().tolist() == [False, True, False]
        assert codec.decode_padded(out)[1].isnan().tolist() == [False, True, False]


@pytest.mark.usefixtures("kernels")
def test_too_many_entries_are_refused_before_a_kernel_runs() -> None:
    codec = resolve_codec("block16-fp32", 100, 2, torch.float32)
    out = torch.zeros(codec.nbytes, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="3 entries, the message has room for 2"):
        codec.encode(Selection(torch.arange(3, device=DEVICE), torch.ones(3, device=DEVICE), 3), out)
    assert not out.any()

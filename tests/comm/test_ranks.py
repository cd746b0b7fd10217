"""Ranks of positions by Elias and Fano: 16 bits each where there is room for fewer than 65536 entries, else 32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion.comm.wire.elias_fano import EliasFanoCodec
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.kernels import cpu as native
from lightning_safusion.kernels.cpu import Parts
from lightning_safusion.sparsify.base import Selection
from tests.sparsify.oracle import KERNELS, kernels, needs_kernels

BORDER = 1 << 16
LONG, TINY = [0, 4_000_000], list(range(0, 400_001, 40))


def codec_of(edges: Sequence[int], capacity: int, values: str = "q4") -> EliasFanoCodec:
    codec = resolve_codec(f"eliasfano-{values}", edges[-1], capacity, torch.float32, edges)
    assert isinstance(codec, EliasFanoCodec)
    return codec


def drawn(edges: Sequence[int], count: int) -> Tensor:
    """Ascending positions, more of them in the first third."""
    generator = np.random.default_rng(count)
    some = (edges[-1] * generator.random(2 * count + 10) ** 1.5).astype(np.int64)
    return torch.from_numpy(np.sort(generator.choice(np.unique(some), count, replace=False)))


def written(codec: EliasFanoCodec, positions: Tensor, padded: bool = False) -> Tensor:
    message, count = torch.full((codec.nbytes,), 255, dtype=torch.uint8), len(positions)
    number = torch.tensor(count) if padded else count
    codec.encode(Selection(positions, torch.ones(count), number), message)
    return message


def counted(edges: Sequence[int], low: int, positions: Tensor) -> np.ndarray:
    """Entries before each region, and in all."""
    length = 512 << low
    firsts = [np.arange(start, stop, length) for start, stop in zip(edges[:-1], edges[1:], strict=True)]
    return np.append(positions.numpy().searchsorted(np.concatenate(firsts)), len(positions))


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize(("edges", "fewer"), [(LONG, ()), (TINY, (40_000, 1, 0))], ids=["long", "tiny"])
@pytest.mark.parametrize("capacity", [BORDER - 1, BORDER])
def test_ranks_have_the_width_that_their_numbers_need(
    edges: list[int], fewer: tuple[int, ...], capacity: int, compiled: bool
) -> None:
    codec, width = codec_of(edges, capacity), np.uint16 if capacity < BORDER else np.uint32
    size = codec.field_bytes[0]
    start, stop = edges[-1] // 3, edges[-1] // 2
    for count in (capacity, *fewer):
        positions = drawn(edges, count)
        expected = counted(edges, codec.low, positions)
        assert len(expected) > 100
        assert size == -(-expected.astype(width).nbytes // 16) * 16
        with kernels(compiled):
            message = written(codec, positions)
            field = message[:size].numpy().view(width)
            assert np.array_equal(field[: len(expected)], expected)
            assert not field[len(expected) :].any()
            assert torch.equal(codec.decode(message)[0], positions)
            inside = positions[(positions >= start) & (positions < stop)]
            assert torch.equal(codec.reader(message)(start, stop)[0], inside)
        indices, values = codec.decode_padded(message)
        assert torch.equal(indices[:count], positions)
        assert values.count_nonzero() == count
        assert torch.equal(written(codec, positions, padded=True), message)


@needs_kernels
@pytest.mark.parametrize("capacity", [BORDER - 1, BORDER])
def test_compiled_kernels_read_and_write_several_messages(capacity: int) -> None:
    codec, positions = codec_of(TINY, capacity), drawn(TINY, capacity)
    memory = torch.full((2, codec.nbytes), 255, dtype=torch.uint8)
    outgoing = [codec.outgoing(message) for message in memory]
    known = native.Together([message for message in outgoing if message is not None])
    both = positions.repeat(2)
    assert native.write_messages(both.numpy(), np.ones(len(both), np.float32), np.full(2, capacity), known)
    message = written(codec, positions)
    assert all(torch.equal(each, message) for each in memory)
    read = codec.inbox(memory)
    assert read is not None
    mean = torch.zeros(TINY[-1])
    assert native.mean_into([mean], Parts.between([0, TINY[-1]]), read(), 0.5)
    indices, values = codec.decode(message)
    assert torch.equal(mean, torch.zeros_like(mean).index_add_(0, indices, values))


def read_regions(codec: EliasFanoCodec, message: Tensor, compiled: bool) -> None:
    """Reads a message region by region, with compiled kernels or with NumPy."""
    if compiled:
        inbox = codec.inbox(message[None])
        assert inbox is not None
        native.mean_into([torch.zeros(LONG[-1])], Parts.between(LONG), inbox(), 1.0)
        return
    read, length = codec.reader(message), 512 << codec.low
    for start in range(0, LONG[-1], length):
        read(start, min(start + length, LONG[-1]))


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("capacity", [BORDER - 2, BORDER])
def test_damaged_ranks_are_refused(capacity: int, compiled: bool) -> None:
    codec, positions = codec_of(LONG, capacity), drawn(LONG, capacity)
    intact = written(codec, positions)
    for region, change in ((0, 1), (40, -1), (40, 1 << 14), (-1, 1), (-1, -1)):
        message = intact.clone()
        ranks = message[: codec.field_bytes[0]].view(torch.int16 if capacity < BORDER else torch.int32)
        ranks[region % len(counted(LONG, codec.low, positions))] += change
        with kernels(compiled), pytest.raises(ValueError, match="damaged"):
            read_regions(codec, message, compiled)
        indices, _ = codec.decode_padded(message)
        assert bool(((indices >= 0) & (indices < codec.numel)).all())

"""Compiled kernels write and read Elias and Fano's positions bit by bit as NumPy does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_safusion.comm.wire.elias_fano import EliasFanoCodec
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.kernels import cpu as native
from lightning_safusion.kernels.cpu import Parts
from lightning_safusion.sparsify.base import Selection
from lightning_safusion.sparsify.selection.native import FoundSelection
from tests.sparsify.oracle import needs_kernels

pytestmark = needs_kernels

COUNTS = (1, 7, 8, 9, 255, 256, 257, 600)


def codec_of(numel: int, capacity: int, values: str = "q4") -> EliasFanoCodec:
    """Of tensors of a few elements, and of the rest in two that are about as large."""
    edges = sorted({0, 1, min(numel, 40), min(numel, 41), (numel + 90) // 2, numel} - {numel + 1})
    codec = resolve_codec(
        f"eliasfano-{values}", numel, capacity, torch.float32, [edge for edge in edges if edge <= numel]
    )
    assert isinstance(codec, EliasFanoCodec)
    return codec


def places(kind: str, numel: int, count: int) -> Tensor:
    """Ascending positions, int64."""
    generator = np.random.default_rng(count)
    found = {
        "anywhere": lambda: np.sort(generator.choice(numel, count, replace=False, shuffle=False)),
        "together": lambda: np.arange(count) + (numel - count) // 3,
        "at both ends": lambda: np.append(np.arange(count // 2), np.arange(numel - count + count // 2, numel)),
    }[kind]()
    return torch.from_numpy(found.astype(np.int64))


def selected(positions: Tensor) -> Selection:
    values = torch.from_numpy(np.random.default_rng(3).standard_normal(len(positions)).astype(np.float32))
    return Selection(positions, values, len(positions))


def written(codec: EliasFanoCodec, selection: Selection) -> Tensor:
    message = torch.full((codec.nbytes,), 255, dtype=torch.uint8)
    codec.encode(selection, message)
    return message


@pytest.mark.parametrize("kind", ["anywhere", "together", "at both ends"])
@pytest.mark.parametrize("share", [1, 2, 5, 30, 130, 700, 5000])
def test_bytes_are_those_of_numpy(share: int, kind: str) -> None:
    for count in COUNTS:
        codec = codec_of(count * share, count)
        selection = selected(places(kind, count * share, count))
        with native.unused():
            expected = written(codec, selection)
        narrow = dataclasses.replace(selection, indices=selection.indices.int())
        assert torch.equal(written(codec, selection), expected), count
        assert torch.equal(written(codec, narrow), expected), count
        memory = torch.full((2, codec.nbytes), 255, dtype=torch.uint8)
        outgoing = native.Together([message for message in map(codec.outgoing, memory) if message is not None])
        both, values = selection.indices.repeat(2).numpy(), selection.values.repeat(2).numpy()
        assert native.write_messages(both, values, np.full(2, count), outgoing)
        assert all(torch.equal(each, expected) for each in memory), count


@pytest.mark.parametrize("kind", ["anywhere", "together", "at both ends"])
@pytest.mark.parametrize(
    ("share", "values"), [(1, "q4"), (2, "q2"), (5, "sign"), (30, "fp32"), (130, "bf16"), (700, "q4"), (30, "q4")]
)
def test_any_piece_has_the_numbers_of_numpy(share: int, kind: str, values: str) -> None:
    generator = np.random.default_rng(share)
    for count in COUNTS:
        numel = count * share
        codec = codec_of(numel, count, values)
        message = written(codec, selected(places(kind, numel, count)))
        with native.unused():
            at, sent = codec.decode(message)
        whole = torch.zeros(numel).index_add_(0, at, sent * 0.3)
        inbox = codec.inbox(message[None])
        cuts = [(0, numel), *np.sort(generator.integers(0, numel + 1, (8, 2))).tolist()]
        for start, stop in cuts:
            if start < stop:
                mean = torch.full((stop - start,), torch.nan)
                assert native.mean_into([mean], Parts.between([start, stop]), inbox(), 0.3)
                assert torch.equal(mean, whole[start:stop]), (count, start, stop)
        memory = torch.randn(numel)
        rest = memory.index_add(0, at, sent, alpha=-1)
        native.take_out_message(memory, inbox().messages[0])
        assert torch.equal(memory, rest), count


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong", [0, 1, 100, 255, 256, 299])
def test_positions_that_do_not_ascend_are_refused(wrong: int, dtype: torch.dtype) -> None:
    codec = codec_of(30_000, 300)
    for place in (-1, -(1 << 31), 30_000 - 1, 1 << 30, 0):
        positions = places("anywhere", 29_000, 300) + 1
        positions[wrong] = place
        if (wrong == 0 and place == 0) or (wrong == 299 and place >= 30_000 - 1):
            continue  # they ascend; behind the span is padding
        with pytest.raises(ValueError, match="do not ascend"):
            written(codec, FoundSelection(positions.to(dtype), torch.ones(300)))


@pytest.mark.parametrize("jump", [(1 << 31) - 1, 1 << 31, (1 << 32) + 2, (1 << 33) + 5])
def test_entries_lie_as_far_apart_as_they_like(jump: int) -> None:
    codec = resolve_codec("eliasfano-q4", 1 << 35, 600, torch.float32)
    assert isinstance(codec, EliasFanoCodec)
    positions = torch.arange(600) * 3
    positions[300:] += jump
    selection = selected(positions)
    with native.unused():
        expected = written(codec, selection)
    assert torch.equal(written(codec, selection), expected)
    assert torch.equal(codec.decode(expected)[0], positions)
    back = positions.clone()
    back[100] += 1 << 32  # only its lower half ascends
    with pytest.raises(ValueError, match="do not ascend"):
        written(codec, selected(back))


@settings(max_examples=80)
@given(
    shape=st.sampled_from([(1, 1), (500, 3), (3000, 60), (4000, 3999), (70_000, 1)]),
    values=st.sampled_from(["sign", "q4", "bf16", "fp32"]),
    field=st.sampled_from(["ranks", "high", "low"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_same_damaged_messages_are_refused(shape: tuple[int, int], values: str, field: str, seed: int) -> None:
    """Workers with kernels and without must end together. Nothing is written outside of gradients."""
    numel, capacity = shape
    codec, generator = codec_of(numel, capacity, values), np.random.default_rng(seed)
    count = int(generator.integers(0, capacity + 1))
    message = written(codec, selected(places("anywhere", numel, count)))
    begins = np.cumsum([0, *codec.field_bytes])[["ranks", "high", "low"].index(field) :][:2]
    if field == "ranks":  # nearly all others that do not ascend, or are too many, look alike
        ranks = message[: begins[1]].numpy().view(codec._rank)[: len(codec._bucket_of_region)]
        ranks[1:] = np.sort(generator.integers(0, capacity + 1, len(ranks) - 1))
    else:
        for bit in generator.integers(8 * begins[0], 8 * begins[1], generator.integers(1, 4)):
            message[bit // 8] ^= 1 << int(bit % 8)

    room = torch.full((numel + 64,), 7.0)

    def compiled() -> Tensor:
        read = codec.inbox(message[None])
        native.mean_into([room[32:-32]], Parts.between([0, numel]), read(), 1.0)
        return room[32:-32]

    def plain() -> Tensor:
        out = torch.zeros(numel)
        positions, values = codec.reader(message)(0, numel)
        return out.index_put_((positions,), values)

    def outcome(read: Callable[[], Tensor]) -> Tensor | str:
        try:
            return read()
        except ValueError as error:
            return str(error)

    ours, numpys = outcome(compiled), outcome(plain)
    if isinstance(ours, str) or isinstance(numpys, str):
        assert "damaged" in ours
        assert "damaged" in numpys
    else:
        assert torch.equal(ours, numpys)
    assert (room[[*range(32), *range(-32, 0)]] == 7).all()

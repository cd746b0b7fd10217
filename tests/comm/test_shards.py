"""Pieces of tensors and their owners: the same in every plan, level, and complete."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion.comm.collectives.host_shards import HostRoutes, HostShard
from lightning_safusion.comm.collectives.multiphase import Entries
from lightning_safusion.comm.collectives.shards import Pieces, Receiver, Routes, Shard
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.basic import TopK
from tests.sparsify.oracle import KERNELS, cut, kernels

SIZES = (1000, 3, 0, 40_000, 64, 1, 7000)


def segments(first: int = 0, sizes: tuple[int, ...] = SIZES, pool: int = 0) -> Segments:
    return cut(sizes, [size and max(1, size // 20) for size in sizes], pool, range(first, first + len(sizes)))


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_pieces_are_all_of_it(workers: int) -> None:
    whole = segments()
    pieces = Pieces.of(whole, workers)
    runs = pieces.runs.tolist()
    assert runs[0][0] == 0
    assert runs[-1][1] == whole.numel
    assert all(before[1] == after[0] for before, after in pairwise(runs))
    assert int(pieces.quotas.sum()) == whole.capacity
    assert (pieces.quotas <= pieces.sizes).all()
    assert len(set(pieces.keys)) == len(pieces.keys)
    owned = [pieces.owned(owner) for owner in range(workers)]
    assert sum(int(each.quotas.sum()) for each in owned) == whole.capacity
    elements = [int(each.sizes.sum()) for each in owned]
    assert max(elements) <= 1.1 * sum(elements) / workers


@pytest.mark.parametrize("workers", [2, 5])
def test_a_tensor_has_the_same_pieces_in_every_buffer(workers: int) -> None:
    together = Pieces.of(segments(), workers)
    alone = Pieces.of(segments(first=3, sizes=SIZES[3:4]), workers)
    start = sum(SIZES[:3])
    begins, ends = together.runs.T
    inside = (begins >= start) & (ends <= start + SIZES[3]) & (begins < ends)
    assert (together.runs[inside] - start).tolist() == alone.runs.tolist()
    assert together.owners[inside].tolist() == alone.owners.tolist()
    assert together.quotas[inside].tolist() == alone.quotas.tolist()


@pytest.mark.parametrize(("period", "workers"), [(2, 8), (8, 16), (12, 8), (16, 16)])
def test_tensors_of_equal_layers_have_owners_of_all_ranks(period: int, workers: int) -> None:
    # in each layer one tensor is larger than the others, too small to be cut
    layers = 96 // period
    quotas = np.tile([3 * workers, *[1] * (period - 1)], layers)
    pieces = Pieces.of(cut(range(1000, 1000 + len(quotas)), quotas.tolist()), workers)
    assert len(pieces.owners) == len(quotas)
    large = np.bincount(pieces.owners[::period], minlength=workers)
    assert large.max() <= -(-layers // workers) + 2


def test_a_pool_has_no_pieces() -> None:
    with pytest.raises(ValueError, match="no quota='pooled'"):
        Pieces.of(segments(pool=5), 2)


@pytest.mark.parametrize("kind", [Shard, HostShard])
def test_an_owner_keeps_what_it_does_not_deliver(kind: type[Shard]) -> None:
    pieces = Pieces.of(segments(sizes=(100,)), 1)
    shard = kind(pieces.owned(0), torch.zeros(0, 0, dtype=torch.uint8), None)
    x = torch.arange(100.0)
    shard.take(x, [])
    sums = shard.summed()
    sums[7] = 5.0  # of others
    delivered = shard.largest(sums, None)
    assert delivered.indices.tolist() == [95, 96, 97, 98, 99]
    leaving = shard.leaving(sums, delivered)
    assert leaving.indices.tolist() == [7, 95, 96, 97, 98, 99]
    assert leaving.values.tolist() == [-5.0, 95.0, 96.0, 97.0, 98.0, 99.0]
    shard.take(x, [(0, 100)])
    assert not shard.largest(torch.zeros(100), None).values.any()


def drawn(generator: torch.Generator, numel: int) -> Tensor:
    """Heavy-tailed, with many zeros."""
    return torch.randn(numel, generator=generator) ** 3 * (torch.rand(numel, generator=generator) < 0.7)


def selected(x: Tensor, pieces: Pieces) -> Selection:
    """The largest elements of each piece."""
    return TopK().select(x, pieces.segments(), 0)


@pytest.mark.parametrize("wire", ["q4", "bf16"])
@pytest.mark.parametrize("compiled", KERNELS)
def test_a_shard_on_the_host_does_what_pytorch_would(wire: str, compiled: bool) -> None:
    workers, generator = 4, torch.Generator().manual_seed(0)
    whole = Pieces.of(segments(), workers)
    sent, delivered = whole.times(0.5), whole.times(3.5)
    numel, codec = sum(SIZES), sent.owned(1).codec(wire, sum(SIZES), torch.float32)
    assert codec is not None
    messages = torch.zeros(workers - 1, codec.nbytes, dtype=torch.uint8)
    ours, theirs = (kind(delivered.owned(1), messages, codec) for kind in (HostShard, Shard))
    with kernels(compiled):
        for step in range(6):
            for message in messages:
                x = drawn(generator, numel)
                if step == 4:
                    x[20_000:30_000] = 3e38
                HostRoutes(whole, numel, [Receiver(1, codec, message)]).send(selected(x, sent))
            x = drawn(generator, numel)
            found = []
            for shard in (ours, theirs):
                shard.take(x, [(0, 1000)] if step == 2 else [])
                sums = shard.summed()
                largest = shard.largest(sums, None)
                leaving = shard.leaving(sums, largest)
                lists = largest.indices, largest.values, leaving.indices, leaving.values
                found.append([each.clone() for each in (sums, shard._held, *lists)])
            assert bool(found[0][0].isfinite().all()) is not (step == 4)
            torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("wire", "workers"), [("q4", 3), ("sign", 2), ("fp32", 8)])
@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("spoilt", ["", "more", "nan"])
def test_the_messages_for_all_owners_are_those_of_each(workers: int, wire: str, compiled: bool, spoilt: str) -> None:
    generator, pieces, numel = torch.Generator().manual_seed(workers), Pieces.of(segments(), workers), sum(SIZES)
    codecs = [pieces.owned(owner).codec(wire, numel, torch.float32) for owner in range(workers)]
    receivers = [
        Receiver(owner, codec, torch.full((codec.nbytes,), 255, dtype=torch.uint8))
        for owner, codec in enumerate(codecs)
        if codec is not None and owner != 1
    ]
    with kernels(compiled):
        routes = HostRoutes(pieces, numel, receivers)
        for _ in range(2):
            x = drawn(generator, numel)
            selection = selected(x, pieces.times(1.5) if spoilt == "more" else pieces)
            if spoilt == "nan":
                selection.values[5] = torch.nan
            (sent,) = routes.send(selection)
            indices, values = [], []
            for owner, codec, memory in receivers:
                runs = pieces.runs[pieces.owners == owner].tolist()
                mine = torch.cat([torch.arange(start, stop) for start, stop in runs])
                inside = torch.isin(selection.indices, mine)
                part = Entries(selection.indices[inside], selection.values[inside]).largest(codec.capacity)
                message = torch.zeros(codec.nbytes, dtype=torch.uint8)
                values.append(codec.encode(Selection(part.indices, part.values, len(part)), message))
                indices.append(part.indices)
                assert torch.equal(message, memory)
            assert torch.equal(sent.indices, torch.cat(indices))
            torch.testing.assert_close(sent.values, torch.cat(values), rtol=0, atol=0, equal_nan=True)
            if not spoilt:  # of too many PyTorch keeps the first ones
                others = [each._replace(memory=torch.full_like(each.memory, 255)) for each in receivers]
                Routes(pieces, numel, others).send(selection)
                assert all(torch.equal(ours.memory, own.memory) for ours, own in zip(receivers, others, strict=True))

"""Pieces of tensors and their owners: the same in every plan, level, and complete."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from lightning_safusion.comm.collectives.host_shards import HostShard
from lightning_safusion.comm.collectives.shards import Pieces
from lightning_safusion.sparsify.base import Segments

SIZES = (1000, 3, 0, 40_000, 64, 1, 7000)


def segments(first: int = 0, sizes: tuple[int, ...] = SIZES, pool: int = 0) -> Segments:
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    quotas = np.array([size and max(1, size // 20) for size in sizes])
    keys = tuple(range(first, first + len(sizes)))
    return Segments(edges, quotas, keys, tuple((size,) for size in sizes), pool)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_pieces_are_all_of_it(workers: int) -> None:
    cut = segments()
    pieces = Pieces.of(cut, workers)
    runs = pieces.runs.tolist()
    assert runs[0][0] == 0
    assert runs[-1][1] == cut.numel
    assert all(before[1] == after[0] for before, after in pairwise(runs))
    assert int(pieces.quotas.sum()) == cut.capacity
    assert (pieces.quotas <= pieces.sizes).all()
    assert len(set(pieces.keys)) == len(pieces.keys)
    owned = [pieces.owned(owner) for owner in range(workers)]
    assert sum(int(each.quotas.sum()) for each in owned) == cut.capacity
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


def test_a_pool_has_no_pieces() -> None:
    with pytest.raises(ValueError, match="no quota='pooled'"):
        Pieces.of(segments(pool=5), 2)


def test_an_owner_keeps_what_it_does_not_deliver() -> None:
    pieces = Pieces.of(segments(sizes=(100,)), 1)
    shard = HostShard(pieces.owned(0), torch.zeros(0, 0, dtype=torch.uint8), None)
    x = torch.arange(100.0)
    shard.take(x, [])
    sums = shard.summed()
    sums[7] = 5.0  # of others
    delivered = shard.largest(None)
    assert delivered.indices.tolist() == [95, 96, 97, 98, 99]
    leaving = shard.leaving(sums, delivered)
    assert leaving.indices.tolist() == [7, 95, 96, 97, 98, 99]
    assert leaving.values.tolist() == [-5.0, 95.0, 96.0, 97.0, 98.0, 99.0]
    shard.take(x, [(0, 100)])
    assert not shard.largest(None).values.any()

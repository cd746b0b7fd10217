from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_safusion.sparsify import NoCompression, Threshold, span_segments
from lightning_safusion.sparsify.base import Segments

N = 1_000_000


def test_count_is_the_tail_of_the_distribution() -> None:
    x = torch.randn(N, generator=torch.Generator().manual_seed(0))
    selection = Threshold(3.290527).select(x, span_segments(N, N), 0)
    assert selection.count == int((x.abs() > np.float32(3.290527)).sum())
    assert selection.count == pytest.approx(1000, abs=5 * 31.6)
    rest = x.clone()
    rest[selection.indices] = 0
    assert rest.abs().max() <= 3.290527
    assert selection.values.abs().min() > 3.29


def test_zero_keeps_exactly_the_non_zeros() -> None:
    x = torch.tensor([0.0, 1e-40, -0.0, -2.0, 0.0, 1.0])
    assert Threshold(0).select(x, span_segments(6, 6), 0).indices.tolist() == [1, 3, 5]


def test_it_is_monotone() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    kept = [set(Threshold(v).select(x, span_segments(10_000, 10_000), 0).indices.tolist()) for v in (0.1, 1.0, 2.0)]
    assert kept[0] > kept[1] > kept[2]


def test_every_segment_sends_at_least_one_and_at_most_its_quota() -> None:
    x = torch.tensor([-0.1, -0.3, -0.2, 0.0, 0.0, 5.0, -6.0, 7.0, 8.0])
    segments = Segments(np.array([0, 3, 5, 9]), np.array([2, 1, 2]), (0, 1, 2), ((3,), (2,), (4,)))
    selection = Threshold(1.0).select(x, segments, 0)
    assert selection.indices.tolist() == [1, 3, 7, 8]


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_impossible_thresholds_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=str(value)):
        Threshold(value)


def test_no_compression_is_the_identity() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(2))
    sparsifier = NoCompression()
    assert sparsifier.quota(100, (10, 10), 0.01) == 100
    selection = sparsifier.select(x, span_segments(100, 100), 0)
    assert torch.equal(selection.values, x)
    assert selection.indices.tolist() == list(range(100))
    part = sparsifier.select(x, Segments(np.array([0, 40, 100]), np.array([0, 60]), (0, 1), ((40,), (60,))), 0)
    assert part.indices.tolist() == list(range(40, 100))
    assert sparsifier.select(x[:0], span_segments(0, 0), 0).count == 0

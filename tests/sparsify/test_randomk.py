from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_safusion.sparsify import RandomK, span_segments
from lightning_safusion.sparsify.base import Segments


def cut(sizes: list[int], quotas: list[int], pool: int = 0) -> Segments:
    edges = np.cumsum([0, *sizes], dtype=np.int64)
    return Segments(edges, np.array(quotas), tuple(range(len(sizes))), tuple((s,) for s in sizes), pool)


@pytest.mark.parametrize(("size", "quota"), [(1, 1), (2, 1), (10, 3), (10, 10), (97, 96), (300_000, 2999)])
def test_exactly_the_quota_of_distinct_ascending_positions(size: int, quota: int) -> None:
    x = torch.arange(size).float()
    for step in range(20):
        selection = RandomK().select(x, span_segments(size, quota), step)
        assert selection.count == len(selection.indices) == quota
        assert (selection.indices.diff() > 0).all()
        assert int(selection.indices[0]) >= 0
        assert int(selection.indices[-1]) < size
        assert torch.equal(selection.values, x[selection.indices])


@pytest.mark.parametrize(("size", "quota"), [(7, 3), (16, 4)])
def test_every_element_has_the_same_probability(size: int, quota: int) -> None:
    draws = 3000
    segments = span_segments(size, quota)
    x, sparsifier = torch.zeros(size), RandomK(seed=3)
    hits = torch.zeros(size, dtype=torch.int64)
    for step in range(draws):
        hits[sparsifier.select(x, segments, step).indices] += 1
    p = quota / size
    # 5.5 sigma per element
    assert (hits - draws * p).abs().max() < 5.5 * math.sqrt(draws * p * (1 - p))


def test_scaled_selection_is_unbiased_and_its_error_is_known() -> None:
    size, quota, draws = 50, 8, 2000
    x = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    sums, errors = torch.zeros(size, dtype=torch.float64), []
    sparsifier, segments = RandomK(), span_segments(size, quota)
    for step in range(draws):
        kept = torch.zeros(size)
        selection = sparsifier.select(x, segments, step)
        kept[selection.indices] = selection.values
        sums += kept.double() * size / quota
        errors.append(float((x - kept).square().sum()))
    deviation = x.double().abs() * math.sqrt((size / quota - 1) / draws)
    assert ((sums / draws - x.double()).abs() < 5.5 * deviation).all()
    expected = (1 - quota / size) * float(x.square().sum())
    assert np.mean(errors) == pytest.approx(expected, abs=5 * np.std(errors) / math.sqrt(draws))


def test_ranks_agree_whatever_their_values_and_nothing_global_is_touched() -> None:
    segments = cut([1000, 5, 2000], [10, 0, 40])
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    a = RandomK(seed=5).select(torch.zeros(3005), segments, 17)
    b = RandomK(seed=5).select(torch.full((3005,), 1.0), cut([1000, 5, 2000], [10, 0, 40]), 17)
    assert torch.equal(a.indices, b.indices)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert ((a.indices < 1000) | (a.indices >= 1005)).all()


def test_seed_step_and_key_all_matter() -> None:
    def positions(seed: int, step: int, key: object) -> list[int]:
        return RandomK(seed).select(torch.zeros(10_000), span_segments(10_000, 20, key), step).indices.tolist()

    base = positions(0, 0, 0)
    assert positions(0, 0, 0) == base
    for other in (positions(1, 0, 0), positions(0, 1, 0), positions(0, 0, 1), positions(0, 0, "layer.weight")):
        assert other != base


def test_segments_do_not_disturb_each_other() -> None:
    alone = RandomK().select(torch.zeros(500), Segments(np.array([0, 500]), np.array([9]), (4,), ((500,),)), 2)
    edges, quotas = np.array([0, 300, 800]), np.array([0, 9])
    fused = RandomK().select(torch.zeros(800), Segments(edges, quotas, (3, 4), ((300,), (500,))), 2)
    assert torch.equal(alone.indices, fused.indices - 300)


def test_known_positions() -> None:
    """Pins the generator: a resumed run on another machine or version must draw the same."""
    selection = RandomK(seed=1).select(torch.zeros(1000), span_segments(1000, 5), 3)
    assert selection.indices.tolist() == [282, 286, 674, 744, 916]


def test_pool_is_dealt_out_in_proportion() -> None:
    selection = RandomK().select(torch.zeros(1600), cut([100, 500, 1000], [1, 0, 1], pool=110), 0)
    assert selection.count == 112
    assert int((selection.indices < 100).sum()) in (10, 11)
    assert int((selection.indices >= 600).sum()) in (101, 102)
    everything = RandomK().select(torch.zeros(8), cut([3, 5], [1, 1], pool=100), 0)
    assert everything.indices.tolist() == list(range(8))


def test_empty_spans() -> None:
    assert RandomK().select(torch.zeros(0), cut([0], [0]), 0).count == 0
    assert RandomK().select(torch.zeros(9), cut([9], [0], pool=4), 0).count == 0

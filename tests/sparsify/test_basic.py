"""Top-k, Random-k, a fixed threshold and no compression; their contract: `test_estimators.py`, by a sort:
`test_selection_properties.py`.
"""

from __future__ import annotations

import math

import pytest
import torch

from lightning_safusion.sparsify import NoCompression, RandomK, Threshold, TopK, span_segments
from lightning_safusion.sparsify.base import element_quota
from tests.sparsify.distributions import NUMEL, large_sample
from tests.sparsify.oracle import cut

# -- the largest ------------------------------------------------------------------------------------------------------

# Population values of ||x - TopK(x)||^2 / ||x||^2: 1 - 2 [t phi(t) + 1 - Phi(t)], 1 - d (1 + L + L^2 / 2), (1 - d)^3.
RESIDUAL_ENERGY = {
    "gaussian": {0.1: 0.560714, 0.01: 0.915508, 0.001: 0.987304},
    "laplace": {0.1: 0.404647, 0.01: 0.837910, 0.001: 0.968234},
    "uniform": {0.1: 0.729, 0.01: 0.970299, 0.001: 0.997003},
}


def test_energy_that_stays_behind_is_the_population_value() -> None:
    for name, figures in RESIDUAL_ENERGY.items():
        x = large_sample(name)
        for density, expected in figures.items():
            values = TopK().select(x, span_segments(NUMEL, element_quota(NUMEL, density)), 0).values
            left = 1 - float(values.double().square().sum() / x.double().square().sum())
            assert left == pytest.approx(expected, rel=0.01)


# -- a fixed threshold, and none --------------------------------------------------------------------------------------


def test_zero_keeps_exactly_the_non_zeros() -> None:
    x = torch.tensor([0.0, 1e-40, -0.0, -2.0, 0.0, 1.0])
    assert Threshold(0).select(x, span_segments(6, 6), 0).indices.tolist() == [1, 3, 5]


def test_no_compression_is_the_identity() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(2))
    sparsifier = NoCompression()
    assert sparsifier.quota(100, (10, 10), 0.01) == 100
    selection = sparsifier.select(x, span_segments(100, 100), 0)
    assert torch.equal(selection.values, x)
    assert selection.indices.tolist() == list(range(100))
    part = sparsifier.select(x, cut([40, 60], [0, 60]), 0)
    assert part.indices.tolist() == list(range(40, 100))
    assert sparsifier.select(x[:0], span_segments(0, 0), 0).count == 0


# -- random positions -------------------------------------------------------------------------------------------------


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


def test_ranks_agree_whatever_their_values() -> None:
    spans = torch.zeros(3005), torch.ones(3005)
    a, b = (RandomK(seed=5).select(x, cut([1000, 5, 2000], [10, 0, 40]), 17) for x in spans)
    assert torch.equal(a.indices, b.indices)
    assert ((a.indices < 1000) | (a.indices >= 1005)).all()


def test_seed_step_and_key_all_matter() -> None:
    def positions(seed: int, step: int, key: object) -> list[int]:
        return RandomK(seed).select(torch.zeros(10_000), span_segments(10_000, 20, key), step).indices.tolist()

    base = positions(0, 0, 0)
    assert positions(0, 0, 0) == base
    for other in (positions(1, 0, 0), positions(0, 1, 0), positions(0, 0, 1), positions(0, 0, "layer.weight")):
        assert other != base


def test_segments_do_not_disturb_each_other() -> None:
    alone = RandomK().select(torch.zeros(500), span_segments(500, 9, 4), 2)
    fused = RandomK().select(torch.zeros(800), cut([300, 500], [0, 9], keys=(3, 4)), 2)
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
    assert RandomK().select(torch.zeros(9), cut([9], [0], pool=4), 0).count == 0

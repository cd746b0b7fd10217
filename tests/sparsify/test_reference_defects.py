"""Defects found in published implementations: they shall not come back here.

Covers: a threshold of 0, a maximum with its sign, a density that nobody asked for, positions beyond 2^24, a quota that
    is lost to rounding. Others are promises that tests of each compressor have: distinct positions, the rank in a
    sample, magnitudes in place of values, stages of each tensor, loops that end, one element of the smallest tensors.
"""

from __future__ import annotations

import pytest
import torch

from lightning_safusion.sparsify.adtopk import ADTopk
from lightning_safusion.sparsify.base import Sparsifier, element_quota, span_segments
from lightning_safusion.sparsify.basic import Threshold
from lightning_safusion.sparsify.dgc import DGC
from lightning_safusion.sparsify.gaussiank import GaussianK
from lightning_safusion.sparsify.oktopk import OkTopk
from lightning_safusion.sparsify.redsync import RedSync
from lightning_safusion.sparsify.selection.select import segmented_view
from lightning_safusion.sparsify.sidco import SIDCo
from tests.sparsify.distributions import sample


def test_dgc_with_a_threshold_of_zero_sends_the_whole_tensor() -> None:
    """GRACE compares with >=: more than 1 - density zeros give the threshold 0, and everything is sent."""
    x = torch.zeros(10_000)
    x[::500] = torch.arange(1.0, 21.0)
    tau = DGC().thresholds(segmented_view(x, span_segments(10_000, 100)), 0)
    assert float(tau) == 0
    assert DGC().select(x, span_segments(10_000, 100), 0).indices.tolist() == list(range(0, 10_000, 500))


@pytest.mark.parametrize("x", [torch.zeros(1_000), -torch.arange(1_000.0) * 1e-6 - 1e-6], ids=["zeros", "negative"])
def test_fixed_threshold_falls_back_to_the_signed_maximum(x: torch.Tensor) -> None:
    """GRACE takes min(threshold, max(x)): a tensor without positive elements is sent whole."""
    assert int(Threshold(0.01).select(x, span_segments(1_000, 500), 0).count) == 1


@pytest.mark.parametrize("kind", [DGC, GaussianK, RedSync, SIDCo, OkTopk, ADTopk])
def test_density_is_hard_coded_in_the_compressor(kind: type[Sparsifier]) -> None:
    """ADTopk's ports use 0.01 (0.05 for top-k) whatever is asked for."""
    for density in (0.3, 0.05, 0.002):
        quota = int(density * 40_000)
        count = int(kind().select(sample("laplace", 40_000), span_segments(40_000, quota), 0).count)
        assert 0.6 * quota <= count <= quota


def test_indices_travel_through_float32() -> None:
    """OkTopk: positions beyond 2^24 lose their last bits."""
    x = torch.zeros((1 << 24) + 10)
    wanted = [(1 << 24) + 1, (1 << 24) + 3, (1 << 24) + 7]
    x[wanted] = 1.0
    selection = OkTopk().select(x, span_segments(x.numel(), 3), 0)
    assert selection.indices.tolist() == wanted


def test_quota_loses_an_element_to_the_float_product() -> None:
    """int(100 * 0.29) is 28, ceil(100 * 0.07) is 8."""
    assert element_quota(100, 0.29) == 29
    assert element_quota(100, 0.07) == 7
    assert ADTopk().quota(1_000, (10, 100), 0.29) == 290

"""Defects found in published implementations, one test each: they shall not come back here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_safusion.sparsify.adtopk import ADTopk
from lightning_safusion.sparsify.base import Segments, Sparsifier, element_quota, span_segments
from lightning_safusion.sparsify.basic import RandomK, Threshold
from lightning_safusion.sparsify.dgc import DGC
from lightning_safusion.sparsify.gaussiank import GaussianK
from lightning_safusion.sparsify.oktopk import OkTopk
from lightning_safusion.sparsify.redsync import RedSync
from lightning_safusion.sparsify.selection.select import segmented_view
from lightning_safusion.sparsify.sidco import SIDCo
from tests.sparsify.distributions import found_ratio, sample

ESTIMATORS = [DGC, GaussianK, RedSync, SIDCo, OkTopk, Threshold]


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


def test_random_k_draws_with_replacement_out_of_range_and_reseeds_the_process() -> None:
    """GRACE: torch.manual_seed in every call, repeated indices, and in TensorFlow the index d."""
    state = torch.get_rng_state()
    for step in range(50):
        indices = RandomK().select(torch.ones(20), span_segments(20, 15), step).indices
        assert len(set(indices.tolist())) == 15
        assert int(indices.min()) >= 0
        assert int(indices.max()) < 20
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", [DGC, GaussianK, RedSync, SIDCo, OkTopk, ADTopk])
def test_density_is_hard_coded_in_the_compressor(kind: type[Sparsifier]) -> None:
    """ADTopk's ports use 0.01 (0.05 for top-k) whatever is asked for."""
    for density in (0.3, 0.05, 0.002):
        quota = int(density * 40_000)
        count = int(kind().select(sample("laplace", 40_000), span_segments(40_000, quota), 0).count)
        assert 0.6 * quota <= count <= quota


def test_number_of_stages_is_ignored() -> None:
    """ADTopk's SIDCo is always single-stage."""
    x = sample("student3", 100_000)
    found = {found_ratio(SIDCo("exponential", stages, correct=False), x, 0.01) for stages in (1, 2, 3)}
    assert len(found) == 3


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_signed_values_are_compared(kind: type[Sparsifier]) -> None:
    """ADTopk's reused thresholds, and SIDCo's Gaussian without error feedback: only positive gradients are sent."""
    x = sample("laplace", 10_000)
    x[x > 0] *= 1e-4
    sparsifier = kind()
    for step in (0, 1):  # at a step that evaluates and at one that reuses
        selection = sparsifier.select(x, span_segments(10_000, 100), step)
        assert int(selection.count) >= 60
        assert bool((selection.values < 0).all())


def test_stage_count_is_shared_by_all_tensors() -> None:
    """SIDCo keeps it in the class: every tensor, and every instance, moves the stages of all others."""
    x = torch.cat([sample("uniform", 20_000), sample("laplace", 20_000)])
    segments = Segments(np.array([0, 20_000, 40_000]), np.array([200, 200]), ("a", "b"), ((20_000,), (20_000,)))
    one, other = (SIDCo("exponential", stages=1, correct=False, adapt=True, adapt_every=1) for _ in range(2))
    one.select(x, segments, 0)
    assert one.state_dict()["stages"][:, 0].tolist() == [2, 1]
    assert other.state_dict() == {}


def test_redsync_search_moves_the_wrong_way() -> None:
    """Copies test n < k/2 instead of n < k: between k/2 and k they raise the threshold further."""
    for seed in range(20):
        x = sample("gaussian", 20_000, seed=seed)
        assert 1 <= found_ratio(RedSync(), x, 0.01) <= 2


def test_redsync_trim_sends_all_survivors() -> None:
    """Copies leave out the final exact selection: 28 quotas here, hundreds in heavier tails."""
    x = sample("gpareto25", 100_000)
    assert found_ratio(RedSync("trim"), x, 0.01) > 10
    selection = RedSync("trim").select(x, span_segments(100_000, 1_000), 0)
    assert selection.indices.tolist() == sorted(torch.topk(x.abs(), 1_000).indices.tolist())


@pytest.mark.parametrize("method", ["search", "trim"])
@pytest.mark.parametrize("value", [0.0, 1.0, math.nan, math.inf])
def test_redsync_trim_never_ends(method: str, value: float) -> None:
    """Where maximum and mean agree, or are not numbers, the loops of the copies run for ever."""
    selection = RedSync(method).select(torch.full((100,), value), span_segments(100, 5), 0)  # type: ignore[arg-type]  # a value of the Literal
    assert 1 <= int(selection.count) <= 5


@pytest.mark.parametrize(("numel", "density"), [(200_000, 0.001), (200_000, 0.3), (60, 0.1)])
def test_dgc_takes_the_rank_of_the_tensor_in_the_sample(numel: int, density: float) -> None:
    """GaussianK-SGD: the k-th of a 1 % sample is the threshold of 100 densities; it raises above 0.01, and below 100
    elements the sample is empty."""
    sparsifier = DGC(max_iterations=0)
    found = [found_ratio(sparsifier, sample("gaussian", numel, seed=step), density, step) for step in range(20)]
    assert 0.7 <= np.mean(found) <= 2.5  # three of 2040 sampled: 1.5 expected


def test_indices_travel_through_float32() -> None:
    """OkTopk: positions beyond 2^24 lose their last bits."""
    x = torch.zeros((1 << 24) + 10)
    wanted = [(1 << 24) + 1, (1 << 24) + 3, (1 << 24) + 7]
    x[wanted] = 1.0
    selection = OkTopk().select(x, span_segments(x.numel(), 3), 0)
    assert selection.indices.tolist() == wanted


def test_too_few_found_are_filled_with_random_indices() -> None:
    """Cupcake: a sampled threshold that is too high makes the selection random instead of short."""
    short = 0
    for step in range(20):
        x = sample("student3", 20_000, seed=step)
        selection = DGC(max_iterations=0).select(x, span_segments(20_000, 100), step)
        best = set(torch.topk(x.abs(), 100).indices.tolist())
        assert set(selection.indices.tolist()) <= best
        short += int(selection.count) < 100
    assert short


@pytest.mark.parametrize(
    "kind", [GaussianK, SIDCo, lambda: SIDCo("exponential", 1, correct=False), DGC, RedSync, OkTopk]
)
def test_single_elements_are_never_sent(kind: type[Sparsifier]) -> None:
    """Gaussian-k divides by d - 1, SIDCo-E expects more than the mean: with error feedback such a tensor is lost."""
    sparsifier = kind()
    for step in range(3):
        assert sparsifier.select(torch.tensor([-0.25]), span_segments(1, 1), step).indices.tolist() == [0]


def test_quota_loses_an_element_to_the_float_product() -> None:
    """int(100 * 0.29) is 28, ceil(100 * 0.07) is 8."""
    assert element_quota(100, 0.29) == 29
    assert element_quota(100, 0.07) == 7
    assert ADTopk().quota(1_000, (10, 100), 0.29) == 290

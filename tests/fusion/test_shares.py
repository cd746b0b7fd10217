"""Shared quotas: what they follow, that no plan changes them, and that they outlive a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_safusion.fusion.layout import Layout
from lightning_safusion.fusion.quota import LargestCounts, Shares, guaranteed, largest_places, tensor_quotas
from lightning_safusion.sparsify import resolve_sparsifier
from lightning_safusion.sparsify.schedule import DenseStart
from tests.cluster import specs
from tests.fusion.test_state import restore, save
from tests.fusion.windows import Make, train
from tests.models import equal
from tests.quick import slow

OPTIONS: dict[str, Any] = {"quota": "shared", "collective": "allgather"}


def test_the_largest_of_small_tensors_are_counted_exactly() -> None:
    layout = Layout(tuple(specs(((40, 30), (500,), (1,), (0,), (7, 11)))))
    quotas = tensor_quotas(layout, resolve_sparsifier("topk"), 0.05)
    x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    counts = LargestCounts(x, layout, quotas).read().numpy()
    sparse = np.flatnonzero(~quotas.dense)
    places = np.concatenate([np.arange(layout.edges[i], layout.edges[i + 1]) for i in sparse])
    largest = places[x[places].abs().topk(int(quotas.counts[sparse].sum())).indices.numpy()]
    expected = np.histogram(largest, layout.edges)[0]
    assert counts[sparse].tolist() == expected[sparse].tolist()
    assert not counts[quotas.dense].any()


def test_those_of_large_tensors_are_estimated() -> None:
    layout = Layout(tuple(specs(((300, 1000), (100, 1000)))))
    quotas = tensor_quotas(layout, resolve_sparsifier("topk"), 0.1)
    x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    x[layout.edges[1] :] *= 3
    counts = LargestCounts(x, layout, quotas).read()
    exact = np.histogram(x.abs().topk(int(quotas.counts.sum())).indices.numpy(), layout.edges)[0]
    torch.testing.assert_close(counts.double(), torch.from_numpy(exact).double(), rtol=0.15, atol=0)


@given(st.data())
def test_the_largest_are_those_of_a_sort(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 60))
    values = st.floats(0, width=32, allow_infinity=False, allow_nan=False) | st.sampled_from([0.0, 1.0, 1.0 + 2**-23])
    magnitudes = np.array(data.draw(st.lists(values, min_size=size, max_size=size)), np.float32)
    weights = np.array(data.draw(st.lists(st.integers(1, 30), min_size=size, max_size=size)), np.float64)
    weights *= magnitudes > 0
    most = data.draw(st.integers(0, 40 * size + 1))
    order = np.argsort(-magnitudes, kind="stable")
    expected = [place for place in order[weights[order].cumsum() <= most] if weights[place]]
    found = [place for place in largest_places(magnitudes, weights, most) if weights[place]]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_what_is_not_finite_or_zero_counts_for_nothing(value: float) -> None:
    layout = Layout(tuple(specs(((40, 30), (50, 50)))))
    quotas = tensor_quotas(layout, resolve_sparsifier("topk"), 0.05)
    x = torch.ones(layout.numel)
    x[: layout.edges[1]] = value
    first, second = LargestCounts(x, layout, quotas).read().tolist()
    assert first == 0
    assert second > 0


def test_quotas_follow_the_largest_elements(make: Make) -> None:
    cluster = make(3, density=0.02, **OPTIONS)
    train(cluster, 40)
    for engine in cluster.engines:
        space = engine.space
        own = tensor_quotas(space.layout, space.selector.sparsifier, 0.02)
        sparse = ~own.dense
        assert (space.quotas.dense == own.dense).all()
        counts, proportional = space.quotas.counts[sparse], own.counts[sparse]
        assert (counts >= guaranteed(proportional)).all()
        assert (counts < np.diff(space.layout.edges)[sparse]).all()
        assert proportional.sum() - len(counts) <= counts.sum() <= proportional.sum()
        assert (space.quotas.counts == cluster.engines[0].space.quotas.counts).all()  # as on the other ranks
        by_index = dict(zip(space.layout.indices.tolist(), space.quotas.counts - own.counts, strict=True))
        assert by_index[3] > max(0, by_index[6])  # of gradients ten times as large as most


def test_what_is_learned_does_not_depend_on_the_plan(make: Make) -> None:
    found = [train(make(2, fusion=fusion, wire="q4", **OPTIONS), 20)[0] for fusion in ("single", "wfbp", "aligned")]
    assert all(equal(found[0], other) for other in found[1:])


def test_what_full_tensors_cannot_take_goes_to_the_others() -> None:
    layout = Layout(tuple(specs(((10, 10), (100, 100), (100, 100)))))
    own = tensor_quotas(layout, resolve_sparsifier("topk"), 0.1)
    shares = Shares()
    shares.load_state_dict(layout, [[1500.0, 400.0, 100.0]] * 2)
    full, larger, smaller = shares.apply(layout, own).counts.tolist()
    assert full == 99
    assert larger > smaller
    assert own.counts.sum() - 3 <= full + larger + smaller <= own.counts.sum()


def test_quotas_do_not_follow_gradients_of_nothing(make: Make) -> None:
    cluster = make(2, **OPTIONS)
    zeros = [[torch.zeros(spec.numel) for spec in cluster.specs] for _ in range(2)]
    for _ in range(20):
        means = cluster.step(zeros)
    assert not any(mean.any() for mean in means[0])
    space = cluster.engines[0].space
    assert (space.quotas.counts == tensor_quotas(space.layout, space.selector.sparsifier, 0.05).counts).all()


def test_a_change_of_the_density_keeps_the_shares(make: Make) -> None:
    cluster = make(2, density=DenseStart(0.05, 3), **OPTIONS)
    train(cluster, 30)
    space = cluster.engines[0].space
    shared = space.quotas.counts.copy()
    space.set_density(0.1)
    assert space.quotas.counts.sum() > shared.sum()
    space.set_density(0.05)
    assert (space.quotas.counts == shared).mean() > 0.5


@pytest.mark.parametrize("windows", [3, 17, *slow((0, 2, 5, 33))])
def test_shares_outlive_a_job(make: Make, tmp_path: Path, windows: int) -> None:
    whole, resumed = make(2, **OPTIONS), make(2, **OPTIONS)
    train(whole, windows)
    restore(resumed, save(whole, tmp_path / "a.ckpt"), tmp_path / "a.ckpt")
    assert equal(*(train(cluster, windows + 4, windows)[0] for cluster in (whole, resumed)))


def test_the_order_of_the_tensors_does_not_matter(make: Make) -> None:
    first, second = make(2, **OPTIONS), make(2, **OPTIONS)
    second.order = second.order[::2] + second.order[1::2]
    assert equal(train(first, 20)[0], train(second, 20)[0])


def test_windows_with_a_review() -> None:
    windows = [window for window in range(50) if Shares.due(window)]
    assert windows == [1, 2, 4, 8, 16, 32, 48]

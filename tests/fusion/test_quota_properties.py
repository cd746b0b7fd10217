"""Quotas of models that Hypothesis makes: what a tensor may send, what a buffer holds, what is guaranteed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_safusion.fusion.layout import Layout
from lightning_safusion.fusion.plans.plan import Group
from lightning_safusion.fusion.plans.selective import selective_counts
from lightning_safusion.fusion.quota import TensorQuotas, group_segments, selective_quotas, tensor_quotas
from lightning_safusion.sparsify import TopK
from lightning_safusion.sparsify.base import element_quota
from tests.cluster import specs

NUMELS = st.lists(st.one_of(st.integers(0, 20), st.integers(0, 10**8)), min_size=1, max_size=20)
DENSITIES = st.one_of(st.floats(1e-4, 1.0), st.sampled_from([0.01, 0.29, 0.1, 1.0]))
Model = tuple[Layout, TensorQuotas]


@st.composite
def quotas_of_models(draw: st.DrawFn) -> Model:
    """Tensors of all sizes, some of them dense, and their quotas."""
    numels = draw(NUMELS)
    dense = draw(st.lists(st.integers(0, len(numels) - 1), max_size=3))
    layout = Layout(tuple(specs([(n,) for n in numels], dense=dense)))
    return layout, tensor_quotas(layout, TopK(), draw(DENSITIES))


def group_of(draw: st.DrawFn, layout: Layout) -> Group:
    start = draw(st.integers(0, len(layout) - 1))
    return Group(start, draw(st.integers(start + 1, len(layout))))


@given(numel=st.integers(1, 10**9), density=DENSITIES)
def test_a_quota_is_the_share_of_a_tensor_and_at_least_one_element(numel: int, density: float) -> None:
    quota = element_quota(numel, density)
    assert 1 <= quota <= numel
    assert quota == 1 or abs(quota - density * numel) < 1 + 1e-6
    assert element_quota(0, density) == 0


class Asks(TopK):
    """For so much room, whatever the tensor is."""

    def __init__(self, room: Any) -> None:
        self.room = room

    def quota(self, numel: int, shape: tuple[int, ...], density: float) -> int:
        room: int = self.room
        return room


@pytest.mark.parametrize("room", [0, -3, 0.4])
def test_a_compressor_that_asks_for_no_room_is_told(room: Any) -> None:
    told = f"compressor 'topk' asks for room for {room} of the 9 elements of t0 at density 0.1: quota must return"
    with pytest.raises(ValueError, match=told):
        tensor_quotas(Layout(tuple(specs([(9,)]))), Asks(room), 0.1)


@given(model=quotas_of_models())
def test_what_may_send_everything_is_dense(model: Model) -> None:
    layout, quotas = model
    sizes = np.diff(layout.edges)
    assert (quotas.counts <= sizes).all()
    assert (quotas.counts >= np.minimum(sizes, 1)).all()
    assert (quotas.dense == (quotas.counts == sizes)).all()
    assert all(quotas.dense[place] for place, spec in enumerate(layout.specs) if spec.dense)


@given(model=quotas_of_models(), data=st.data())
def test_a_pool_keeps_the_sum_and_a_quarter_for_every_tensor(model: Model, data: st.DataObject) -> None:
    layout, quotas = model
    group = group_of(data.draw, layout)
    start, stop = group.start, group.stop
    counts = np.where(quotas.dense, 0, quotas.counts)[start:stop]
    plain = group_segments(layout, quotas, group, "tensor", False)
    pooled = group_segments(layout, quotas, group, "tensor", True)
    if plain is None or pooled is None:
        assert plain is pooled is None
        assert not counts.any()
        return
    assert plain.quotas.tolist() == counts.tolist()
    assert plain.pool == 0
    assert pooled.capacity == plain.capacity
    assert pooled.pool >= 0
    assert (pooled.quotas >= np.where(counts > 0, np.maximum(1, counts // 4), 0)).all()
    assert (pooled.quotas <= counts).all()
    assert plain.keys == pooled.keys == tuple(spec.index for spec in layout.specs[start:stop])
    assert plain.numel == pooled.numel == layout.edges[stop] - layout.edges[start]


@given(model=quotas_of_models(), data=st.data())
def test_segments_behind_fusion_are_runs_of_sparse_tensors(model: Model, data: st.DataObject) -> None:
    layout, quotas = model
    group = group_of(data.draw, layout)
    start, stop = group.start, group.stop
    segments = group_segments(layout, quotas, group, "group", False)
    dense = quotas.dense[start:stop]
    assert (segments is None) == bool(dense.all())
    if segments is None:
        return
    sparse_elements = np.diff(layout.edges)[start:stop][~dense].sum()
    assert segments.sizes[segments.quotas > 0].sum() == sparse_elements
    for size, quota in zip(segments.sizes.tolist(), segments.quotas.tolist(), strict=True):
        assert quota in (0, element_quota(size, quotas.density))


@given(model=quotas_of_models(), data=st.data())
def test_whole_tensors_are_paid_for_by_the_others_of_their_buffer(model: Model, data: st.DataObject) -> None:
    layout, quotas = model
    group = group_of(data.draw, layout)
    start, stop = group.start, group.stop
    sizes, counts = np.diff(layout.edges)[start:stop], quotas.counts[start:stop]
    upto = data.draw(st.sampled_from([0, *sizes.tolist()]))
    chosen = selective_quotas(layout, quotas, replace(group, dense_upto=upto))
    outside = [place for place in range(len(layout)) if not start <= place < stop]
    assert (chosen.counts[outside] == quotas.counts[outside]).all()
    if chosen is not quotas:
        mine = chosen.counts[start:stop]
        assert (mine[sizes <= upto] == sizes[sizes <= upto]).all()
        assert (mine <= sizes).all()
        assert (mine >= np.minimum(sizes, 1)).all()
        assert mine.sum() <= counts.sum()  # equal, unless no tensor can send more


@given(numels=NUMELS, density=st.floats(0.001, 0.5), data=st.data())
def test_what_is_left_is_shared_in_proportion(numels: Sequence[int], density: float, data: st.DataObject) -> None:
    sizes = np.array(numels, np.int64)
    counts = np.array([element_quota(n, density) for n in numels], np.int64)
    upto = data.draw(st.sampled_from(numels))
    result = selective_counts(sizes, counts, upto)
    others = (sizes > upto) & (counts < sizes)
    left = int(counts[sizes > counts].sum() - sizes[(sizes <= upto) & (sizes > counts)].sum())
    if result is None:
        assert left < others.sum()
        return
    assert result[others].sum() == (left if others.any() else 0)
    spare, room = left - int(others.sum()), int((sizes[others] - 1).sum())
    for n, count in zip(sizes[others].tolist(), result[others].tolist(), strict=True):
        assert 1 <= count <= n
        assert count == pytest.approx(1 + spare * (n - 1) / max(1, room), abs=1 + 1e-6)


def test_quotas_do_not_depend_on_the_dtype() -> None:
    layouts = [Layout(tuple(specs([(1000,), (7,)], dtype))) for dtype in (torch.float32, torch.bfloat16)]
    first, second = (tensor_quotas(layout, TopK(), 0.01).counts.tolist() for layout in layouts)
    assert first == second == [10, 1]

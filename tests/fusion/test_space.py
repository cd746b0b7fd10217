"""The numbers that planning gets of a job."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from lightning_safusion.comm import resolve_codec
from lightning_safusion.fusion.plans.plan import Plan
from tests.cluster import Cluster, conserved, settings, specs

SIZES = [(40,), (8, 10), (30,)]


def test_a_shape_follows_order_and_density() -> None:
    cluster = Cluster(2, lambda: settings(density=0.25, fusion="single"), specs([(40,), (8, 10), (3,)]))
    conserved(cluster, 3)
    space = cluster.engines[0].space
    shape = space.shape
    assert shape is space.shape  # made once, not once per window
    assert shape.numels == tuple(spec.numel for spec in space.layout.specs)
    assert shape.quotas == tuple(space.quotas.counts.tolist())
    assert (shape.world_size, shape.device, shape.hybrid, len(shape)) == (2, "cpu", False, 3)
    entries = sum(shape.quotas)
    assert shape.entry_bytes == resolve_codec("auto", 123, entries, torch.float32).nbytes / entries
    space.set_density(1.0)
    assert space.shape.all_dense
    assert not shape.all_dense
    with pytest.raises(FrozenInstanceError):
        shape.entry_bytes = 1.0  # type: ignore[misc]


def test_buffers_of_a_replaced_plan_are_forgotten() -> None:
    cluster = Cluster(2, lambda: settings(density=0.25, fusion="wfbp", collective="allgather"), specs(SIZES))
    conserved(cluster, 4)
    spaces = [engine.space for engine in cluster.engines]
    assert all(len(space.buffers) >= 3 for space in spaces)
    first = [next(iter(space.buffers.values())) for space in spaces]
    cluster.each(lambda rank: cluster.engines[rank].planner.use(Plan.from_stops([1, 3]), spaces[rank].shape))
    conserved(cluster, 1)
    for space, buffer in zip(spaces, first, strict=True):
        assert [group.stop for group in space.buffers] == [1, 3]
        assert space.buffers[buffer.group] is buffer  # it is in both plans

"""How many elements each tensor of a group may send, and at which scope they are chosen. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_safusion.fusion.layout import Layout, TensorSpec
from lightning_safusion.fusion.plans.plan import Group
from lightning_safusion.fusion.plans.selective import selective_counts
from lightning_safusion.lookup import Scope
from lightning_safusion.sparsify.base import Segments, Sparsifier, element_quota

# A tensor's guaranteed share under shared and pooled quotas: a quarter of its proportional quota; the rest is for the
# largest elements, of the model or of the span.
_GUARANTEED = 0.25


@dataclass(frozen=True, eq=False)
class TensorQuotas:
    """Room of every tensor of a layout at one density."""

    density: float
    counts: np.ndarray  #: int64 [L], elements that each tensor may send; all of them where it is dense
    dense: np.ndarray  #: bool [L], dense tensors


def guaranteed(counts: np.ndarray) -> np.ndarray:
    """int64 [L]: what is left of proportional quotas where tensors compete for the rest."""
    return np.maximum(1, (counts * _GUARANTEED).astype(np.int64))


def tensor_quotas(layout: Layout, sparsifier: Sparsifier, density: float) -> TensorQuotas:
    """Quotas of all tensors: one that may send all of its elements is dense."""
    sizes = np.diff(layout.edges)
    counts = [
        spec.numel if spec.dense or density >= 1 else min(spec.numel, sparsifier.quota(spec.numel, spec.shape, density))
        for spec in layout.specs
    ]
    quotas = np.array(counts, np.int64)
    return TensorQuotas(density, quotas, quotas >= sizes)


def selective_quotas(layout: Layout, quotas: TensorQuotas, group: Group) -> TensorQuotas:
    """The quotas with those of a group replaced by :func:`selective_counts`.

    They do not change where the other tensors cannot send as much less.
    """
    sizes, part = np.diff(layout.edges), slice(group.start, group.stop)
    chosen = selective_counts(sizes[part], quotas.counts[part], group.dense_upto) if group.dense_upto else None
    if chosen is None:
        return quotas
    counts = quotas.counts.copy()
    counts[part] = chosen
    return replace(quotas, counts=counts, dense=counts >= sizes)


def group_segments(layout: Layout, quotas: TensorQuotas, group: Group, scope: Scope, pooled: bool) -> Segments | None:
    """Segments of a group; None if every tensor of it is dense.

    ``scope="tensor"`` is sparsification before fusion (one segment and one quota per tensor), ``scope="group"`` after
    it (one per run of neighbouring sparse tensors, all of the group if none of it is dense).
    """
    start, stop = group.start, group.stop
    edges = layout.edges[start : stop + 1] - layout.edges[start]
    dense = quotas.dense[start:stop]
    if dense.all():
        return None
    specs = layout.specs[start:stop]
    if scope == "group":
        return _fused_segments(specs, quotas.density, edges, dense)
    counts = np.where(dense, 0, quotas.counts[start:stop])
    pool = 0
    if pooled:
        floors = np.where(counts > 0, guaranteed(counts), 0)
        pool = int(counts.sum() - floors.sum())
        counts = floors
    return Segments(edges, counts, tuple(s.index for s in specs), tuple(s.shape for s in specs), pool)


def _fused_segments(specs: Sequence[TensorSpec], density: float, edges: np.ndarray, dense: np.ndarray) -> Segments:
    """One segment per run of neighbouring dense or sparse tensors, quota 0 for the dense ones."""
    begins = np.flatnonzero(np.concatenate([[True], dense[1:] != dense[:-1]]))
    cuts = np.concatenate([edges[begins], edges[-1:]])
    runs = list(zip(begins.tolist(), np.diff(cuts).tolist(), strict=True))
    counts = np.array([0 if dense[b] else element_quota(n, density) for b, n in runs], np.int64)
    keys = tuple(("group", specs[b].index, n) for b, n in runs)
    return Segments(cuts, counts, keys, tuple((n,) for _, n in runs))

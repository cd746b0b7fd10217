"""How many elements each tensor of a group may send, and at which scope they are chosen.

In proportion to sizes, or shared by the tensors of a model, whatever buffers they are in: agreed by all ranks in
reviews.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.lanes import HostCopy
from lightning_safusion.fusion.layout import Layout, TensorSpec
from lightning_safusion.fusion.plans.plan import Group
from lightning_safusion.fusion.plans.selective import selective_counts
from lightning_safusion.lookup import Scope
from lightning_safusion.sparsify.base import Segments, Sparsifier, element_quota

# A tensor's guaranteed share under shared and pooled quotas: a quarter of its proportional quota; the rest is for the
# largest elements, of the model or of the span.
_GUARANTEED = 0.25
# Windows with a review: these, and one of so many.
_FIRST, _EVERY = (1, 2, 4, 8), 16
# Elements of a tensor that a review looks at, evenly spread.
_SAMPLED = 4096
# Weight of the latest review: one window's gradients, and samples, say little.
_WEIGHT = 0.25
# Share of the elements that must change places before buffers are built anew.
_WORTH = 0.05
# Magnitudes whose first bits are equal, all but so many, share a bin.
_BIN_BITS = 15
# Rounds in which the room that full tensors leave is shared again.
_ROUNDS = 8


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
    for at in np.flatnonzero(quotas < np.minimum(sizes, 1))[:1].tolist():
        raise ValueError(
            f"compressor {sparsifier.name!r} asks for room for {counts[at]!r} of the {sizes[at]} elements of "
            f"{layout.specs[at].name} at density {density:g}: quota must return a whole number of 1 or more"
        )
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


class Shares:
    """How many of the model's largest elements each tensor has, as a mean over ranks and reviews.

    A tensor's quota follows from it: a quarter of its proportional one is guaranteed, the rest is shared.
    """

    def __init__(self) -> None:
        # the order of the layout changes, for one after a window has been counted
        self._known: dict[int, float] = {}  # by registration index
        self._followed: dict[int, float] = {}  # what quotas follow, until enough of it has changed

    @staticmethod
    def due(window: int) -> bool:
        """Whether a window has a review; the same on all ranks."""
        return window in _FIRST or (window > 0 and window % _EVERY == 0)

    def review(self, counts: Tensor, layout: Layout, quotas: TensorQuotas, transport: Transport) -> bool:
        """Learns the mean over ranks of what :class:`LargestCounts` has found. Collective.

        Args:
            counts: float32 [L], this rank's; overwritten.
            quotas: In proportion to sizes.

        Returns:
            Whether quotas change so much that buffers should follow; the same on all ranks.
        """
        transport.all_reduce(counts).wait()
        if not (sums := counts.tolist()) or not any(sums):
            return False  # no gradient has a value
        for index, total in enumerate(sums):
            mean = total / transport.world_size
            self._known[index] = mean + (1 - _WEIGHT) * (self._known.get(index, mean) - mean)
        wanted, sparse = _counts(self._known, layout, quotas), ~quotas.dense
        change = np.abs(wanted - self.apply(layout, quotas).counts)[sparse].sum()
        if change <= 2 * _WORTH * quotas.counts[sparse].sum():
            return False
        self._followed = dict(self._known)
        return True

    def apply(self, layout: Layout, quotas: TensorQuotas) -> TensorQuotas:
        """The quotas that follow, from those in proportion to sizes; as many elements, but for rounding."""
        return replace(quotas, counts=_counts(self._followed, layout, quotas)) if self._followed else quotas

    def state_dict(self, layout: Layout) -> list[list[float]]:
        """Plain values in the order of the layout, the same on all ranks: what is known, and what quotas follow."""
        return [[shares[i] for i in layout.indices.tolist() if i in shares] for shares in (self._known, self._followed)]

    def load_state_dict(self, layout: Layout, state: Sequence[Sequence[float]]) -> None:
        """Restores what :meth:`state_dict` returned of a layout in the same order."""
        # each holds all tensors or none
        self._known, self._followed = (dict(zip(layout.indices.tolist(), each, strict=False)) for each in state)


def _counts(shares: Mapping[int, float], layout: Layout, quotas: TensorQuotas) -> np.ndarray:
    """int64 [L]: quotas that follow shares."""
    sparse, counts = ~quotas.dense, quotas.counts.copy()
    if not sparse.any():
        return counts
    sizes, own = np.diff(layout.edges)[sparse], counts[sparse]
    floors = guaranteed(own)
    wanted = np.array([shares[index] for index in layout.indices[sparse].tolist()])
    most = np.maximum(sizes - 1 - floors, 0)  # a tensor that becomes dense has another format
    above, room = np.clip(wanted - floors, 0, most), float(own.sum() - floors.sum())
    for _ in range(_ROUNDS):  # what a full tensor cannot take goes to the others
        if not 0 < above.sum() < room:
            break
        above = np.minimum(above * (room / above.sum()), most)
    counts[sparse] = floors + (above * min(1.0, room / max(above.sum(), 1e-9))).astype(np.int64)
    return counts


class LargestCounts:
    """How many of the largest elements of all sparse tensors each tensor has: of as many as all may send.

    Estimated from evenly spread elements of what is selected from (float32 [D]). They are copied when this is made, and
    counted when it is read: until then the host does not wait for a device. What is not finite counts for nothing.
    """

    def __init__(self, accumulated: Tensor, layout: Layout, quotas: TensorQuotas) -> None:
        edges, sparse = layout.edges.tolist(), np.flatnonzero(~quotas.dense).tolist()
        spread = [-(-(edges[i + 1] - edges[i]) // _SAMPLED) for i in sparse]
        samples = [accumulated[edges[i] : edges[i + 1] : step] for i, step in zip(sparse, spread, strict=True)]
        self._device, self._tensors = accumulated.device, len(layout.specs)
        self._sizes, self._spread = [len(each) for each in samples], np.array(spread, np.float64)
        self._indices, self._most = layout.indices[sparse], int(quotas.counts[sparse].sum())
        self._copy = HostCopy([torch.cat(samples).abs().nan_to_num_(0.0, 0.0, 0.0)]) if sparse else None

    def read(self) -> Tensor:
        """float32 [L], by registration index; waits for the copy."""
        counts = np.zeros(self._tensors)
        if self._copy is not None:
            (magnitudes,) = (copied.numpy() for copied in self._copy.read())
            owners = np.repeat(np.arange(len(self._sizes)), self._sizes)
            weights = self._spread[owners] * (magnitudes > 0)
            taken = largest_places(magnitudes, weights, self._most)
            counts[self._indices] = np.bincount(owners[taken], weights[taken], len(self._sizes))
        return torch.from_numpy(counts).to(self._device, torch.float32)


def largest_places(magnitudes: np.ndarray, weights: np.ndarray, most: int) -> np.ndarray:
    """Places of the largest magnitudes (float32 [S], finite, not negative) that together weigh at most so much.

    Of equal ones the first. Only those of one bin are sorted: sorting all takes the host ten times as long.
    """
    bins = magnitudes.view(np.int32) >> _BIN_BITS  # as such numbers are ordered, so are their bits
    above = np.bincount(bins, weights)[::-1].cumsum()
    last = len(above) - 1 - int(np.searchsorted(above, most, side="right"))  # of its bin not all may fit
    taken, tied = np.flatnonzero(bins > last), np.flatnonzero(bins == last)
    tied = tied[np.argsort(-magnitudes[tied], kind="stable")]
    room = most - weights[taken].sum()
    return np.concatenate([taken, tied[weights[tied].cumsum() <= room]])

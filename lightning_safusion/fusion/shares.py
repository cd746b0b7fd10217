"""Quotas that the tensors of a model share, whatever buffers they are in: agreed by all ranks in reviews."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.lanes import HostCopy
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.fusion.quota import TensorQuotas, guaranteed

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

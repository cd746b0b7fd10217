"""How far compression is from what convergence proofs assume of it, measured in a real window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.fusion.layout import Layout, TensorSpec
from lightning_safusion.metrics.figures import TensorSums, window_figures

if TYPE_CHECKING:
    from lightning_safusion.fusion.record import WindowRecord


class ConvergenceFigures(TensorSums):
    """How far compression is from what proofs assume of it, for each of T tensors that were sent sparse.

    ``x`` is what was selected from (gradient plus residual), ``C(x)`` what the receivers decoded, ``g`` the gradient;
    a bar is the mean over ranks. The sums, float64 [6, T], are ``||x||^2``, ``||x - C(x)||^2``, ``||gbar||^2`` (0 where
    it is not known), ``||C(xbar) - mean C(x)||^2`` (0 where ``gbar`` is not known), slices, slices of which something
    was sent.
    """

    def values(self, per_tensor: bool = True) -> dict[str, float]:
        """``contraction``, ``xi`` and ``coverage`` over all tensors, and ``<one of these>/<parameter>``.

        Args:
            per_tensor: Also those of every tensor.

        Returns:
            Plain numbers, without those that the windows say nothing about.
        """
        total = _ratios(self.sums.sum(1, keepdim=True))
        values = {key: column[0] for key, column in total.items() if column[0] == column[0]}
        if per_tensor:
            for key, column in _ratios(self.sums).items():
                values |= {f"{key}/{name}": v for name, v in zip(self.names, column, strict=True) if v == v}
        return values


def _ratios(sums: Tensor) -> dict[str, list[float]]:
    """The three figures by column; NaN where there is nothing to divide by."""
    energy, error, gradient, gap, slices, covered = sums
    return {
        "contraction": (error / energy).tolist(),
        "xi": (gap / gradient).sqrt().tolist(),
        "coverage": (covered / slices).tolist(),
    }


class Accumulated(Protocol):
    """Holds what error feedback has accumulated of each tensor."""

    layout: Layout

    def accumulated(self) -> Tensor:
        """float32 [D], in the order of ``layout``."""


@dataclass(frozen=True, eq=False)
class Before:
    """What the error feedback held before a window.

    Args:
        layout: Order of the tensors then.
        held: float32 [D], a copy.
    """

    layout: Layout
    held: Tensor

    @classmethod
    def of(cls, space: Accumulated) -> Before:
        """Copies it, between two windows."""
        return cls(space.layout, space.accumulated().clone())


def convergence_figures(record: WindowRecord, before: Before) -> ConvergenceFigures:
    """Figures of a window. Collective: two vectors of the size of the model are reduced over the ranks.

    Dense tensors are left out, and what did not go the planned way (see ``tensor_figures``).

    Args:
        record: The latest window's, between two windows.
        before: What its error feedback held when the window began.

    Returns:
        Of this rank, on the device of the gradients.
    """
    figures, layout = window_figures(record), record.layout
    sparse = record.used & (np.diff(layout.edges) > 0) & ~record.dense
    sums = torch.zeros(6, len(layout), dtype=torch.float64, device=record.device)
    if sparse.any():  # the same on all ranks
        own, gradient = _inputs(record, before)
        if gradient is not None:
            sums[2:4] = _xi(record, sparse, own, gradient)
        sums[4:] = _coverage(record, sparse)
    order = [layout.places[index] for index in sorted(layout.places)]
    sums = sums[:, order]
    sums[0], sums[1] = figures.energy, figures.error
    return ConvergenceFigures(figures.names, sums)


def _inputs(record: WindowRecord, before: Before) -> tuple[Tensor, Tensor | None]:
    """``x`` and ``g`` of this rank, float32 [D]; the gradient is not known where the memory has a momentum."""
    x = record.accumulated().clone()
    if record.forgets:
        return x, x
    x.index_add_(0, *record.sent())
    if record.decay is None:
        return x, None
    tensors = before.held.split(np.diff(before.layout.edges).tolist())
    pieces = {spec.index: piece for spec, piece in zip(before.layout.specs, tensors, strict=True)}
    then = torch.cat([x[:0], *(pieces[spec.index] for spec in record.layout.specs)])
    return x, x - record.decay * then


def _xi(record: WindowRecord, sparse: np.ndarray, x: Tensor, gradient: Tensor) -> Tensor:
    """float64 [2, L]: ``||gbar||^2`` and ``||C(xbar) - mean C(x)||^2`` of the tensors in ``sparse``."""
    sizes = np.diff(record.layout.edges)
    means = record.mean(torch.stack([x, gradient]))
    chosen = torch.from_numpy(np.repeat(sparse, sizes)).to(x.device)
    means = torch.where(chosen, means, 0.0)
    gap = torch.where(chosen, record.compress(means[0]) - record.delivered(), 0.0)
    flats = (means[1], gap)
    norms = [torch.stack(torch._foreach_norm(flat.split(sizes.tolist()), 2, dtype=torch.float64)) for flat in flats]
    return torch.stack(norms).square()


def _coverage(record: WindowRecord, sparse: np.ndarray) -> Tensor:
    """float64 [2, L]: slices of each tensor along its first dimension, and those of which something was sent."""
    layout, device = record.layout, record.device
    slices = np.array([_slices(spec) for spec in layout.specs]) * sparse
    length = torch.from_numpy(np.diff(layout.edges) // np.maximum(1, slices)).to(device)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(slices)])).to(device)
    edges = torch.from_numpy(layout.edges).to(device)
    hit = torch.zeros(int(slices.sum()) + 1, dtype=torch.bool, device=device)  # and one for all that do not count
    counted = torch.from_numpy(slices > 0).to(device)
    at, values = record.sent()
    # right: an empty tensor has the edge of its successor, and owns nothing
    places = torch.searchsorted(edges, at, right=True) - 1
    rows = starts[places] + (at - edges[places]) // length[places]
    hit[torch.where(counted[places] & (values != 0), rows, len(hit) - 1)] = True  # padding has no value
    running = torch.nn.functional.pad(hit[:-1].cumsum(0), (1, 0))
    covered = running[starts[1:]] - running[starts[:-1]]
    return torch.stack([torch.from_numpy(slices).to(device), covered]).double()


def _slices(spec: TensorSpec) -> int:
    """Slices along the first dimension, if there are others and it is the outermost in memory; else 0."""
    if len(spec.shape) < 2 or not spec.numel:
        return 0
    outermost = spec.strides is None or spec.strides[0] == spec.numel // spec.shape[0]
    return spec.shape[0] if outermost else 0

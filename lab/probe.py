"""A callback that measures what convergence proofs assume of a compressor, and its figures."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_safusion.callbacks.base import StepSampler
from lightning_safusion.fusion.layout import Layout, TensorSpec
from lightning_safusion.fusion.record import WindowRecord
from lightning_safusion.integration.readings import EngineReadings
from lightning_safusion.metrics.figures import TensorSums, window_figures


class ConvergenceFigures(TensorSums):
    """Sums from which :meth:`values` makes the figures of :class:`ConvergenceProbe`.

    ``x`` is what was selected from (gradient plus residual), ``C(x)`` what the receivers decoded, ``g`` the gradient;
    a bar is the mean over ranks. The rows of the sums, float64 [6, T], are ``||x||^2``, ``||x - C(x)||^2``,
    ``||gbar||^2`` (0 where it is not known), ``||C(xbar) - mean C(x)||^2`` (0 where ``gbar`` is not known), slices, and
    slices of which something was sent.
    """

    def values(self, per_tensor: bool = True) -> dict[str, float]:
        """``contraction``, ``xi`` and ``coverage`` over all tensors, without those that are not known.

        Args:
            per_tensor: Also ``<one of these>/<parameter>``.
        """
        names = ["", *(f"/{name}" for name in self.names)]
        sums = torch.cat([self.sums.sum(1, keepdim=True), self.sums], 1)
        energy, error, gradient, gap, slices, covered = sums if per_tensor else sums[:, :1]
        ratios = {"contraction": error / energy, "xi": (gap / gradient).sqrt(), "coverage": covered / slices}
        values: dict[str, float] = {}
        for key, ratio in ratios.items():
            values |= {key + name: value for name, value in zip(names, ratio.tolist(), strict=False) if value == value}
        return values


def by_index(flat: Tensor, layout: Layout) -> dict[int, Tensor]:
    """Copies of each tensor's part of ``flat`` [D], by registration index."""
    pieces = flat.clone().split(np.diff(layout.edges).tolist())
    return {spec.index: piece for spec, piece in zip(layout.specs, pieces, strict=True)}


def convergence_figures(record: WindowRecord, before: Mapping[int, Tensor]) -> ConvergenceFigures:
    """Figures of the latest window on this rank, between two windows. Dense tensors have none.

    A collective: two vectors of the size of the model are reduced over the ranks.

    Args:
        record: Of the window.
        before: What error feedback held when the window began, by registration index.
    """
    figures, layout = window_figures(record), record.layout
    sparse = record.used & (np.diff(layout.edges) > 0) & ~record.dense
    sums = torch.zeros(6, len(layout), dtype=torch.float64, device=record.device)
    if sparse.any():  # the same on all ranks
        own, gradient = _inputs(record, before)
        if gradient is not None:
            sums[2:4] = _xi(record, sparse, own, gradient)
        sums[4:] = _coverage(record, sparse)
    sums = sums[:, [layout.places[index] for index in sorted(layout.places)]]
    sums[0], sums[1] = figures.energy, figures.error
    return ConvergenceFigures(figures.names, sums)


def _inputs(record: WindowRecord, before: Mapping[int, Tensor]) -> tuple[Tensor, Tensor | None]:
    """``x`` and ``g`` of this rank, float32 [D]; the gradient is not known where the memory has a momentum."""
    x = record.accumulated().clone()
    if record.decay == 0:
        return x, x
    x.index_add_(0, *record.sent())
    if record.decay is None:
        return x, None
    return x, x - record.decay * torch.cat([before[spec.index] for spec in record.layout.specs])


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
    hit = torch.zeros(int(slices.sum()) + 1, dtype=torch.bool, device=device)  # the last: all that do not count
    counted = torch.from_numpy(slices > 0).to(device)
    at, values = record.sent()
    # right: an empty tensor has the edge of its successor, and owns no element
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


class ConvergenceProbe(StepSampler[ConvergenceFigures]):
    """Measures, per tensor and over all, what convergence proofs assume of a compressor; for every system.

    ``x`` is what a rank selects from (gradient plus residual), ``C(x)`` what the receivers decode of it, ``g`` the
    gradient; means are over ranks. Figures of a sampled step, over all tensors that were sent sparse:

    =============================  ====================================================================================
    ``safusion/contraction``       ``||x - C(x)||^2 / ||x||^2``, energies summed over ranks. Error feedback converges
                                   if it stays below 1 (Stich et al., NeurIPS 2018); Top-k, and Top-k in every row
                                   (ADTopk), have at most one minus the density
    ``safusion/xi``                ``||C(mean x) - mean C(x)|| / ||mean g||``: the distance to what compression of the
                                   mean would have sent (Alistarh et al., NeurIPS 2018, assumption 1). It should
                                   stay bounded
    ``safusion/coverage``          share of the slices along a tensor's first dimension (output channels, words) of
                                   which a rank sent something, mean over ranks; of tensors with two dimensions or more
    =============================  ====================================================================================

    Each is also logged as ``<key>/<parameter>``. ``mean C(x)`` is the gradient that the optimizer gets. A sampled step
    waits for the device, copies the residual, reduces two vectors of the size of the model over the ranks, and selects
    once more with a copy of this rank's compressor; other steps cost nothing. With ``memory="dgc"`` and
    ``"decoupled"``, which hold a momentum, there is no ``xi``. With plain DDP nothing is sampled.

    Args:
        every_n_steps: Optimizer steps from one sample to the next.
        per_tensor: Also log the figures of every tensor.

    Attributes:
        latest: The latest sample, summed over ranks; None before the first.

    Raises:
        ValueError: If ``every_n_steps`` is below 1.

    Example::

        probe = ConvergenceProbe(every_n_steps=100)
        Trainer(strategy=SAFusionStrategy(system="adtopk"), callbacks=[probe])
    """

    def __init__(self, every_n_steps: int = 100, per_tensor: bool = True) -> None:
        super().__init__(every_n_steps)
        self.per_tensor = per_tensor
        self.latest: ConvergenceFigures | None = None
        self._before: dict[int, Tensor] | None = None  # what error feedback held when the window began

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        engine = self._strategy(trainer).engine
        if self._sampling and engine is not None:
            self._before = by_index(engine.space.accumulated(), engine.space.layout)

    @override
    def _measure(self, strategy: EngineReadings) -> ConvergenceFigures | None:
        before, self._before = self._before, None
        if strategy.record is None or before is None:
            return None
        return convergence_figures(strategy.record, before)

    @override
    def _values(self, figures: ConvergenceFigures, step: int) -> dict[str, float]:
        self.latest = figures
        return figures.values(self.per_tensor)

"""How far compression is from what convergence proofs assume of it, measured in a real window."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.fusion.layout import Layout, TensorSpec
from lightning_safusion.metrics.figures import as_planned, held_back, travelled_whole, window_figures
from lightning_safusion.sparsify.feedback import NoMemory, ResidualMemory

if TYPE_CHECKING:
    from lightning_safusion.fusion.controller import Controller
    from lightning_safusion.fusion.generator import Generator
    from lightning_safusion.fusion.window import Window


@dataclass(frozen=True, eq=False)
class ConvergenceFigures:
    """Sums over windows, and over ranks where they have been reduced, for each of T tensors that travelled sparse.

    ``x`` is what was selected from (gradient plus residual), ``C(x)`` what the receivers decoded, ``g`` the gradient;
    a bar is the mean over ranks.

    Args:
        names: Parameter names, in registration order.
        sums: float64 [6, T]: ``||x||^2``, ``||x - C(x)||^2``, ``||gbar||^2`` (0 where it is not known),
            ``||C(xbar) - mean C(x)||^2`` (0 where ``gbar`` is not known), slices, slices of which something was sent.
    """

    names: tuple[str, ...]
    sums: Tensor

    def __add__(self, other: ConvergenceFigures) -> ConvergenceFigures:
        if self.names != other.names:
            raise ValueError(
                f"figures of {len(self.names)} and {len(other.names)} different tensors cannot be added: take those of "
                "windows between which no parameter was frozen or unfrozen"
            )
        return ConvergenceFigures(self.names, self.sums + other.sums)

    def reduced(self, reduce: Callable[[Tensor], Tensor]) -> ConvergenceFigures:
        """The sum over ranks: one reduction of 48 bytes per tensor.

        Args:
            reduce: Sums a tensor over ranks, and may do so in place; every rank must call it.
        """
        return ConvergenceFigures(self.names, reduce(self.sums.clone()))

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


@dataclass(frozen=True, eq=False)
class Before:
    """What the memory held before a window.

    Args:
        layout: Order of the tensors then.
        held: float32 [D], a copy.
    """

    layout: Layout
    held: Tensor

    @classmethod
    def of(cls, controller: Controller) -> Before:
        """Takes it down; between two windows."""
        layout = controller.generator.layout
        return cls(layout, held_back(controller.generator, layout).clone())


def convergence_figures(controller: Controller, before: Before) -> ConvergenceFigures | None:
    """Figures of the latest window. Collective: two vectors of the size of the model are reduced over the ranks.

    Tensors that travelled whole are left out, and what did not go the planned way (see ``tensor_figures``).

    Args:
        controller: The engine, between two windows.
        before: What its memory held when the window began.

    Returns:
        Of this rank, on the device of the gradients; None before the first window.
    """
    figures = window_figures(controller)
    if figures is None or controller.report is None:
        return None
    layout, window = controller.report.layout, controller.report.window
    sizes = np.diff(layout.edges)
    sparse = as_planned(controller, window) & (sizes > 0) & ~travelled_whole(window, len(layout))
    sums = torch.zeros(6, len(layout), dtype=torch.float64, device=controller.generator.device)
    if sparse.any():  # the same on all ranks
        own, gradient = _inputs(controller.generator, layout, window, before)
        if gradient is not None:
            sums[2:4] = _xi(controller, layout, window, sparse, own, gradient)
        sums[4:] = _coverage(layout, window, sparse)
    order = [layout.places[index] for index in sorted(layout.places)]
    sums = sums[:, order]
    sums[0], sums[1] = figures.energy, figures.error
    return ConvergenceFigures(figures.names, sums)


def _inputs(generator: Generator, layout: Layout, window: Window, before: Before) -> tuple[Tensor, Tensor | None]:
    """``x`` and ``g`` of this rank, float32 [D]; the gradient is not known where the memory has a momentum."""
    memory = generator.memory
    x = held_back(generator, layout).clone()
    if isinstance(memory, NoMemory):
        return x, x
    for buffer, _ in window.inflight:
        indices, values = buffer.exchange.sent()
        x[buffer.start : buffer.stop].index_add_(0, indices, values)
    if not isinstance(memory, ResidualMemory) or memory.shapes_updates:
        return x, None
    pieces = dict(
        zip(
            (spec.index for spec in before.layout.specs),
            before.held.split(np.diff(before.layout.edges).tolist()),
            strict=True,
        )
    )
    then = torch.cat([x[:0], *(pieces[spec.index] for spec in layout.specs)])
    return x, x - memory.decay * then


def _xi(
    controller: Controller, layout: Layout, window: Window, sparse: np.ndarray, x: Tensor, gradient: Tensor
) -> Tensor:
    """float64 [2, L]: ``||gbar||^2`` and ``||C(xbar) - mean C(x)||^2`` of the tensors in ``sparse``."""
    transport, generator = controller.transport, controller.generator
    means = torch.stack([x, gradient])
    transport.all_reduce(means).wait()
    means /= transport.world_size
    chosen = torch.from_numpy(np.repeat(sparse, np.diff(layout.edges))).to(x.device)
    means = torch.where(chosen, means, 0.0)
    scale = 1.0 if window.scale is None else window.scale.reciprocal()
    delivered = torch.cat([grad.float() for grad in window.grads if grad is not None]) * scale
    sparsifier = copy.deepcopy(generator.sparsifier)  # what it learns from this is not for the next step
    compressed = torch.zeros_like(x)
    for buffer, _ in window.inflight:
        if buffer.segments is not None:
            span = slice(buffer.start, buffer.stop)
            selection = sparsifier.select(means[0, span].contiguous(), buffer.segments, window.step)
            count = torch.as_tensor(selection.count, device=x.device)
            valid = torch.arange(len(selection.indices), device=x.device) < count
            compressed[span].index_add_(0, selection.indices, torch.where(valid, selection.values, 0.0))
    gap = torch.where(chosen, compressed - delivered, 0.0)
    sizes = np.diff(layout.edges).tolist()
    norms = [torch.stack(torch._foreach_norm(flat.split(sizes), 2, dtype=torch.float64)) for flat in (means[1], gap)]
    return torch.stack(norms).square()


def _coverage(layout: Layout, window: Window, sparse: np.ndarray) -> Tensor:
    """float64 [2, L]: slices of each tensor along its first dimension, and those of which something was sent."""
    slices = np.array([_slices(spec) for spec in layout.specs]) * sparse
    device = window.inflight[0][0].exchange.device
    length = torch.from_numpy(np.diff(layout.edges) // np.maximum(1, slices)).to(device)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(slices)])).to(device)
    edges = torch.from_numpy(layout.edges).to(device)
    hit = torch.zeros(int(slices.sum()) + 1, dtype=torch.bool, device=device)  # and one for all that do not count
    counted = torch.from_numpy(slices > 0).to(device)
    for buffer, _ in window.inflight:
        indices, values = buffer.exchange.sent()
        at = indices + buffer.start
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

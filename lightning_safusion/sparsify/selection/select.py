"""Segmented selection: the entry points that sparsifiers are written with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Reads, Segments, Selection, Sparsifier, constant_of_segments
from lightning_safusion.sparsify.selection.native import NativeView
from lightning_safusion.sparsify.selection.survey import SpanSurvey
from lightning_safusion.sparsify.selection.torch_view import TorchView
from lightning_safusion.sparsify.selection.view import NumpyView, SegmentedView, device_constant

__all__ = ["SegmentedView", "ThresholdSparsifier", "empty_selection", "largest", "pooled", "segmented_view"]


def segmented_view(x: Tensor, segments: Segments, survey: SpanSurvey | None = None) -> SegmentedView:
    """Reads ``x`` segment by segment: with compiled kernels or NumPy on the CPU, elsewhere with PyTorch.

    Args:
        x: float32 [N], contiguous.
        segments: The cut of ``x`` and the quotas.
        survey: What is known of ``x``, as :meth:`Sparsifier.select` may be given it. It saves time and changes no
            result; for another tensor than the one that was surveyed (a copy, a slice, a product) it is ignored.

    Raises:
        TypeError: If ``x`` is not a contiguous float32 vector.
        ValueError: If the segments do not cover ``x``.
    """
    if x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous():
        raise TypeError(
            f"selection reads a contiguous float32 vector, got {x.dtype} of shape {tuple(x.shape)} and strides"
            f" {x.stride()}: convert it with x.float().contiguous().view(-1)"
        )
    if x.numel() != segments.numel:
        raise ValueError(f"segments of {segments.numel} elements do not fit a span of {x.numel()}")
    if x.device.type == "cpu":
        compiled = native.usable() and x.numel() < native.MOST_ELEMENTS
        return NativeView(x, segments, survey) if compiled else NumpyView(x, segments)
    return TorchView(x, segments)


def empty_selection(device: torch.device) -> Selection:
    """The selection of nothing."""
    positions = torch.empty(0, dtype=torch.int64, device=device)
    return Selection(positions, positions.to(torch.float32), 0)


def largest(x: Tensor, segments: Segments, survey: SpanSurvey | None = None) -> Selection:
    """The quota of every segment from its largest elements, and the pool from the largest of all others.

    Of equals the first ones are taken. For the arguments see :func:`segmented_view`.
    """
    if segments.capacity == 0 or segments.numel == 0:
        return empty_selection(x.device)
    view = segmented_view(x, segments, survey)
    if not segments.pool:
        return view.top()
    chosen = view.top_pooled()
    return pooled(x, segments, partial(largest, survey=survey), survey) if chosen is None else chosen


def pooled(
    x: Tensor, segments: Segments, choose: Callable[[Tensor, Segments], Selection], survey: SpanSurvey | None = None
) -> Selection:
    """Selects the quota of every segment exactly, and the pool from what ``choose`` finds in the span as one segment.

    Segments with quota 0 are left out. For ``x`` and ``survey`` see :func:`segmented_view`.
    """
    if segments.numel == 0 or not segments.quotas.any():
        return empty_selection(x.device)
    runs, together = _live(segments)
    if together is None:
        floors = segmented_view(x, segments.unpooled, survey).top()
        room = min(segments.capacity, segments.numel) - len(floors.indices)
        return segmented_view(x, segments, survey).merge(floors, choose(x, segments.as_one), room)
    chosen = pooled(torch.cat([x[start:stop] for start, stop in runs]), together, choose)
    stops, distances = _way_back(segments, x.device)
    moved = distances[torch.searchsorted(stops, chosen.indices, right=True)]
    return Selection(chosen.indices + moved, chosen.values, chosen.count)


@constant_of_segments
def _live(segments: Segments) -> tuple[list[tuple[int, int]], Segments | None]:
    """The runs of segments with a quota, and the cut of these when they are moved together; None if all have one."""
    live = (segments.quotas > 0) | (segments.sizes == 0)
    if live.all():
        return [(0, segments.numel)], None
    changes = np.flatnonzero(np.diff(live, prepend=False, append=False))
    bounds = segments.edges[changes].reshape(-1, 2)
    runs = [(start, stop) for start, stop in bounds.tolist() if start < stop]
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(segments.sizes[live])])
    keys, shapes = tuple(compress(segments.keys, live)), tuple(compress(segments.shapes, live))
    return runs, Segments(edges, segments.quotas[live], keys, shapes, segments.pool)


@constant_of_segments
def _way_back(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [R] each: where the runs end when they are moved together, and how far each was moved."""
    runs = np.array(_live(segments)[0], np.int64)
    stops = (runs[:, 1] - runs[:, 0]).cumsum()
    return device_constant(stops, device), device_constant(runs[:, 1] - stops, device)


class ThresholdSparsifier(Sparsifier):
    """Sends what exceeds a threshold per segment; a subclass says how the threshold is found."""

    reads: ClassVar[Reads] = "view"

    @abstractmethod
    def thresholds(self, view: SegmentedView, step: int) -> Tensor:
        """float32 [M], threshold on the magnitude of each segment, on the device of the span."""

    def select(self, x: Tensor, segments: Segments, step: int, survey: SpanSurvey | None = None) -> Selection:
        if segments.pool:
            known = {} if survey is None else {"survey": survey}  # `select` of a subclass may take none
            return pooled(x, segments, lambda span, whole: self.select(span, whole, step, **known), survey)
        if segments.capacity == 0 or segments.numel == 0:
            return empty_selection(x.device)
        view = segmented_view(x, segments, survey)
        return view.take(self.thresholds(view, step))

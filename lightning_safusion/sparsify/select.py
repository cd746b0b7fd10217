"""Segmented selection: the entry points that sparsifiers are written with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_safusion import native
from lightning_safusion.kernels import MOST_ELEMENTS, serves
from lightning_safusion.sparsify.base import Segments, Selection, Sparsifier
from lightning_safusion.sparsify.select_native import NativeView
from lightning_safusion.sparsify.select_numpy import NumpyView
from lightning_safusion.sparsify.select_torch import TorchView
from lightning_safusion.sparsify.view import SegmentedView, device_constant

__all__ = ["SegmentedView", "ThresholdSparsifier", "empty_selection", "pooled", "segmented_view"]


def segmented_view(x: Tensor, segments: Segments) -> SegmentedView:
    """Reads ``x`` segment by segment: with compiled kernels or NumPy on the CPU, with Triton on CUDA devices, with
    PyTorch elsewhere.

    Args:
        x: float32 [N], contiguous.
        segments: The cut of ``x`` and the quotas.
    """
    if x.device.type == "cpu":
        compiled = native.usable() and x.numel() < native.MOST_ELEMENTS
        return NativeView(x, segments) if compiled else NumpyView(x, segments)
    if serves(x.device) and x.numel() <= MOST_ELEMENTS:
        from lightning_safusion.kernels.view import TritonView  # imports Triton

        return TritonView(x, segments)
    return TorchView(x, segments)


def empty_selection(device: torch.device) -> Selection:
    """The selection of nothing."""
    return Selection(torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, device=device), 0)


def pooled(x: Tensor, segments: Segments, choose: Callable[[Tensor, Segments], Selection]) -> Selection:
    """Selects the quota of every segment exactly, and the pool from what ``choose`` finds in the whole span.

    Segments with quota 0 take no part.

    Args:
        x: float32 [N], contiguous.
        segments: The cut of ``x``, the quotas and the pool.
        choose: Selects from a span of one segment.
    """
    if segments.capacity == 0 or segments.numel == 0 or not segments.quotas.any():
        return empty_selection(x.device)
    left_out = (segments.quotas == 0) & (segments.sizes > 0)
    if left_out.any():
        return _pooled_among(x, segments, ~left_out, choose)
    if "pooled" not in segments.cache:
        segments.cache["pooled"] = replace(segments, pool=0, cache={}), _as_one(segments)
    own, whole = segments.cache["pooled"]
    floors = segmented_view(x, own).top()
    room = min(segments.capacity, segments.numel) - len(floors.indices)
    return segmented_view(x, segments).merge(floors, choose(x, whole), room)


def _as_one(segments: Segments) -> Segments:
    """The span as a single segment."""
    quota = min(segments.capacity, segments.numel)
    edges = np.array([0, segments.numel], np.int64)
    return Segments(edges, np.array([quota], np.int64), (segments.keys,), ((segments.numel,),))


def _pooled_among(
    x: Tensor, segments: Segments, live: np.ndarray, choose: Callable[[Tensor, Segments], Selection]
) -> Selection:
    """The pooled selection from the ``live`` segments (bool [M]) moved together."""
    places = np.flatnonzero(live)
    members = np.flatnonzero(np.repeat(live, segments.sizes))
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(segments.sizes[live])])
    keys, shapes = tuple(segments.keys[i] for i in places), tuple(segments.shapes[i] for i in places)
    index = device_constant(members, x.device)
    chosen = pooled(x[index], Segments(edges, segments.quotas[live], keys, shapes, segments.pool), choose)
    return Selection(index[chosen.indices], chosen.values, chosen.count)


class ThresholdSparsifier(Sparsifier):
    """Sends what exceeds a threshold per segment; a subclass says how the threshold is found."""

    #: Whether magnitudes equal to the threshold are sent too.
    inclusive: ClassVar[bool] = False

    @abstractmethod
    def thresholds(self, view: SegmentedView, step: int) -> Tensor:
        """float32 [M], threshold on the magnitude of each segment, on the device of the span."""

    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:
        if segments.pool:
            return pooled(x, segments, lambda span, whole: self.select(span, whole, step))
        if segments.capacity == 0 or segments.numel == 0:
            return empty_selection(x.device)
        view = segmented_view(x, segments)
        return view.take(self.thresholds(view, step), inclusive=self.inclusive)

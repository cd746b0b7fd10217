"""Exact Top-k (Aji & Heafield 2017; Stich et al. 2018; Alistarh et al. 2018)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from lightning_safusion.sparsify.base import Segments, Selection, Sparsifier
from lightning_safusion.sparsify.selection.select import empty_selection, pooled, segmented_view
from lightning_safusion.sparsify.selection.survey import SpanSurvey


class TopK(Sparsifier):
    """Sends the ``quota`` elements of the largest magnitude of every segment, the first ones among equals.

    The selection error is bounded: ``||x - TopK(x)||^2 <= (1 - k/d) ||x||^2``.
    """

    name: ClassVar[str] = "topk"
    estimates: ClassVar[bool] = False

    def select(self, x: Tensor, segments: Segments, step: int, survey: SpanSurvey | None = None) -> Selection:
        if segments.pool:
            chosen = segmented_view(x, segments, survey).top_pooled()
            if chosen is not None:
                return chosen
            known = {} if survey is None else {"survey": survey}  # `select` of a subclass may take none
            return pooled(x, segments, lambda span, whole: self.select(span, whole, step, **known), survey)
        if segments.capacity == 0 or segments.numel == 0:
            return empty_selection(x.device)
        return segmented_view(x, segments, survey).top()

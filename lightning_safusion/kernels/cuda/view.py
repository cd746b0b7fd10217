"""Segmented selection on a CUDA device with the Triton kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from lightning_safusion.kernels.cuda import selection, statistics
from lightning_safusion.kernels.cuda.launch import BLOCK, Chunks, launch
from lightning_safusion.kernels.cuda.selection import FIRST_BINS, NEXT_BINS
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.selection.torch_view import TorchView
from lightning_safusion.sparsify.selection.view import SegmentedView, device_constant

_BINS = FIRST_BINS + 2 * NEXT_BINS


class TritonView(SegmentedView):
    """Selection in fixed shapes and few launches, from at most ``MOST_ELEMENTS`` elements, without waiting."""

    def __init__(self, x: Tensor, segments: Segments) -> None:
        self.x, self.segments = x, segments
        self._chunks = Chunks.of(segments, x.device)
        self._floats = x.detach()
        self._bits = self._floats.view(torch.int32)

    # -- statistics ------------------------------------------------------------------------------------------------

    def moments(self, *, magnitudes: bool = False) -> tuple[Tensor, Tensor]:
        first, second = self._reduce(statistics.chunk_moments, 2, self._floats, ABSOLUTE=magnitudes)
        return first, second

    def log_abs_sums(self) -> tuple[Tensor, Tensor]:
        total, present = self._reduce(statistics.chunk_logarithms, 2, self._floats)
        return total, present.long()

    def abs_max(self) -> Tensor:
        (largest,) = self._reduce(statistics.chunk_largest, 1, self._bits)
        return largest.int().view(torch.float32)

    def count_above(self, thresholds: Tensor, enough: Tensor | None = None) -> Tensor:
        (number,) = self._reduce(statistics.chunk_counts, 1, self._bits, thresholds=thresholds)
        return number.long()

    def tail_moments(self, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        number, first, second = self._reduce(statistics.chunk_excesses, 3, self._floats, thresholds=thresholds)
        return number.long(), first, second

    def _reduce(
        self, kernel: Any, rows: int, elements: Tensor, *, thresholds: Tensor | None = None, **constants: Any
    ) -> Tensor:
        """float64 [rows, M]: what the kernel writes for every chunk, combined over the chunks of each segment."""
        chunks, every = self._chunks, len(self.segments)
        partial = torch.empty(rows, chunks.count, dtype=torch.float64, device=elements.device)
        limits = [] if thresholds is None else [chunks.active, thresholds.float().contiguous()]
        launch(kernel, chunks.count, elements, chunks.table, *limits, partial, chunks.count, **constants, BLOCK=BLOCK)
        whole = chunks.segments == every
        out = (torch.empty if whole else torch.zeros)(rows, every, dtype=torch.float64, device=elements.device)
        arrays, sizes = (partial, chunks.spans, chunks.active, out), (chunks.count, chunks.segments, every)
        options = {"LARGEST": kernel is statistics.chunk_largest, "CHUNKS": triton.next_power_of_2(chunks.longest)}
        launch(statistics.combine, rows * chunks.segments, *arrays, *sizes, **options)
        return out

    # -- selection -------------------------------------------------------------------------------------------------

    def kth_largest(self, ranks: np.ndarray) -> Tensor:
        chunks = self._chunks
        kth = torch.full((len(self.segments),), torch.inf, device=self.x.device)
        if chunks.count == 0:
            return kth
        wanted = device_constant(ranks, self.x.device)[chunks.active]
        histograms, states = self._search(wanted.int(), None)
        found = torch.empty(chunks.segments, dtype=torch.int32, device=self.x.device)
        launch(selection.limits, chunks.segments, histograms, states, found, chunks.segments, BINS=NEXT_BINS)
        return kth.index_copy_(0, chunks.active, torch.where(wanted > 0, found.view(torch.float32), torch.inf))

    def top(self) -> Selection:
        indices, values, _ = self._select(None)
        return Selection(indices, values, self._chunks.capacity)

    def take(self, thresholds: Tensor) -> Selection:
        return Selection(*self._select(thresholds.float().contiguous()))

    def merge(self, floors: Selection, others: Selection, room: int) -> Selection:
        return TorchView(self.x, self.segments).merge(floors, others, room)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _search(self, ranks: Tensor, thresholds: Tensor | None) -> tuple[Tensor, Tensor]:
        """Narrows down the limit of every segment.

        Args:
            ranks: int32 [A], elements wanted of each active segment.
            thresholds: float32 [M], what they must exceed.

        Returns:
            int32 [A, NEXT_BINS], the histogram of the last digit, and int32 [2, 4, A], what ``narrow`` has written.
        """
        chunks = self._chunks
        zeros = torch.zeros(chunks.segments * (_BINS + 1), dtype=torch.int32, device=self.x.device)
        sizes = [chunks.segments * size for size in (FIRST_BINS, NEXT_BINS, NEXT_BINS, 1)]
        first, second, third, largest = zeros.split(sizes)
        states = torch.empty(2, 4, chunks.segments, dtype=torch.int32, device=self.x.device)
        limited = thresholds is not None
        span = (self._bits, chunks.table, chunks.active, thresholds if limited else self._floats)
        options = {"LIMITED": limited, "BLOCK": BLOCK}
        launch(selection.survey, chunks.count, *span, first, largest, chunks.count, **options, BINS=FIRST_BINS)
        for level, before, after, bins in ((1, first, second, FIRST_BINS), (2, second, third, NEXT_BINS)):
            arrays, shape = (ranks, before, after, largest, states), (chunks.count, chunks.segments)
            digits = {"LEVEL": level, "BINS_BEFORE": bins, "BINS": NEXT_BINS}
            launch(selection.narrow, chunks.count, *span, *arrays, *shape, **options, **digits)
        return third, states

    def _select(self, thresholds: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Positions (int64) and values (float32) in the shape of the quotas, and the number of valid ones (int64)."""
        chunks, device = self._chunks, self.x.device
        indices = torch.empty(chunks.capacity, dtype=torch.int64, device=device)
        values = torch.empty(chunks.capacity, device=device)
        if chunks.count == 0:
            return indices, values, torch.zeros((), dtype=torch.int64, device=device)
        histograms, states = self._search(chunks.quotas, thresholds)
        words = torch.empty(2, chunks.blocks, BLOCK // 32, dtype=torch.int32, device=device)
        counts = torch.empty(2, chunks.count, dtype=torch.int32, device=device)
        total = torch.empty((), dtype=torch.int64, device=device)
        span, marks = (self._bits, chunks.table), (states, words, counts)
        sizes = (chunks.count, chunks.segments, chunks.blocks)
        launch(selection.mark, chunks.count, *span, histograms, *marks, *sizes, BLOCK=BLOCK, BINS=NEXT_BINS)
        arrays = (*span, chunks.spans, *marks, indices, values.view(torch.int32), total)
        powers = {"CHUNKS": triton.next_power_of_2(chunks.longest), "SEGMENTS": triton.next_power_of_2(chunks.segments)}
        launch(selection.write, chunks.count, *arrays, *sizes, chunks.capacity, BLOCK=BLOCK, **powers)
        return indices, values, total

"""The contract of a segmented view: statistics of, and selections from, a span that is cut into segments.

Sparsifiers are written with it. They see tensors of one number per segment on the device of the span: one code for CPU
and accelerators, which never waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.sparsify.base import Segments, Selection, constant_of_segments

#: The bits of a float32 without its sign. As integers they order magnitudes as the floats do, and NaN above infinity.
MAGNITUDE_BITS = 0x7FFFFFFF


def device_constant(array: np.ndarray, device: torch.device) -> Tensor:
    """Copies a small host array to ``device`` without making the host wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@constant_of_segments
def sizes_and_quotas(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor]:
    """float64 [M] each, on the device."""
    sizes, quotas = (device_constant(array.astype(np.float64), device) for array in (segments.sizes, segments.quotas))
    return sizes, quotas


def mean_and_variance(count: Tensor, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance from sums."""
    mean = total / count
    return mean, ((squares - total * mean) / (count - 1).clamp(min=1)).clamp(min=0)


class SegmentedView(ABC):
    """Reads a span segment by segment.

    Every result of shape [M] is a tensor on the device of ``x``; its entries for segments with quota 0 or without
    elements carry no meaning. Magnitudes are ordered by their bits: NaN is larger than infinity, and of equal ones the
    first comes first. All backends select the same elements.

    Attributes:
        x: float32 [N], contiguous. Not changed.
        segments: The cut of ``x`` and the quotas.
    """

    x: Tensor
    segments: Segments

    @property
    def sizes(self) -> Tensor:
        """float64 [M], elements of each segment."""
        return sizes_and_quotas(self.segments, self.x.device)[0]

    @property
    def quotas(self) -> Tensor:
        """float64 [M], room of each segment."""
        return sizes_and_quotas(self.segments, self.x.device)[1]

    @abstractmethod
    def moments(self, *, magnitudes: bool = False) -> tuple[Tensor, Tensor]:
        """float64 [M] each: sums of the elements, or of their magnitudes, and of the squares."""

    def abs_sums(self) -> Tensor:
        """float64 [M], sum of the magnitudes."""
        return self.moments(magnitudes=True)[0]

    @abstractmethod
    def log_abs_sums(self) -> tuple[Tensor, Tensor]:
        """float64 [M], sum of ln |x| over the non-zero elements, and int64 [M], how many these are."""

    @abstractmethod
    def abs_max(self) -> Tensor:
        """float32 [M], largest magnitude."""

    @abstractmethod
    def count_above(self, thresholds: Tensor, enough: Tensor | None = None) -> Tensor:
        """int64 [M], elements with a magnitude strictly above a threshold.

        Args:
            thresholds: float32 [M].
            enough: float64 [M]. For a segment with more than that any number above it may be returned.
        """

    @abstractmethod
    def tail_moments(self, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Moments of the exceedances ``y = |x| - threshold`` over the elements above ``thresholds`` (float32 [M]).

        Returns:
            Their number (int64 [M]), their sum and the sum of their squares (float64 [M]).
        """

    @abstractmethod
    def kth_largest(self, ranks: np.ndarray) -> Tensor:
        """float32 [M], exact ``ranks``-th largest magnitude; int64 [M] in 0..size, 0 gives +infinity."""

    def below_kth(self, ranks: np.ndarray) -> Tensor:
        """float32 [M], the threshold next below the ``ranks``-th largest magnitude, which exceeds it.

        0 stays 0: of a segment that is mostly zero only non-zeros exceed it.
        """
        kth = self.kth_largest(ranks)
        return torch.nextafter(kth, torch.zeros_like(kth))

    @abstractmethod
    def take(self, thresholds: Tensor) -> Selection:
        """Selects what exceeds thresholds (float32 [M]): of every segment with a quota at least one, at most the quota.

        A segment with more than its quota keeps exactly its quota largest; one with none sends its largest element. A
        threshold that is NaN selects none.
        """

    @abstractmethod
    def top(self) -> Selection:
        """Selects exactly the quota largest elements of every segment."""

    def top_pooled(self) -> Selection | None:
        """The largest elements of every segment up to its quota, and the largest of all others up to the pool.

        Returns:
            The selection; None where it takes more than one pass over the span.
        """
        return None

    @abstractmethod
    def merge(self, floors: Selection, others: Selection, room: int) -> Selection:
        """All of ``floors`` (which has no padding), and the ``room`` largest of ``others`` that are not among them."""

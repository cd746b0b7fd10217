"""DGC: a threshold read off a small sample (Lin et al., "Deep Gradient Compression", ICLR 2018, section 3)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.sparsify.base import Reads, Segments, stable_hash
from lightning_safusion.sparsify.selection.select import SegmentedView, ThresholdSparsifier, segmented_view


class DGC(ThresholdSparsifier):
    """Sampled threshold with exact re-selection.

    Of each segment a strided sample is drawn, and the smallest of the sample's top ``density`` share of magnitudes is
    the threshold for the whole segment. More than the quota is cut exactly, to Top-k (the paper's hierarchical
    selection); a threshold that too few elements exceed is lowered step by step.

    The relative spread of the number found is about ``1 / sqrt(tail_samples)``, whatever the distribution.

    Args:
        sample_ratio: Share of the elements that is sampled, in (0, 1]. The paper uses 0.001 to 0.01.
        tail_samples: The sample is made large enough to hold at least this many elements above the threshold.
            The authors' implementation uses 2; 170 keep the number found within 0.8 to 1.3 quotas with 99 %.
        lower: Fewer than ``lower * quota`` elements found lower the threshold by this factor, in (0, 1).
        max_iterations: How often the threshold may be lowered; 0 trusts the sample.
        seed: With the step and the segment's key, decides where the strided sample starts.
    """

    name: ClassVar[str] = "dgc"
    reads: ClassVar[Reads] = "span"

    def __init__(
        self,
        sample_ratio: float = 0.01,
        tail_samples: int = 2,
        lower: float = 0.8,
        max_iterations: int = 10,
        seed: int = 0,
    ) -> None:
        if not 0 < sample_ratio <= 1:
            raise ValueError(f"sample_ratio must be in (0, 1], got {sample_ratio}")
        if tail_samples < 1:
            raise ValueError(f"tail_samples must be at least 1, got {tail_samples}")
        if not 0 < lower < 1:
            raise ValueError(f"lower must be between 0 and 1, got {lower}")
        if max_iterations < 0:
            raise ValueError(f"max_iterations must not be negative, got {max_iterations}; 0 trusts the sample")
        self.sample_ratio = sample_ratio
        self.tail_samples = tail_samples
        self.lower = lower
        self.max_iterations = max_iterations
        self.seed = seed

    def thresholds(self, view: SegmentedView, step: int) -> Tensor:
        tau = self._sampled(view, step)
        for _ in range(self.max_iterations):
            few = (view.count_above(tau) < self.lower * view.quotas) & (tau > 0)
            if view.readable and not few.any():
                break
            tau = torch.where(few, tau * self.lower, tau)
        return tau

    def _sampled(self, view: SegmentedView, step: int) -> Tensor:
        segments = view.segments
        strides = sample_strides(segments, self.sample_ratio, self.tail_samples)
        if (strides == 1).all():  # small segments: the sample is everything
            return view.below_kth(np.minimum(segments.quotas, segments.sizes))
        pairs = zip(segments.keys, strides.tolist(), strict=True)
        starts = np.array([sample_start(self.seed, step, key, stride) for key, stride in pairs], np.int64)
        counts = -(-np.maximum(segments.sizes - starts, 0) // strides)
        ranks = -(-segments.quotas * counts // np.maximum(segments.sizes, 1))  # ceil(density * samples), in integers
        runs = zip(segments.edges[:-1] + starts, segments.edges[1:], strides, strict=True)
        sample = torch.cat([view.x[min(start, stop) : stop : stride].abs() for start, stop, stride in runs])
        edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        sampled = Segments(edges, ranks, segments.keys, tuple((int(count),) for count in counts))
        return segmented_view(sample, sampled).below_kth(ranks)


def sample_strides(segments: Segments, sample_ratio: float, tail_samples: int) -> np.ndarray:
    """Distances between sampled elements, int64 [M].

    The largest stride that is 1 modulo 8 and samples enough; being odd, it is coprime to row lengths that are powers
    of two, so that the sample does not run down a column.
    """
    sizes, quotas = np.maximum(segments.sizes, 1), np.maximum(segments.quotas, 1)
    wanted = np.maximum(np.ceil(sample_ratio * sizes).astype(np.int64), -(-tail_samples * sizes // quotas))
    return np.asarray(8 * (np.maximum(sizes // wanted - 1, 0) // 8) + 1)


def sample_start(seed: int, step: int, key: Hashable, stride: int) -> int:
    """First sampled element, in [0, stride): a pure function of its arguments, in every process."""
    return stable_hash(f"{seed}/{step}/{key!r}") % stride

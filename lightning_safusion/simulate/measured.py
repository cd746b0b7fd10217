"""What was measured on a group of workers, as functions of sizes."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np

from lightning_safusion.comm.cost import LinearCost, fit_linear


@dataclass(frozen=True)
class CollectiveSample:
    """Collectives of one size.

    Args:
        nbytes: Of one worker's message, or of the buffer that is reduced.
        alone: Seconds of one that nothing else goes on beside.
        queued: Seconds between the ends of two that were launched at once; the latency of one hides behind another.
        processor: Seconds of a core that one alone takes on each worker.
        processor_queued: The same of one in a queue.
    """

    nbytes: int
    alone: float
    queued: float
    processor: float
    processor_queued: float


@dataclass(frozen=True)
class CollectiveTimes:
    """One kind of collective, by the bytes of its buffers (two or more, rising), on straight lines between them."""

    samples: tuple[CollectiveSample, ...]

    def at(self, nbytes: float) -> CollectiveSample:
        """What one of ``nbytes`` takes."""
        rows = self._table
        place = int(np.clip(np.searchsorted(rows[:, 0], nbytes), 1, len(rows) - 1))
        low, high = rows[place - 1], rows[place]
        share = max(0.0, (nbytes - low[0]) / (high[0] - low[0]))
        _, *values = np.maximum(low + share * (high - low), 0.0).tolist()
        return CollectiveSample(int(nbytes), *values)

    @cached_property
    def _table(self) -> np.ndarray:
        return np.array([astuple(sample) for sample in self.samples], np.float64)

    @cached_property
    def line(self) -> LinearCost:
        """The line through them, of one that runs alone."""
        return fit_linear([(sample.nbytes, sample.alone) for sample in self.samples])


@dataclass(frozen=True)
class StageCost:
    """Seconds of a core that one stage takes for a buffer.

    Args:
        fixed: For each buffer.
        per_tensor: For each tensor in it.
        per_element: For each element in it, or for each entry that is decoded.
    """

    fixed: float = 0.0
    per_tensor: float = 0.0
    per_element: float = 0.0

    def __call__(self, tensors: int, elements: float) -> float:
        """Seconds for a buffer."""
        return self.fixed + self.per_tensor * tensors + self.per_element * elements


@dataclass(frozen=True)
class Host:
    """Processors that do all the work of a worker, and that all workers of a machine may share.

    Args:
        cores: For each worker.
        forward: Share of the forward pass of the trace for which it has a core.
        backward: The same of the backward pass.
        optimizer: The same of what follows.
        asleep: Share of the rest for which it sleeps (a paced job); the other part, it waited for a core.
        hook: Seconds that a gradient costs the engine, besides what follows.
        ahead: Selection before fusion, packing and the launch of the collective.
        behind: The same after fusion.
        decode: Decoding, by the entries of all workers.
        drain: Seconds that the end of a window costs besides, by the number of buffers.
    """

    cores: float
    forward: float = 1.0
    backward: float = 1.0
    optimizer: float = 1.0
    asleep: float = 1.0
    hook: float = 0.0
    ahead: StageCost = StageCost()
    behind: StageCost = StageCost()
    decode: StageCost = StageCost()
    drain: LinearCost = LinearCost(0.0, 0.0)

"""The numbers that planners get: costs of buffers, and the shape of the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_safusion.comm.cost import LinearCost

#: Bytes of DDP's buckets, and of its first one.
DDP_BUCKET, DDP_FIRST_BUCKET = 25 * 2.0**20, 2.0**20


@dataclass(frozen=True)
class SelectionCost:
    """Seconds of one selection over ``d`` elements: ``fixed + per_element * d + per_comparison * d * log2(d)``."""

    fixed: float  #: of any call
    per_element: float  #: scans and thresholds
    per_comparison: float = 0.0  #: of a sort; OMGS-SGD's released value is 2.19e-10 on a P102-100

    def __call__(self, elements: np.ndarray | float) -> np.ndarray:
        """Seconds for each number of elements, float64 of the same shape; nothing is spent on no elements."""
        d = np.asarray(elements, np.float64)
        seconds = self.fixed + self.per_element * d + self.per_comparison * d * np.log2(np.maximum(d, 1.0))
        return np.where(d > 0, seconds, 0.0)


#: Exact selection and packing on a device, before anything was measured: by the counted operations of PyTorch on an
#: A100, as :mod:`lightning_safusion.tools.plan.paths` has them.
NOMINAL_SELECTION = SelectionCost(4e-4, 2e-10)


@dataclass(frozen=True)
class GroupCosts:
    """Agreed numbers that a planner works with; the same on all ranks, bit for bit.

    Places are ready order; seconds throughout. ``arrivals``, ``select`` and ``decode`` are for planners that place
    selection themselves.
    """

    numels: tuple[int, ...]  #: elements of each tensor [L]
    #: Time at which each gradient is ready and selected, counted from the start of backward [L], rising.
    ready: tuple[float, ...]
    sparse_bytes: tuple[float, ...]  #: that each tensor adds to a sparse message [L]
    dense_bytes: tuple[float, ...]  #: that each tensor adds to a dense all-reduce [L]
    world_size: int
    sparse: tuple[float, float]  #: (fixed seconds, seconds per byte of one rank's message) of a sparse exchange
    dense: tuple[float, float]  #: (fixed seconds, seconds per byte of the buffer) of a dense all-reduce
    dense_allowed: bool = True  #: a buffer may take the dense all-reduce
    sparse_allowed: bool = True  #: a buffer may take the sparse all-gather
    #: Seconds that handling one buffer, of whatever size, takes from the backward pass (the calls that select, pack,
    #: launch and decode): every gradient from its last one on is that much later.
    per_buffer: float = 0.0
    #: Time at which each gradient has been computed, no selection counted [L], rising; empty where there are none.
    arrivals: tuple[float, ...] = ()
    select: tuple[float, float, float] = (0.0, 0.0, 0.0)  #: arguments of :class:`SelectionCost`
    decode: tuple[float, float] = (0.0, 0.0)  #: of a sparse exchange: (seconds, seconds per byte of one rank's message)
    quotas: tuple[int, ...] = ()  #: elements that each tensor may send, all where it is dense [L]; empty: not known
    hybrid: bool = False  #: dense tensors of a sparse buffer have an all-reduce of their own

    @property
    def sends_all(self) -> list[bool]:
        """Whether the quota of each tensor is all of its elements [L]; False where quotas are not known."""
        quotas = self.quotas or (0,) * len(self.numels)
        return [quota >= numel for quota, numel in zip(quotas, self.numels, strict=True)]

    @property
    def selection(self) -> SelectionCost:
        """Time of a selection; a nominal one before anything was measured, so that selection is never free."""
        return SelectionCost(*self.select) if any(self.select) else NOMINAL_SELECTION


@dataclass(frozen=True)
class JobShape:
    """All that planning knows of a job besides times: the same on all ranks. Places are ready order."""

    numels: tuple[int, ...]  #: elements of each tensor [L]
    widths: tuple[int, ...]  #: bytes of an element of each gradient [L]
    quotas: tuple[int, ...]  #: elements that each tensor may send, all of them where it is dense [L]
    world_size: int
    entry_bytes: float  #: on the wire, of a selected element, position included, at the model's mean density
    hybrid: bool = False  #: dense tensors of a sparse buffer have an all-reduce of their own
    device: str = "cpu"  #: where the gradients live (``str(torch.device)``)

    def __len__(self) -> int:
        return len(self.numels)

    @property
    def all_dense(self) -> bool:
        """Whether every tensor sends all of its elements, so that there is nothing to select."""
        return all(quota >= numel for quota, numel in zip(self.quotas, self.numels, strict=True))


def ddp_buckets(nbytes: Sequence[float], cap: float = DDP_BUCKET, first: float = DDP_FIRST_BUCKET) -> list[int]:
    """Stops of DDP's buckets, closed by the tensor that fills them; the first one is small.

    ``nbytes``: of each tensor in ready order [L]. ``cap`` bytes close a bucket, ``first`` bytes the first one.
    """
    stops, held, limit = [], 0.0, first
    for stop, size in enumerate(nbytes, 1):
        held += size
        if held >= limit or stop == len(nbytes):
            stops.append(stop)
            held, limit = 0.0, cap
    return stops


def predict_plain_ddp(costs: GroupCosts, allreduce: LinearCost) -> float:
    """Seconds from the start of backward to the end of DDP's last all-reduce: nothing selected, nothing decoded.

    ``allreduce`` is as it was calibrated. What a job of sparse buffers measures of an all-reduce says little of one of
    the whole model, which is a hundred times as large.
    """
    free = 0.0
    for start, stop in pairwise([0, *ddp_buckets(costs.dense_bytes)]):
        begin = max(free, costs.arrivals[stop - 1]) + allreduce.fixed
        free = begin + allreduce.per_byte * sum(costs.dense_bytes[start:stop])
    return free

"""What a buffer costs: the link's seconds of any range of tensors, and the end of a whole plan.

A buffer is priced as the cheapest collective allowed: ``fixed + per_byte * bytes``. It leaves when its last gradient is
ready and the link is free (MG-WFBP, Shi et al., INFOCOM 2019, section 4), and handling it delays later gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import CollectiveName, Group, Plan

# Seconds added to a buffer outside its bounds: more than any exchange, so that as few buffers as possible are outside.
_OUT_OF_BOUNDS = 1e6


class Bounds(NamedTuple):
    """Elements that a buffer may hold."""

    min_elements: int = 0  #: at least; the last buffer holds what is left
    #: At most, but for one larger tensor alone; counts more where both cannot hold. None: no bound.
    max_elements: int | None = None

    def check(self) -> Bounds:
        """Returns these bounds; raises ValueError if no buffer can keep them."""
        if self.min_elements < 0:
            raise ValueError(f"min_elements must not be negative, got {self.min_elements}")
        if self.max_elements is not None and self.max_elements < max(1, self.min_elements):
            raise ValueError(
                f"max_elements must be 1 or more and not below min_elements={self.min_elements}, or None for no "
                f"bound, got {self.max_elements}"
            )
        return self

    def clamp(self, edges: np.ndarray, start: int, stop: int) -> int:
        """The stop nearest to ``stop`` with which a buffer from ``start`` keeps the bounds (edges: int64 [L + 1])."""
        total = len(edges) - 1
        stop = max(stop, int(np.searchsorted(edges, edges[start] + self.min_elements)))
        if self.max_elements is not None:
            stop = min(stop, int(np.searchsorted(edges, edges[start] + self.max_elements, side="right")) - 1)
        return min(max(stop, start + 1), total)

    def charge(self, edges: np.ndarray, starts: np.ndarray, stop: int) -> np.ndarray:
        """Seconds that the exact programme adds to the price of the buffers ``[start, stop)``, float64 [S]."""
        held = edges[stop] - edges[starts]
        outside = (held < self.min_elements) & (stop < len(edges) - 1)
        if self.max_elements is not None:
            outside = outside | ((held > self.max_elements) & (stop - starts > 1))
        return np.where(outside, _OUT_OF_BOUNDS, 0.0)


#: Buffers of any size.
NO_BOUNDS = Bounds()


def element_edges(numels: Sequence[int]) -> np.ndarray:
    """Elements before each tensor and in all, int64 [L + 1]."""
    return np.concatenate([[0], np.cumsum(numels, dtype=np.int64)])


class GroupPricer:
    """Seconds that a buffer of consecutive tensors occupies the link, for any buffer in constant time.

    Raises:
        ValueError: If the numbers do not describe the same tensors, ``ready`` is not finite and rising, a cost is
            negative, or no collective is allowed.
    """

    def __init__(self, costs: GroupCosts) -> None:
        _check(costs)
        # Sequential prefix sums: the rounding does not depend on the width of a host's vector units.
        self._bytes: dict[CollectiveName, np.ndarray] = {
            "allgather": np.cumsum([0.0, *costs.sparse_bytes]),
            "allreduce": np.cumsum([0.0, *costs.dense_bytes]),
        }
        self._line: dict[CollectiveName, tuple[float, float]] = {"allgather": costs.sparse, "allreduce": costs.dense}
        allowed: dict[CollectiveName, bool] = {"allgather": costs.sparse_allowed, "allreduce": costs.dense_allowed}
        #: What buffers may take, the sparse collective first.
        self.allowed = [collective for collective, may in allowed.items() if may]

    def prices(self, collective: CollectiveName, starts: np.ndarray, stop: int) -> np.ndarray:
        """Seconds of the buffers ``[start, stop)`` for each start (int64 [S]) -> float64 [S].

        Raises:
            ValueError: If ``collective`` is a stream, whose buffers do not end where the plan's groups do.
        """
        if collective not in self._line:
            raise ValueError(
                f"the time of {collective!r} cannot be predicted from a plan: price one of {list(self._line)}"
            )
        fixed, per_byte = self._line[collective]
        prefix = self._bytes[collective]
        return fixed + per_byte * (prefix[stop] - prefix[starts])

    def price(self, collective: CollectiveName, start: int, stop: int) -> float:
        """Seconds of the buffer ``[start, stop)`` over ``collective``."""
        return float(self.prices(collective, np.array([start]), stop)[0])

    def cheapest(self, starts: np.ndarray, stop: int) -> np.ndarray:
        """Seconds of the buffers ``[start, stop)`` over the best collective allowed, float64 [S]."""
        return reduce(np.minimum, (self.prices(collective, starts, stop) for collective in self.allowed))

    def choose(self, start: int, stop: int) -> CollectiveName:
        """The cheapest collective allowed for ``[start, stop)``; the sparse one when they cost the same."""
        return min(self.allowed, key=lambda collective: self.price(collective, start, stop))

    def plan(self, stops: Iterable[int]) -> Plan:
        """The plan whose buffers end at ``stops`` (rising places), each with its cheapest collective."""
        return Plan(tuple(Group(*cut, self.choose(*cut)) for cut in pairwise([0, *stops])))


def predict_finish(plan: Plan, costs: GroupCosts) -> float:
    """Seconds from the start of backward to the end of the last exchange of ``plan``.

    Raises:
        ValueError: If the plan covers another number of tensors than the costs.
    """
    if plan.num_tensors != len(costs.ready):
        raise ValueError(
            f"the plan covers {plan.num_tensors} tensors but the costs describe {len(costs.ready)}: plan again"
        )
    pricer = GroupPricer(costs)
    free = 0.0
    for count, group in enumerate(plan.groups, 1):
        begin = max(free, costs.ready[group.stop - 1] + count * costs.per_buffer)
        free = begin + pricer.price(group.collective, group.start, group.stop)
    return free


def _check(costs: GroupCosts) -> None:
    lengths = {name: len(getattr(costs, name)) for name in ("numels", "ready", "sparse_bytes", "dense_bytes")}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"costs must hold one number per tensor, got lengths {lengths}")
    ready = np.asarray(costs.ready, dtype=np.float64)
    if not np.isfinite(ready).all() or (np.diff(ready) < 0).any():
        raise ValueError(f"ready times must be finite and rising, got {costs.ready}")
    numbers = (*costs.sparse, *costs.dense, costs.per_buffer, *costs.sparse_bytes, *costs.dense_bytes)
    if not all(0.0 <= number < float("inf") for number in numbers):
        raise ValueError(
            f"costs and bytes must be finite and not negative: sparse={costs.sparse}, dense={costs.dense}, "
            f"per_buffer={costs.per_buffer}"
        )
    if not (costs.sparse_allowed or costs.dense_allowed):
        raise ValueError("no collective is allowed: allow the sparse all-gather, the dense all-reduce, or both")

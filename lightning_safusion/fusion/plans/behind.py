"""Selection behind fusion: what it costs on the compute stream, and how long a plan takes that pays for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lightning_safusion.fusion.plans.plan import GroupCosts, Plan


@dataclass(frozen=True)
class SelectionCost:
    """Seconds of one selection over ``d`` elements: ``fixed + per_element * d + per_comparison * d * log2(d)``.

    Args:
        fixed: Seconds of any call.
        per_element: Seconds per element: scans and thresholds.
        per_comparison: Seconds per comparison of a sort. OMGS-SGD's released value is 2.19e-10 on a P102-100.
    """

    fixed: float
    per_element: float
    per_comparison: float = 0.0

    def __call__(self, elements: np.ndarray | float) -> np.ndarray:
        """Seconds for each number of elements, float64 of the same shape; nothing is spent on no elements."""
        d = np.asarray(elements, np.float64)
        seconds = self.fixed + self.per_element * d + self.per_comparison * d * np.log2(np.maximum(d, 1.0))
        return np.where(d > 0, seconds, 0.0)


@dataclass(frozen=True)
class BehindCosts:
    """What decides about groups that are merged first and selected from afterwards, on the compute stream.

    Places are ready order; seconds throughout.

    Args:
        numels: Elements of each tensor [L].
        backward: Seconds of backward spent on each gradient [L].
        sparse_bytes: Bytes that each tensor adds to a message [L].
        selection: Time of one selection over a merged buffer.
        exchange: ``(fixed seconds, seconds per byte of one rank's message)``, decoding included.

    Raises:
        ValueError: If the numbers do not describe the same tensors, or one is negative or not finite.
    """

    numels: tuple[int, ...]
    backward: tuple[float, ...]
    sparse_bytes: tuple[float, ...]
    selection: SelectionCost
    exchange: tuple[float, float]

    def __post_init__(self) -> None:
        lengths = {"numels": len(self.numels), "backward": len(self.backward), "sparse_bytes": len(self.sparse_bytes)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"costs must hold one number per tensor, got lengths {lengths}")
        selection = (self.selection.fixed, self.selection.per_element, self.selection.per_comparison)
        for name, values in (
            ("numels", self.numels),
            ("backward", self.backward),
            ("sparse_bytes", self.sparse_bytes),
            ("selection", selection),
            ("exchange", self.exchange),
        ):
            wrong = [value for value in values if not 0 <= value < math.inf]
            if wrong:
                raise ValueError(f"{name} must be finite and not negative, got {wrong[0]}")

    @classmethod
    def of(cls, costs: GroupCosts) -> BehindCosts:
        """The same numbers as a job has agreed on them; decoding, which these planners leave out, is in none of them.

        Raises:
            ValueError: If the costs do not say when the gradients were computed.
        """
        if len(costs.arrivals) != len(costs.numels):
            raise ValueError(f"need the arrival of each of {len(costs.numels)} gradients, got {len(costs.arrivals)}")
        backward = np.diff(np.asarray(costs.arrivals, np.float64), prepend=0.0)
        return cls(
            costs.numels, tuple(backward.tolist()), costs.sparse_bytes, SelectionCost(*costs.select), costs.sparse
        )

    def seconds(self, nbytes: np.ndarray | float) -> np.ndarray:
        """Time of an exchange of messages of ``nbytes`` bytes, float64 of the same shape."""
        return self.exchange[0] + self.exchange[1] * np.asarray(nbytes, np.float64)


def predict_behind(plan: Plan, costs: BehindCosts) -> float:
    """Seconds from the start of backward to the end of the last exchange, with selection on the compute stream.

    Args:
        plan: A plan of the L tensors that ``costs`` describes.
        costs: The numbers.

    Raises:
        ValueError: If the plan covers another number of tensors.
    """
    if plan.num_tensors != len(costs.numels):
        raise ValueError(f"the plan covers {plan.num_tensors} tensors but the costs describe {len(costs.numels)}")
    compute = link = 0.0
    for group in plan.groups:
        members = slice(group.start, group.stop)
        compute += sum(costs.backward[members]) + float(costs.selection(sum(costs.numels[members])))
        link = max(link, compute) + float(costs.seconds(sum(costs.sparse_bytes[members])))
    return link

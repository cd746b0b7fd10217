"""SSFusion (ICDE 2026): small tensors of a buffer are dense, at the expense of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.fusion.plans.policy import PROFILED_WINDOWS, PlannedOnce
from lightning_safusion.fusion.plans.pricing import GroupPricer


class SelectiveChoice(NamedTuple):
    """What SSFusion decides for one buffer."""

    upto: int  #: tensors of up to this many elements are dense
    dense: tuple[bool, ...]  #: whether each tensor is dense [m]
    density: float  #: of the others


def choose_selective(
    numels: Sequence[int], density: float, seconds: Callable[[SelectiveChoice], float]
) -> SelectiveChoice:
    """SSFusion's selective sparsification: the size up to which the tensors of a buffer are dense (:class:`Selective`).

    Of all sizes up to which they fit into ``density`` times the buffer, that with the shortest ``seconds``, of equals
    the smallest. (The release takes the larger of two densities where the smaller one is meant.)

    Args:
        numels: Elements of the tensors of the buffer [m], at least one.
        density: Density of the buffer.
        seconds: Predicted time of the buffer with a choice.
    """
    total, cap = sum(numels), size_cap(numels, density)

    def choice(size: int) -> SelectiveChoice:
        held = sum(n for n in numels if n <= size)
        left = max(0.0, (density * total - held) / (total - held)) if held < total else 0.0
        return SelectiveChoice(size, tuple(n <= size for n in numels), min(density, left))

    return min(map(choice, [0, *sorted({n for n in numels if 0 < n <= cap})]), key=seconds)


def size_cap(numels: Sequence[int], density: float) -> int:
    """Largest size up to which all tensors of a buffer can be dense within ``density`` of its elements."""
    budget = max(1.0, density * sum(numels))
    for numel in sorted(numels):
        if numel >= budget:
            return numel - 1
        budget -= numel
    return max(numels)


def choose_offloaded(
    ready: Sequence[float],
    sparse: Sequence[bool],
    gpu_seconds: Sequence[float],
    cpu_seconds: Sequence[float],
) -> list[bool]:
    """SSFusion's offloading within a buffer: whether each tensor is selected on the CPU [m].

    An idle CPU takes the next tensor, and never delays the buffer.

    Args:
        ready: Seconds at which each gradient would be ready without any selection, from the start of the buffer [m].
        sparse: Whether each tensor is sparsified [m].
        gpu_seconds: Selection on the compute stream [m]; it delays all later gradients.
        cpu_seconds: Selection on the CPU, copies included [m].
    """
    offloaded = [False] * len(ready)
    spent = cpu_free = 0.0
    last: int | None = None
    for place, arrives in enumerate(ready):
        if not sparse[place]:
            continue
        if cpu_free > arrives + spent:
            spent += gpu_seconds[place]
        else:
            offloaded[place], last = True, place
            cpu_free = arrives + spent + cpu_seconds[place]
    if last is not None and cpu_free > ready[-1] + spent:
        offloaded[last] = False
    return offloaded


def selective_counts(sizes: np.ndarray, counts: np.ndarray, dense_upto: int) -> np.ndarray | None:
    """Quotas of a buffer whose small tensors are dense at the expense of the others, of all that were not dense anyway.

    Args:
        sizes: int64 [T], elements of its tensors.
        counts: int64 [T], elements that each may send otherwise.
        dense_upto: Tensors of up to this many elements are dense.

    Returns:
        int64 [T]: the sizes of dense tensors; the others share the remaining elements in proportion to their sizes,
        each at least one. None if fewer remain.
    """
    others = (counts < sizes) & (sizes > dense_upto)
    paying = (counts < sizes) & ~others
    left = int(counts[others].sum() + (counts - sizes)[paying].sum())
    if left < others.sum():
        return None
    result = np.where(paying, sizes, counts)
    if others.any():
        result[others] = 1 + _shares(left - int(others.sum()), sizes[others] - 1)
    return result


def _shares(total: int, weights: np.ndarray) -> np.ndarray:
    """int64: ``total``, at most the sum of the weights, in proportion to them, none above its own."""
    divisor = max(1, int(weights.sum()))
    products = [total * int(weight) for weight in weights]  # Python integers: they may have more than 64 bits
    shares = np.array([product // divisor for product in products], np.int64)
    order = sorted(range(len(products)), key=lambda i: -(products[i] % divisor))  # the first of equals
    shares[order[: total - int(shares.sum())]] += 1
    return shares


class Selective(PlannedOnce):
    """Buffers of equally many tensors; in each, tensors up to a size are dense (SSFusion, ICDE 2026, section III-B).

    The same mechanism is the partial sparsification of ADTopk (HPDC 2024). The size is chosen for each buffer from
    agreed costs: of all sizes of its tensors up to which these fit into what the buffer may send, that with the
    shortest exchange (``choose_selective``). The other tensors send as much less, so that the buffer sends exactly as
    many elements as without any dense tensor. Planned once, from what the first windows have measured (both papers
    profile the running job); until then with the costs measured before training.

    In the release the others keep their density, so that the budget is exceeded; times are tables of one cluster; the
    density is applied twice to the bytes of an exchange. There each dense tensor saves a call of the selection, which
    decides; here selection is one call for a buffer.

    Args:
        buffers: Number of buffers; tensors that are left over make further ones.
        windows: Windows that are measured before.

    Raises:
        ValueError: If there is no buffer, or too few windows.
    """

    name = "selective"

    def __init__(self, buffers: int = 20, windows: int = PROFILED_WINDOWS) -> None:
        super().__init__(windows)
        if buffers < 1:
            raise ValueError(f"buffers must be 1 or more, got {buffers}")
        self.buffers = buffers

    def plan(self, costs: GroupCosts) -> Plan:
        total = len(costs.numels)
        size = max(1, total // self.buffers)
        plan = GroupPricer(costs).plan([*range(size, total, size), total] if total else [])
        return Plan(tuple(replace(group, dense_upto=_dense_upto(costs, group)) for group in plan.groups))


def _dense_upto(costs: GroupCosts, group: Group) -> int:
    start, stop = group.start, group.stop
    sizes, counts = np.array(costs.numels[start:stop]), np.array(costs.quotas[start:stop])
    sparse = counts < sizes
    if group.collective == "allreduce" or not sparse.any():
        return 0
    budget = int(counts[sparse].sum())
    per_entry = sum(np.array(costs.sparse_bytes[start:stop])[sparse].tolist()) / budget
    dense_bytes = np.array(costs.dense_bytes[start:stop])

    def seconds(choice: SelectiveChoice) -> float:
        if selective_counts(sizes, counts, choice.upto) is None:
            return float("inf")
        dense = ~sparse
        dense[sparse] = choice.dense
        nbytes = float(dense_bytes[dense].sum())
        entries = (budget - int(sizes[dense & sparse].sum())) * per_entry
        if not costs.hybrid:
            return costs.sparse[0] + costs.sparse[1] * (entries + nbytes)
        # side by side: they share the link, but do not wait for each other's start-up
        fixed = max(costs.sparse[0], costs.dense[0]) if dense.any() else costs.sparse[0]
        return fixed + costs.sparse[1] * entries + costs.dense[1] * nbytes

    numels = [int(n) for n in sizes[sparse]]
    return choose_selective(numels, budget / sum(numels), seconds).upto

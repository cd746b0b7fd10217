"""SSFusion's grouping: small tensors of a buffer travel whole, at the expense of the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_safusion.fusion.plans.optimal import GroupPricer
from lightning_safusion.fusion.plans.plan import Group, GroupCosts, Plan
from lightning_safusion.fusion.plans.ssfusion import choose_selective
from lightning_safusion.fusion.plans.ticking import PROFILED_WINDOWS, PlannedOnce
from lightning_safusion.fusion.quota import selective_counts


class Selective(PlannedOnce):
    """Buffers of equally many tensors; in each, tensors up to a size travel whole (SSFusion, ICDE 2026, section III-B).

    The same mechanism is the partial sparsification of ADTopk (HPDC 2024). The size is chosen for each buffer from
    agreed costs: of all sizes of its tensors up to which these fit into what the buffer may send, that with the
    shortest exchange (``choose_selective``). The other tensors send as much less, so that the buffer as a whole sends
    exactly what it would without any whole tensor. Planned once, from what the first windows have measured (both papers
    profile the running job); until then with the costs measured before training.

    In the release the others keep their density, so that the budget is exceeded; times are tables of one cluster; the
    density is applied twice to the bytes of an exchange. Here selection is one call for a buffer: that a whole tensor
    saves a call of its own, which decides there, is no argument.

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
        pricer = GroupPricer(costs)
        groups = []
        for start in range(0, total, size):
            stop = min(start + size, total)
            collective = pricer.choose(start, stop)
            upto = _whole_upto(costs, start, stop) if collective == "allgather" else 0
            groups.append(Group(start, stop, collective, upto))
        return Plan(tuple(groups))


def _whole_upto(costs: GroupCosts, start: int, stop: int) -> int:
    """Size up to which the tensors of a buffer travel whole."""
    sizes, counts = np.array(costs.numels[start:stop]), np.array(costs.quotas[start:stop])
    sparse = counts < sizes
    if not sparse.any():
        return 0
    budget = int(counts[sparse].sum())
    per_entry = sum(np.array(costs.sparse_bytes[start:stop])[sparse].tolist()) / budget
    whole_bytes = np.array(costs.dense_bytes[start:stop])

    def seconds(dense: Sequence[bool], density: float) -> float:
        whole = ~sparse
        whole[sparse] = dense
        upto = int(sizes[whole & sparse].max(initial=0))
        if selective_counts(sizes, counts, upto) is None:
            return float("inf")
        nbytes = float(whole_bytes[whole].sum())
        entries = (budget - int(sizes[whole & sparse].sum())) * per_entry
        if not costs.hybrid:
            return costs.sparse[0] + costs.sparse[1] * (entries + nbytes)
        # side by side: they share the link, but do not wait for each other's start-up
        fixed = max(costs.sparse[0], costs.dense[0]) if whole.any() else costs.sparse[0]
        return fixed + costs.sparse[1] * entries + costs.dense[1] * nbytes

    numels = [int(n) for n in sizes[sparse]]
    choice = choose_selective(numels, budget / sum(numels), seconds)
    return max((n for n, dense in zip(numels, choice.dense, strict=True) if dense), default=0)

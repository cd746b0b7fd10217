"""Merging rules: MG-WFBP, and OMGS, whose selection after fusion delays the gradients after a buffer."""

from __future__ import annotations

import numpy as np

from lightning_safusion.fusion.plans.costs import GroupCosts, SelectionCost
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.policy import PROFILED_WINDOWS, PlannedOnce
from lightning_safusion.fusion.plans.pricing import GroupPricer


class MGWFBP(PlannedOnce):
    """MG-WFBP: a gradient waits for the next one if a message of its own costs more.

    Shi et al., INFOCOM 2019 and TPDS 2021. With ``start`` the moment at which the group could leave, ``end`` that at
    which it would have arrived and ``a`` the fixed cost of a message, gradient ``i`` is merged with ``i + 1`` if
    ``ready[i + 1] < end`` and ``ready[i + 1] < start + a``. Each merge alone loses less than it wins, but the delays
    accumulate: with ready times (0, 0.9, 1.8), five bytes each, ``a = 1`` and one second per byte the rule takes all
    three together and ends at 17.8 s, while {1}, {2, 3} ends at 17.0 s.

    The released code measures 50 iterations in a run before the job, stopping the device at every gradient, which makes
    backward look longer than it is; here the first windows of the job are measured as they run.

    Args:
        min_elements: Groups of fewer elements are merged whatever the rule says; the release has 8192 here.
        windows: Windows that are measured before.
    """

    name = "mgwfbp"

    def __init__(self, min_elements: int = 0, windows: int = PROFILED_WINDOWS) -> None:
        super().__init__(windows)
        if min_elements < 0:
            raise ValueError(f"min_elements must not be negative, got {min_elements}")
        self.min_elements = min_elements

    def plan(self, costs: GroupCosts) -> Plan:
        pricer = GroupPricer(costs)
        stops: list[int] = []
        start, free = 0, 0.0
        for place in range(len(costs.ready) - 1):
            stop = place + 1
            collective = pricer.choose(start, stop)
            fixed = (costs.dense if collective == "allreduce" else costs.sparse)[0]
            begin = max(free, costs.ready[place])
            end = begin + pricer.price(collective, start, stop)
            large = sum(costs.numels[start:stop]) >= self.min_elements
            if large and costs.ready[stop] >= min(end, begin + fixed):
                stops.append(stop)
                start, free = stop, end
        if costs.ready:
            stops.append(len(costs.ready))
        return pricer.plan(stops)


class OMGS(PlannedOnce):
    """OMGS-SGD (Shi et al., INFOCOM 2020): merge with the next gradient if that wait costs less than the message saved.

    For selection after fusion (``scope="group"``). With a group of ``P`` elements, selected at ``e`` and sent from
    ``c``, and the next tensor of ``x`` elements, the two are merged if ``wait < save``::

        wait = backward(next) + select(P + x) - select(P) - select(x) - (c - e)
        save = exchange(P) + exchange(x) - exchange(P + x)

    Selection and exchange are measured in the job; the released code reads them from tables. Its planner is switched
    off by default, always merges the first two gradients, and forgets the size of the first; none of that is done here.

    Args:
        windows: Windows that are measured before.
    """

    name = "omgs"

    def plan(self, costs: GroupCosts) -> Plan:
        total = len(costs.numels)
        if total == 0:
            return Plan(())
        select, (fixed, per_byte) = SelectionCost(*costs.select), costs.sparse

        def exchange(nbytes: float) -> float:
            return fixed + per_byte * nbytes

        backward = np.diff(costs.arrivals, prepend=0.0).tolist()
        stops: list[int] = []
        computed = link = 0.0  # when the group before was selected, and when it had been exchanged
        spent, numel, nbytes = backward[0], costs.numels[0], costs.sparse_bytes[0]
        for place in range(1, total):
            selected = computed + spent + float(select(numel))
            begin = max(link, selected)
            next_numel, next_bytes = costs.numels[place], costs.sparse_bytes[place]
            both = numel + next_numel
            wait = backward[place] - (begin - selected)
            wait += float(select(both) - select(numel) - select(next_numel))
            save = exchange(nbytes) + exchange(next_bytes) - exchange(nbytes + next_bytes)
            if wait < save:
                spent, numel, nbytes = spent + backward[place], both, nbytes + next_bytes
            else:
                stops.append(place)
                computed, link = selected, begin + exchange(nbytes)
                spent, numel, nbytes = backward[place], next_numel, next_bytes
        return GroupPricer(costs).plan([*stops, total])

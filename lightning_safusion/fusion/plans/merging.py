"""Merging rules: MG-WFBP, and OMGS, whose selection after fusion delays the gradients after a buffer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_safusion.fusion.plans.costs import GroupCosts, SelectionCost
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.fusion.plans.policy import PROFILED_WINDOWS, PlannedOnce
from lightning_safusion.fusion.plans.pricing import GroupPricer


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


def plan_mgwfbp(costs: GroupCosts, min_elements: int = 0) -> Plan:
    """MG-WFBP: a gradient waits for the next one if that costs less than the start of a message.

    Shi et al., INFOCOM 2019 and TPDS 2021. With ``start`` the moment at which the group could leave, ``end`` that at
    which it would have arrived and ``a`` the fixed cost of a message, gradient ``i`` is merged with ``i + 1`` if
    ``ready[i + 1] < end`` and ``ready[i + 1] < start + a``. Each merge alone loses less than it wins, but the delays
    accumulate: with ready times (0, 0.9, 1.8), five bytes each, ``a = 1`` and one second per byte the rule takes all
    three together and ends at 17.8 s, while {1}, {2, 3} ends at 17.0 s.

    Args:
        costs: The numbers; each group is priced over its cheapest collective allowed.
        min_elements: Groups of fewer elements are merged whatever the rule says; the release has 8192 here.
    """
    pricer = GroupPricer(costs)
    stops: list[int] = []
    start, free = 0, 0.0
    for place in range(len(costs.ready) - 1):
        stop = place + 1
        collective = pricer.choose(start, stop)
        fixed = (costs.dense if collective == "allreduce" else costs.sparse)[0]
        begin = max(free, costs.ready[place])
        end = begin + pricer.price(collective, start, stop)
        arrives = costs.ready[stop]
        small = sum(costs.numels[start:stop]) < min_elements
        if small or (arrives < end and arrives < begin + fixed):
            continue
        stops.append(stop)
        start, free = stop, end
    if costs.ready:
        stops.append(len(costs.ready))
    return pricer.plan(stops)


def plan_omgs(costs: BehindCosts) -> Plan:
    """OMGS-SGD: merge with the next gradient if the wait for it costs less than the message that is saved.

    Shi et al., INFOCOM 2020. With a group of ``P`` elements, selected at ``e`` and sent from ``c``, and the next tensor
    of ``x`` elements::

        wait = backward(next) + select(P + x) - select(P) - select(x) - (c - e)
        save = exchange(P) + exchange(x) - exchange(P + x)

    and the two are merged if ``wait < save``.

    Args:
        costs: The numbers.
    """
    total = len(costs.numels)
    if total == 0:
        return Plan(())
    stops: list[int] = []
    computed = link = 0.0  # when the group before was selected, and when it had been exchanged
    backward, numel, nbytes = costs.backward[0], costs.numels[0], costs.sparse_bytes[0]
    for place in range(1, total):
        selected = computed + backward + float(costs.selection(numel))
        begin = max(link, selected)
        next_numel, next_bytes = costs.numels[place], costs.sparse_bytes[place]
        both = numel + next_numel
        wait = costs.backward[place] - (begin - selected)
        wait += float(costs.selection(both) - costs.selection(numel) - costs.selection(next_numel))
        save = float(costs.seconds(nbytes) + costs.seconds(next_bytes) - costs.seconds(nbytes + next_bytes))
        if wait < save:
            backward, numel, nbytes = backward + costs.backward[place], both, nbytes + next_bytes
        else:
            stops.append(place)
            computed, link = selected, begin + float(costs.seconds(nbytes))
            backward, numel, nbytes = costs.backward[place], next_numel, next_bytes
    return sparse_plan([*stops, total])


def sparse_plan(stops: Iterable[int]) -> Plan:
    """The plan whose groups end at ``stops`` (rising places), all of them over the all-gather."""
    return Plan(tuple(Group(start, stop) for start, stop in pairwise([0, *stops])))


class MGWFBP(PlannedOnce):
    """MG-WFBP (Shi et al., INFOCOM 2019): a gradient waits for the next one if a message of its own costs more.

    The released code measures 50 iterations in a run before the job, stopping the device at every gradient, which makes
    backward look longer than it is; here the first windows of the job are measured as they run.

    Args:
        min_elements: Groups of fewer elements are merged whatever the rule says; the release has 8192 here.
        windows: Windows that are measured before.
    """

    name = "mgwfbp"

    def __init__(
        self,
        min_elements: int = 0,
        windows: int = PROFILED_WINDOWS,
    ) -> None:
        super().__init__(windows)
        if min_elements < 0:
            raise ValueError(f"min_elements must not be negative, got {min_elements}")
        self.min_elements = min_elements

    def plan(self, costs: GroupCosts) -> Plan:
        return plan_mgwfbp(costs, self.min_elements)


class OMGS(PlannedOnce):
    """OMGS-SGD (Shi et al., INFOCOM 2020): merge, select, send, where the wait costs less than the message saved.

    For selection behind fusion (``scope="group"``). Selection and exchange are measured in the job; the released code
    reads them from tables. Its planner is switched off by default, always merges the first two gradients, and forgets
    the size of the first; none of that is done here.
    """

    name = "omgs"

    def plan(self, costs: GroupCosts) -> Plan:
        stops = [group.stop for group in plan_omgs(BehindCosts.of(costs)).groups]
        return GroupPricer(costs).plan(stops)

"""Published planners: where the rivals of SAFusion cut the ready order. Pure functions of explicit numbers.

MG-WFBP decides from a timeline that grouping does not change, and takes the same :class:`GroupCosts` as the planners of
``dp.py``. OMGS and the exact programme of :func:`plan_pareto` select over the merged buffer on the compute stream, so
that their groups delay the gradients after them: they take the :class:`BehindCosts` of ``behind.py``. Cupcake knows no
numbers at all: it searches over measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from lightning_safusion.fusion.plans.behind import BehindCosts
from lightning_safusion.fusion.plans.optimal import GroupPricer
from lightning_safusion.fusion.plans.plan import Group, GroupCosts, Plan

#: Groups below this size are always merged by the released MG-WFBP, in elements.
MGWFBP_RELEASED_MIN_ELEMENTS = 8192


def plan_mgwfbp(costs: GroupCosts, variant: Literal["paper", "asc"] = "paper", min_elements: int = 0) -> Plan:
    """MG-WFBP: a gradient waits for the next one if that costs less than the start of a message.

    Shi et al., INFOCOM 2019 and TPDS 2021. With ``start`` the moment at which the group could leave, ``end`` that at
    which it would have arrived and ``a`` the fixed cost of a message, gradient ``i`` is merged with ``i + 1`` if
    ``ready[i + 1] < end`` and ``ready[i + 1] < start + a``. Each merge alone loses less than it wins, but the delays
    accumulate: with ready times (0, 0.9, 1.8), five bytes each, ``a = 1`` and one second per byte the rule takes all
    three together and ends at 17.8 s, while {1}, {2, 3} ends at 17.0 s.

    Args:
        costs: The numbers; each group is priced over its cheapest collective allowed.
        variant: ``"paper"``, or ``"asc"``, the release's second rule: merge only where the group would have to wait
            for the link anyway (``ready[i + 1] < start``).
        min_elements: Groups of fewer elements are merged whatever the rule says; the release uses
            ``MGWFBP_RELEASED_MIN_ELEMENTS``.

    Raises:
        ValueError: If the variant is unknown.
    """
    if variant not in ("paper", "asc"):
        raise ValueError(f"unknown variant {variant!r}: choose 'paper' or 'asc'")
    pricer = GroupPricer(costs)
    stops: list[int] = []
    start, free = 0, 0.0
    for place in range(len(costs.ready) - 1):
        stop = place + 1
        collective = pricer.choose(start, stop)
        fixed = (costs.dense if collective == "allreduce" else costs.sparse)[0] if variant == "paper" else 0.0
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


def plan_omgs(costs: BehindCosts, *, released: bool = False) -> Plan:
    """OMGS-SGD: merge with the next gradient if the wait for it costs less than the message that is saved.

    Shi et al., INFOCOM 2020. With a group of ``P`` elements, selected at ``e`` and sent from ``c``, and the next tensor
    of ``x`` elements::

        wait = backward(next) + select(P + x) - select(P) - select(x) - (c - e)
        save = exchange(P) + exchange(x) - exchange(P + x)

    and the two are merged if ``wait < save``.

    Args:
        costs: The numbers.
        released: As the released planner does, which is switched off by default there: the first two gradients are
            always merged, and the size of the first is forgotten when the group is judged.
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
        if released and place == 1:
            backward, numel, nbytes = backward + costs.backward[1], next_numel, next_bytes
        elif wait < save:
            backward, numel, nbytes = backward + costs.backward[place], both, nbytes + next_bytes
        else:
            stops.append(place)
            computed, link = selected, begin + float(costs.seconds(nbytes))
            backward, numel, nbytes = costs.backward[place], next_numel, next_bytes
    return sparse_plan([*stops, total])


def plan_pareto(costs: BehindCosts) -> Plan:
    """The plan whose last exchange ends first when selection over a merged buffer delays the gradients after it.

    Exact. After ``j`` tensors only two numbers matter: the seconds spent on selection so far, and the end of the last
    exchange. A state that another one beats in both can be dropped; the remaining fronts are a few dozen states long.

    Args:
        costs: The numbers.
    """
    total = len(costs.numels)
    if total == 0:
        return Plan(())
    elements = np.concatenate([[0], np.cumsum(costs.numels, dtype=np.int64)])
    nbytes = np.cumsum([0.0, *costs.sparse_bytes])
    ready = np.cumsum(costs.backward)
    # All states kept so far, of all prefixes: how many tensors they cover, what they cost, and where they came from.
    places, parents = np.array([0]), np.array([-1])
    spent, ends = np.array([0.0]), np.array([0.0])
    for stop in range(1, total + 1):
        selection = spent + costs.selection(elements[stop] - elements[places])
        finish = np.maximum(ends, ready[stop - 1] + selection) + costs.seconds(nbytes[stop] - nbytes[places])
        kept = _front(selection, finish)
        places = np.concatenate([places, np.full(len(kept), stop)])
        parents = np.concatenate([parents, kept])
        spent, ends = np.concatenate([spent, selection[kept]]), np.concatenate([ends, finish[kept]])
    last = np.flatnonzero(places == total)
    state = int(last[np.argmin(ends[last])])
    stops = []
    while state > 0:
        stops.append(int(places[state]))
        state = int(parents[state])
    return sparse_plan(stops[::-1])


def search_cuts(
    measure: Callable[[Sequence[int]], float], tensors: int, groups: int = 2, tolerance: float = 0.0
) -> list[int]:
    """Cupcake: finds cuts by trying them out, see :func:`cut_search`.

    Args:
        measure: Mean seconds of an iteration with the groups that end at the stops given; the same on all ranks.
        tensors: Tensors (L).
        groups: Largest number of groups.
        tolerance: Share of the time that a further cut must save.

    Returns:
        The stop of each group, rising, the last one L.

    Raises:
        ValueError: If there is no tensor, or no group allowed.
    """
    search = cut_search(tensors, groups, tolerance)
    stops = next(search)
    while True:
        try:
            stops = search.send(measure(stops))
        except StopIteration as end:
            best: list[int] = end.value
            return best


def cut_search(tensors: int, groups: int = 2, tolerance: float = 0.0) -> Generator[list[int], float, list[int]]:
    """Cupcake's search, one trial at a time; no model of the job and no number of the network is needed.

    MergeComp (Wang et al., 2021) and Cupcake (MLSys 2023). One cut at a time: a binary search that compares a cut with
    the one two tensors later and goes to the faster side, as the release does; every range of the partition found so
    far is searched, and the best cut of all stays. It ends when a further cut gains too little. The search is exact
    where the time falls up to the best cut and rises after it, which measured times need not do.

    Args:
        tensors: Tensors (L).
        groups: Largest number of groups.
        tolerance: Share of the time that a further cut must save.

    Yields:
        The stop of each group of a partition to try, rising, the last one L; wants the mean seconds of an iteration
        with it, the same on all ranks.

    Returns:
        The best partition.

    Raises:
        ValueError: If there is no tensor, or no group allowed.
    """
    if tensors < 1 or groups < 1:
        raise ValueError(f"the search needs a tensor and a group, got tensors={tensors} and groups={groups}")
    best = [tensors]
    seconds = yield best
    while len(best) < groups:
        tried: list[tuple[float, list[int]]] = []
        for low, high in pairwise([0, *best]):
            if high - low > 1:
                tried.append((yield from _search_one(best, low + 1, high - 1)))
        if not tried or min(tried)[0] >= seconds * (1.0 - tolerance):
            break
        seconds, best = min(tried)
    return best


def even_cuts(tensors: int, groups: int) -> list[int]:
    """Cupcake without its scheduler: groups of equally many tensors; the stops, the last one ``tensors``.

    Args:
        tensors: Tensors (L), at least 1.
        groups: Number of groups; 0 puts every tensor into a group of its own, as the release does.
    """
    groups = min(groups or tensors, tensors)
    return [*(tensors // groups * group for group in range(1, groups)), tensors]


def fuse_ready(nbytes: Sequence[float], start: int, stop: int, threshold: float) -> list[tuple[int, int]]:
    """Horovod: the tensors that are ready at a tick share buffers, front to back, as far as they fit.

    Horovod looks past a tensor that does not fit only as long as both still fit, which is never where all tensors are
    of one kind: its buffers are then ranges.

    Args:
        nbytes: Bytes that each tensor adds to a buffer, over all workers where it is gathered [L].
        start: Place of the first tensor that is ready.
        stop: Place after the last.
        threshold: Bytes of a buffer; a larger tensor travels alone, 0 fuses nothing.

    Returns:
        ``(start, stop)`` of each buffer.
    """
    ranges: list[tuple[int, int]] = []
    held = 0.0
    for place in range(start, stop):
        if ranges and held + nbytes[place] <= threshold:
            ranges[-1] = (ranges[-1][0], place + 1)
            held += nbytes[place]
        else:
            ranges.append((place, place + 1))
            held = nbytes[place]
    return ranges


def sparse_plan(stops: Iterable[int]) -> Plan:
    """The plan whose groups end at ``stops`` (rising places), all of them over the all-gather."""
    return Plan(tuple(Group(start, stop) for start, stop in pairwise([0, *stops])))


def _front(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Indices of the pairs that no other pair beats in both numbers; of equal pairs the earliest."""
    order = np.lexsort((second, first))
    best_before = np.concatenate([[np.inf], np.minimum.accumulate(second[order])[:-1]])
    return order[second[order] < best_before]


def _search_one(stops: Sequence[int], low: int, high: int) -> Generator[list[int], float, tuple[float, list[int]]]:
    """The best probe of a binary search for one more stop in ``low`` to ``high``: its seconds, and all stops."""
    probes: dict[int, float] = {}

    def probe(cut: int) -> Generator[list[int], float, float]:
        if cut not in probes:
            probes[cut] = yield sorted([*stops, cut])
        return probes[cut]

    left, right = low, high
    while left < right:
        middle = (left + right) // 2
        here = yield from probe(middle)
        if here <= (yield from probe(min(middle + 2, high))):
            right = middle
        else:
            left = middle + 1
    yield from probe(left)
    seconds, cut = min((seconds, cut) for cut, seconds in probes.items())
    return seconds, sorted([*stops, cut])

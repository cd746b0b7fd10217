"""Cupcake: cuts found by trying them out. The search knows no costs; it asks for the time of one plan after another."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from itertools import pairwise


class CutSearch:
    """Cupcake's search, one partition at a time; no model of the job and no number of the network is needed.

    MergeComp (Wang et al., 2021) and Cupcake (MLSys 2023). One cut at a time: a binary search that compares a cut with
    the one two tensors later and goes to the faster side, as the release does; every range of the partition found so
    far is searched, and the best cut of all stays. It ends when a further cut gains too little. The search is exact
    where the time falls up to the best cut and rises after it, which measured times need not do.

    Args:
        tensors: Tensors (L), at least 1.
        groups: Largest number of groups, at least 1.
        tolerance: Share of the time that a further cut must save.
        windows: Windows by which each partition is judged, after a first one that does not count.
    """

    def __init__(self, tensors: int, groups: int, tolerance: float, windows: int) -> None:
        self._steps = _partitions(tensors, groups, tolerance)
        self.windows = windows
        #: The partition to measure, or the best one found: the stop of each group, rising, the last one L.
        self.stops = next(self._steps)
        self.over = False  #: it is the best one found
        #: Mean seconds of the partitions tried so far, the same on all ranks: all that a checkpoint keeps.
        self.measured: list[float] = []

    def replay(self, measured: Iterable[float]) -> None:
        """Takes the steps that follow from these seconds."""
        for seconds in measured:
            self.measured.append(float(seconds))
            try:
                self.stops = self._steps.send(float(seconds))
            except StopIteration as end:
                self.stops, self.over = end.value, True


def _partitions(tensors: int, groups: int, tolerance: float) -> Generator[list[int], float, list[int]]:
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


def _search_one(stops: Sequence[int], low: int, high: int) -> Generator[list[int], float, tuple[float, list[int]]]:
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

"""Arithmetic of time intervals: lists of ``(begin, end)`` in seconds.

Every result is *merged*: sorted, disjoint, without empty intervals.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union. Intervals that end before they begin, or have no end (NaN), are left out."""
    merged: list[Interval] = []
    for begin, end in sorted(each for each in intervals if each[0] < each[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def subtract(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What is in ``intervals`` and not in ``others``."""
    rest: list[Interval] = []
    holes, first = merge(others), 0
    for begin, end in merge(intervals):
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        hole = first  # one hole may reach into the next interval
        while hole < len(holes) and holes[hole][0] < end:
            rest.append((begin, holes[hole][0]))
            begin = holes[hole][1]
            hole += 1
        rest.append((begin, end))
    return merge(rest)


def intersect(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What is in both."""
    mine = merge(intervals)
    return subtract(mine, subtract(mine, others))


def total(intervals: Iterable[Interval]) -> float:
    """Seconds covered by the union."""
    return float(sum(end - begin for begin, end in merge(intervals)))

"""Which worker the others wait for: what every rank measures of itself, and the rule by which one is named.

All ranks end a window together. From there to the end of the next one a rank is busy with its own work until its last
gradient (``own``: optimizer, loading, forward and backward pass, selection in it), and then ends the window (``rest``:
the last selection, waiting, decoding). Of a slow worker the first is longer than of the others, and the second is
shorter by as much: its exchange waits for nobody.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.fusion.recorder import RECENT_WINDOWS

#: A slow worker is behind by more than this share of the own time of the others, and by more than so many seconds.
LEAST_SHARE, LEAST_S = 0.05, 1e-3
#: Reviews in succession that must find a worker slow before it is named, and no longer slow before it is not.
REVIEWS = 2
# Windows of which a median is taken at least.
_FEWEST = 4


@dataclass(frozen=True)
class WorkerTimes:
    """Medians over the latest windows before a review, by rank; the same on all ranks."""

    step: int  #: number of the first of these windows
    step_s: float  #: seconds from the end of a window to the end of the next, on the rank where that is shortest
    own_s: tuple[float, ...]  #: seconds from the end of a window to the last gradient of the next
    rest_s: tuple[float, ...]  #: seconds from there to the end of the window; waiting for others makes them longer

    @property
    def others_s(self) -> np.ndarray:
        """Of each rank the median own time of the others [W]."""
        return median_of_others(np.array(self.own_s))

    @property
    def behind_s(self) -> np.ndarray:
        """Seconds by which each rank is slower than the median of the others, as far as these wait for it [W]."""
        own, rest = np.array(self.own_s), np.array(self.rest_s)
        return np.minimum(own - self.others_s, median_of_others(rest) - rest)


@dataclass(frozen=True)
class SlowWorker:
    """A worker that the others wait for; the same on all ranks."""

    rank: int
    host: str  #: its name; empty where it is not known
    waiting_s: float  #: seconds of every step for which the median of the others waits for it, at the last review
    step_s: float  #: seconds of a step
    since: int  #: number of the first window in which that was measured

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.rank} on host {self.host}" if self.host else f"rank {self.rank}"

    def __str__(self) -> str:
        wait, step = (f"{1e3 * seconds:.1f} ms" for seconds in (self.waiting_s, self.step_s))
        return f"{self.name} is slow: the others wait {wait} of every step of {step} for it, since step {self.since:,}"


class OwnTimes:
    """What this rank, of so many, has measured of itself since the latest review."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._rows: deque[tuple[int, float, float]] = deque(maxlen=RECENT_WINDOWS)  # window, own, rest
        self._ended: tuple[int, float] | None = None  # the window before, and when it ended

    def add(self, events: WindowEvents) -> None:
        """Adds a window; all ranks add the same. It counts if the one before it was added as well."""
        ended, self._ended = self._ended, (events.step, events.drained)
        if ended is None or events.step != ended[0] + 1:
            return
        computed = events.ready[~np.isnan(events.ready)]
        last = float(computed.max()) if len(computed) else math.nan
        self._rows.append((events.step, last - ended[1], events.drained - last))

    def to_vector(self) -> np.ndarray:
        """Medians, for the minimum over ranks to put side by side; infinite what this rank has not measured.

        The next window is not counted: it begins with the review that this is for. A few windows are kept until there
        are more.

        float64 [2 W + 2]: by rank the own times, and the rest; a step; number of the first window. [0] alone.
        """
        self._ended = None
        if self._world_size == 1:
            return np.zeros(0)
        vector = np.full(2 * self._world_size + 2, np.inf)
        if len(self._rows) < _FEWEST:
            return vector
        steps, own, rest = np.array(self._rows).T
        self._rows.clear()
        vector[-1] = steps[0]
        known = ~np.isnan(own)
        if known.any():
            own, rest = own[known], rest[known]
            vector[self._rank], vector[self._world_size + self._rank] = np.median(own), np.median(rest)
            vector[-2] = np.median(own + rest)
        return vector


class SlowestWorker:
    """The rule. Pure: all ranks name the same worker, and ``announce`` it.

    A worker is named if it is behind by more than 5 % and 1 ms in two reviews in succession, and until it is behind by
    less than half of that in as many. Reviews have no window in common, and noise seldom finds the same of many workers
    twice. Another one takes its place if it is slower by 5 % and 1 ms again.
    """

    def __init__(self, hosts: Sequence[str] = (), announce: Callable[[str], None] | None = None) -> None:
        self.times: WorkerTimes | None = None  #: of the latest review in which all ranks had measured windows
        self.slow: SlowWorker | None = None  #: the worker that is named
        self._hosts, self._announce = hosts, announce
        self._found: dict[int, tuple[int, int]] = {}  # by rank: reviews in succession that found it slow, since when
        self._calm = 0  # reviews in succession that found the named one no longer slow

    def review(self, agreed: np.ndarray) -> None:
        """Takes the minimum over ranks of :meth:`OwnTimes.to_vector`."""
        if not len(agreed) or not np.isfinite(agreed).all():
            return
        own, rest = np.split(agreed[:-2], 2)
        self.times = times = WorkerTimes(int(agreed[-1]), float(agreed[-2]), tuple(own.tolist()), tuple(rest.tolist()))
        behind, least = times.behind_s, _least(times.others_s)
        slow = np.flatnonzero(behind > least).tolist()
        self._found = {rank: self._again(rank, times.step) for rank in slow}
        before = now = self._still(times, behind, least)
        rank = max((each for each in slow if self._found[each][0] >= REVIEWS), key=own.__getitem__, default=None)
        if rank is not None and (now is None or own[rank] > own[now.rank] + _least(own[now.rank])):
            host = self._hosts[rank] if self._hosts else ""
            now = SlowWorker(rank, host, float(behind[rank]), times.step_s, self._found[rank][1])
        named, self.slow = self.slow, now
        if now is not before:
            self._calm = 0
            self._say(str(now))
        elif named is not None and now is None:
            self._say(f"the others no longer wait for {named.name}")

    def _again(self, rank: int, step: int) -> tuple[int, int]:
        reviews, since = self._found.get(rank, (0, step))
        return reviews + 1, since

    def _still(self, times: WorkerTimes, behind: np.ndarray, least: np.ndarray) -> SlowWorker | None:
        if self.slow is None:
            return None
        rank = self.slow.rank
        self._calm = self._calm + 1 if behind[rank] <= least[rank] / 2 else 0
        waiting = max(0.0, float(behind[rank]))
        return None if self._calm >= REVIEWS else replace(self.slow, waiting_s=waiting, step_s=times.step_s)

    def _say(self, line: str) -> None:
        if self._announce is not None:
            self._announce(line)


def _least(own: np.ndarray) -> np.ndarray:
    return np.maximum(LEAST_SHARE * own, LEAST_S)


def median_of_others(values: np.ndarray) -> np.ndarray:
    """Of each of at least two values [W] the median of the others."""
    ascending, places = np.sort(values), np.argsort(np.argsort(values))
    # without the value itself, those behind it move up by one
    low, high = (ascending[k + (places <= k)] for k in ((len(values) - 2) // 2, (len(values) - 1) // 2))
    return (low + high) / 2

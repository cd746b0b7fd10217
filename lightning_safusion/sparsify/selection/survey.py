"""What is known of a span before a selection reads it: an explicit argument, and who keeps it.

A :class:`History` is kept by whoever selects from the same place again and again (a buffer). For each selection it
makes a :class:`SpanSurvey`, which holds for one span, as long as nobody writes to it, and for nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Segments, Selection, Sparsifier, check_selection, constant_of_segments
from lightning_safusion.sparsify.selection.view import MAGNITUDE_BITS

UNKNOWN = MAGNITUDE_BITS  # a floor that lets nothing through

# Candidates that a floor should let through, in elements that are looked for: enough that the next step hardly ever
# finds too few, which costs another look at the segment.
_SPARE, _SIGMAS, _MORE = 1.5, 4, 32
# How thresholds follow the number that they let through. Whoever was above the last one has been sent, so that there
# are many residuals a little below it and few above, and the next one may be a little lower or higher: they stay where
# they let enough through in all steps, as long as these are not too many.
_FALLS, _RISES, _TOO_MANY, _SHARE = 0.93, 1.02, 4, 0.1
_FAR_FROM, _STEEPNESS, _HIGHER = 8, 0.2, 2
_FAR_OFF = 64  # times the candidates that it should let through: it is guessed anew
# Room for candidates: times the quotas, and a share of the elements that is not exceeded without need.
_ROOM, _ROOM_AT_LEAST, _ROOM_SHARE, _ROOM_NEEDED = 16, 1 << 12, 1 / 8, 4


@dataclass(frozen=True, eq=False)
class Live:
    """The segments with elements and a quota ([A]); nothing is selected from others.

    Args:
        places: int64 [A], which segments.
        starts: int64 [A], their first elements.
        sizes: int64 [A], their elements.
        quotas: int64 [A], no more than these.
        parts: The same runs as compiled kernels take them.
        room: For how many candidates there shall be room.
    """

    places: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    quotas: np.ndarray
    parts: native.Parts
    room: int

    @staticmethod
    @constant_of_segments
    def of(segments: Segments) -> Live:
        """Those of ``segments``, worked out once."""
        places = np.flatnonzero((segments.sizes > 0) & (segments.quotas > 0))
        starts, sizes = segments.edges[places], segments.sizes[places]
        room = min(_ROOM * segments.capacity, int(_ROOM_SHARE * segments.numel))
        room = max(_ROOM_AT_LEAST, _ROOM_NEEDED * segments.capacity, room)
        quotas = np.minimum(segments.quotas[places], sizes)
        return Live(places, starts, sizes, quotas, native.Parts.of(starts, sizes), room)


class Prediction:
    """Predicted thresholds of one cut. A wrong one costs time, never correctness.

    Args:
        segments: The cut.

    Attributes:
        bits: int32 [A + 1], of the magnitudes that the quota of each live segment, and at last the room of all of them
            together, is most likely above; :data:`UNKNOWN` where nothing is known.
        sums: Which sums will most likely be asked for.
    """

    def __init__(self, segments: Segments) -> None:
        self.live = live = Live.of(segments)
        ranks, sizes = np.append(live.quotas, segments.capacity), np.append(live.sizes, segments.numel)
        self._enough = _SPARE * ranks + _SIGMAS * np.sqrt(ranks) + _MORE
        self._many = np.clip(_SHARE * sizes / np.maximum(ranks, 1), 1, _TOO_MANY)
        self.sums: native.Sums | None = None
        self.forget()

    def forget(self) -> None:
        """Knows nothing any more: where far too many elements were above the floors, samples tell better."""
        self.bits = np.full(len(self._enough), UNKNOWN, np.int32)

    def learn(self, floors: np.ndarray, counts: np.ndarray) -> None:
        """Takes in how many elements (int64 [A + 1]) were above floors (int32 [A + 1]; UNKNOWN tells nothing)."""
        shares = counts / self._enough
        factors = np.where(shares < 1, _FALLS, np.where(shares < self._many, 1, _RISES))
        factors = np.where(shares < _FAR_FROM, factors, np.minimum(shares**_STEEPNESS, _HIGHER))
        with np.errstate(invalid="ignore", over="ignore"):
            moved = np.maximum(floors, 0).view(np.float32) * factors.astype(np.float32)
        # a floor of 0 finds all non-zeros: there it stays as long as there are not too many of them
        usable = ((floors > 0) & (shares < _FAR_OFF) | (floors == 0) & (shares < self._many)) & np.isfinite(moved)
        learned = np.where(usable, moved.view(np.int32), np.int32(UNKNOWN))
        self.bits = np.where(floors < UNKNOWN, learned, self.bits)

    def no_higher(self, floors: np.ndarray, short: np.ndarray) -> None:
        """Takes in floors (int32 [A]) for the live segments (bool [A]) that too few were found in."""
        bits = self.bits.copy()
        bits[:-1] = np.where(short & (floors >= 0), np.minimum(bits[:-1], floors), bits[:-1])
        self.bits = bits


class Seen(NamedTuple):
    """What was found in a span while gradients were added to it.

    Args:
        lists: Those of its elements that are above some floors; None if there was no room for them.
        floors: int32 [A], these floors.
        kind: What was summed, if anything.
        sums: float64 [A]; None if nothing was summed, like the squares.
        squares: float64 [A], sums of squares.
    """

    lists: native.Lists | None
    floors: np.ndarray
    kind: native.Sums | None
    sums: np.ndarray | None
    squares: np.ndarray | None


class History:
    """Predicted thresholds of one cut of a span, learned from every selection. No result depends on them.

    Args:
        segments: The cut.

    Attributes:
        learned: What earlier selections with the cut itself predict; None before the first.
    """

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self.learned: Prediction | None = None
        self._others: dict[Segments, Prediction] = {}

    def survey(self, x: Tensor) -> SpanSurvey:
        """What is known of ``x`` (float32 [N]), the span as it is now."""
        return SpanSurvey(x, self)

    def prediction(self, segments: Segments) -> Prediction | None:
        """Of the cut itself, or of the two that a pooled selection derives from it; of another one, None."""
        own = self.segments
        if segments is own:
            self.learned = self.learned or Prediction(own)
            return self.learned
        if not (own.pool and (segments is own.unpooled or segments is own.as_one)):
            return None
        if segments not in self._others:
            self._others[segments] = Prediction(segments)
        return self._others[segments]


class SpanSurvey:
    """What is known of one span: predicted thresholds, and elements and sums that were found in it already.

    A sparsifier whose ``select`` takes it (``survey``) passes it on to :func:`segmented_view`. It holds for the tensor
    that was surveyed, and for other views of the same elements. Of a product, a copy, a slice or another order of them
    nothing is known, and neither is anything once they have been written to.

    Args:
        x: float32 [N].
        history: Of its cut.
        seen: What was found in its elements.
    """

    def __init__(self, x: Tensor, history: History, seen: Seen | None = None) -> None:
        self._x, self._history, self._seen = x, history, seen
        # where it lies and how often it was written to; None for a tensor that does not count that, or on a device
        counted = x.is_cpu and not x.is_inference()
        self._state = (x.data_ptr(), x.numel(), x._version) if counted else None

    def take(self, x: Tensor, segments: Segments) -> tuple[Prediction | None, Seen | None]:
        """What is known of ``x`` with this cut. Found elements are handed out once: their lists are worked on in place.

        Args:
            x: float32 [N].
            segments: Its cut.
        """
        same = x is self._x or (x._base is not None and x._base is self._x._base)
        if self._state is None or not same or (x.data_ptr(), x.numel(), x._version) != self._state:
            return None, None
        if segments is not self._history.segments:
            return self._history.prediction(segments), None
        seen, self._seen = self._seen, None
        return self._history.learned or self._history.prediction(segments), seen

    def end(self) -> None:
        """Nothing is known any more: the span will be written to by kernels that no version counter notices."""
        self._state = self._seen = None

    def __enter__(self) -> SpanSurvey:
        return self

    def __exit__(self, *_: object) -> None:
        self._state = self._seen = None


class Foresight:
    """Lets elements be found, and sums be made, while gradients are added, before anyone has asked for them.

    Args:
        history: Of the span that will be selected from.
        edges: Where the tensors of the span begin and end: each lies in one segment.
    """

    def __init__(self, history: History, edges: Sequence[int]) -> None:
        self.history, segments = history, history.segments
        self._live = live = Live.of(segments)
        bounds, number = np.asarray(edges, np.int64), len(live.places)
        starts = bounds[:-1][np.diff(bounds) > 0]
        live_places = np.full(len(segments), number)
        live_places[live.places] = np.arange(number)
        #: int64 [T], the live segment of each tensor, and one behind the last for those that lie in none
        self._owners = live_places[np.searchsorted(segments.edges, starts, side="right") - 1]
        #: each tensor is a segment of its own, as before fusion
        self._one_each = np.array_equal(self._owners, np.arange(number))
        self._addressed = segments.numel < native.MOST_ELEMENTS
        self._floors = np.empty(0, np.int32)
        self._kind: native.Sums | None = None

    def wanted(self) -> native.Wanted | None:
        """What is to be found, with a floor for each tensor that is not empty; None if nothing is known."""
        prediction = self.history.learned
        if prediction is None or not self._addressed:
            return None
        floors = self._floors = np.minimum(prediction.bits[:-1], prediction.bits[-1])
        self._kind = prediction.sums
        if not self._one_each:
            floors = np.append(floors, np.int32(UNKNOWN))[self._owners]
        return native.Wanted(floors, self._live.room, self._kind)

    def known(self, x: Tensor, found: native.Survey | None) -> SpanSurvey:
        """What is known of a span, until the context ends that this is entered as.

        Args:
            x: float32 [N], the memory to which the gradients were added.
            found: What was wanted, as it was found in it.
        """
        history = self.history
        if found is None:
            return SpanSurvey(x, history)
        places, bits, counts, sums, squares = found
        if not self._one_each:
            counts = self._per_segment(counts).astype(np.int64)
            sums = None if sums is None else self._per_segment(sums)
            squares = None if squares is None else self._per_segment(squares)
        lists = None
        if places is not None and bits is not None:
            lists = native.Lists(places, bits, counts)
        elif history.learned is not None:
            history.learned.forget()
        return SpanSurvey(x, history, Seen(lists, self._floors, self._kind, sums, squares))

    def _per_segment(self, per_tensor: np.ndarray) -> np.ndarray:
        """float64 [A], sums over the tensors of each live segment."""
        number = len(self._live.places)
        return np.bincount(self._owners, per_tensor, number + 1)[:number]


def select_with(
    sparsifier: Sparsifier, x: Tensor, segments: Segments, step: int, survey: SpanSurvey | None
) -> Selection:
    """:meth:`Sparsifier.select`, with the survey where it takes one.

    Args:
        sparsifier: Of this package or somebody else's.
        x: float32 [N], contiguous.
        segments: Its cut.
        step: Number of the optimizer step.
        survey: What is known of ``x``.
    """
    select: Any = sparsifier.select
    if survey is not None and _takes_survey(getattr(select, "__func__", select)):
        selection: Selection = select(x, segments, step, survey=survey)
        return selection
    return sparsifier.select(x, segments, step)


@lru_cache(maxsize=128)
def _takes_survey(select: Callable[..., Any]) -> bool:
    """Whether it names the parameter: one that hands on whatever it gets does not say that it knows it."""
    return "survey" in inspect.signature(select).parameters


class Selector:
    """Selects from spans with the compressor of the job, for one thread at a time.

    Args:
        sparsifier: The compressor; what it learns is this job's.
    """

    def __init__(self, sparsifier: Sparsifier) -> None:
        self.sparsifier = sparsifier
        self._selecting = Lock()  # what a sparsifier learns is not made for two threads

    def select(self, x: Tensor, history: History, step: int, survey: SpanSurvey | None = None) -> Selection:
        """Selects from a span of any device; safe to call on any thread.

        Args:
            x: float32 [N], residual plus gradient.
            history: Its cut, and what earlier selections with that have shown.
            step: Number of the window.
            survey: What is known of ``x``; None for what the history tells.
        """
        segments = history.segments
        with self._selecting:
            selection = select_with(self.sparsifier, x, segments, step, survey or history.survey(x))
        # a broken contract would not raise anywhere: it would train on wrong gradients, the same on all ranks
        if not type(self.sparsifier).__module__.startswith("lightning_safusion."):
            check_selection(selection, segments, self.sparsifier.name)
        return selection

"""What is known of a span before a selection reads it: an explicit argument, and who keeps it.

A :class:`History` is kept by whoever selects from the same place again and again (a buffer). For each selection it
makes a :class:`SpanSurvey`, which holds for one tensor, as long as nobody writes to it, and for nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Segments, Selection, Sparsifier
from lightning_safusion.sparsify.selection.candidates import Candidates, Swept
from lightning_safusion.sparsify.selection.floors import LikelyFloors, room_of
from lightning_safusion.sparsify.selection.pieces import Pieces
from lightning_safusion.sparsify.selection.view import MAGNITUDE_BITS


class Seen(NamedTuple):
    """What was found in a span while gradients were added to it.

    Args:
        swept: Some of its elements; None if there was no room for them.
        kind: What was summed, if anything.
        sums: float64 [A]; None if nothing was summed, like the squares.
        squares: float64 [A], sums of squares.
    """

    swept: Swept | None
    kind: native.Sums | None
    sums: np.ndarray | None
    squares: np.ndarray | None


class History:
    """Predicted thresholds of one cut of a span, learned from every selection. No result depends on them.

    Args:
        segments: The cut.
    """

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self._likely: dict[Segments, LikelyFloors] = {}

    @property
    def learned(self) -> LikelyFloors | None:
        """What earlier selections with the cut itself predict; None before the first."""
        return self._likely.get(self.segments)

    def survey(self, x: Tensor, seen: Seen | None = None) -> SpanSurvey:
        """What is known of ``x`` [N], the span as it is now.

        Args:
            x: float32 [N].
            seen: What was found in its elements.
        """
        return SpanSurvey(x, self, seen)

    def likely(self, segments: Segments) -> LikelyFloors | None:
        """Of the cut itself, or of the two that a pooled selection derives from it; of another one, None."""
        own = self.segments
        if segments is not own and not (own.pool and (segments is own.unpooled or segments is own.as_one)):
            return None
        if segments not in self._likely:
            self._likely[segments] = LikelyFloors.unknown(segments)
        return self._likely[segments]


class SpanSurvey:
    """What is known of one span: predicted thresholds, and elements and sums that were found in it already.

    A sparsifier whose ``select`` takes it (``survey``) passes it on to :func:`segmented_view`. It holds for the very
    tensor that was surveyed. Of a product, a copy, a slice, a view or another order of it nothing is known, and neither
    is anything once it has been written to.

    Args:
        x: float32 [N].
        history: Of its cut.
        seen: What was found in its elements.
    """

    def __init__(self, x: Tensor, history: History, seen: Seen | None = None) -> None:
        self._x, self._state = x, _state(x)
        self._history, self._seen = history, seen

    def take(self, x: Tensor, segments: Segments) -> tuple[LikelyFloors | None, Seen | None]:
        """What is known of ``x`` with this cut. Found elements are handed out once: their lists are worked on in place.

        Args:
            x: float32 [N].
            segments: Its cut.
        """
        if x is not self._x or self._state is None or _state(x) != self._state:
            return None, None
        seen = None
        if segments is self._history.segments:
            seen, self._seen = self._seen, None
        return self._history.likely(segments), seen

    def end(self) -> None:
        """Nothing is known any more: the span will be written to by kernels that no version counter notices."""
        self._state = self._seen = None

    def __enter__(self) -> SpanSurvey:
        return self

    def __exit__(self, *_: object) -> None:
        self._state = self._seen = None


def _state(x: Tensor) -> tuple[int, int] | None:
    """Where a tensor lies and how often it was written to; None for one that does not count that, or on a device."""
    return (x.data_ptr(), x._version) if x.device.type == "cpu" and not x.is_inference() else None


class Foresight:
    """Lets elements be found, and sums be made, while gradients are added, before anyone has asked for them.

    Args:
        history: Of the span that will be selected from.
        edges: Where the tensors of the span begin and end: each lies in one segment.
    """

    def __init__(self, history: History, edges: Sequence[int]) -> None:
        self._history, self._segments = history, history.segments
        self._layout, self._length = Pieces.of(history.segments), len(history.segments)
        bounds = np.asarray(edges, np.int64)
        starts = bounds[:-1][np.diff(bounds) > 0]
        self._owners = np.searchsorted(self._segments.edges, starts, side="right") - 1
        #: each tensor is a segment of its own, as ahead of fusion
        self._one_each = np.array_equal(self._owners, self._layout.active)
        self._floors = np.empty(0, np.int32)
        self._kind: native.Sums | None = None

    def wanted(self) -> native.Wanted | None:
        """What is to be found, with a floor for each tensor that is not empty; None if nothing is known."""
        likely = self._history.learned
        if likely is None or self._segments.numel >= native.MOST_ELEMENTS:
            return None
        self._floors, self._kind = likely.floors(self._layout.idle, self._segments.pool > 0), likely.sums
        floors = self._floors
        if not self._one_each:
            floors = np.full(self._length, MAGNITUDE_BITS, np.int32)
            floors[self._layout.active] = self._floors
            floors = floors[self._owners]
        return native.Wanted(floors, room_of(self._segments), self._kind)

    def known(self, x: Tensor, found: native.Survey | None) -> SpanSurvey:
        """What is known of a span, until the context ends that this is entered as.

        Args:
            x: float32 [N], the memory to which the gradients were added.
            found: What was wanted, as it was found in it.
        """
        return SpanSurvey(x, self._history, None if found is None else self._seen(found))

    def _seen(self, found: native.Survey) -> Seen:
        swept, counts, sums, squares = None, found.counts, found.sums, found.squares
        if not self._one_each:
            counts = self._per_segment(counts).astype(np.int64)
            sums = None if sums is None else self._per_segment(sums)
            squares = None if squares is None else self._per_segment(squares)
        if found.places is not None and found.bits is not None:
            swept = Swept(self._floors, [], Candidates(found.places, found.bits, counts))
        elif (likely := self._history.learned) is not None:
            likely.forget()
        return Seen(swept, self._kind, sums, squares)

    def _per_segment(self, per_tensor: np.ndarray) -> np.ndarray:
        """float64 [A], sums over the tensors of each active segment."""
        return np.bincount(self._owners, per_tensor, self._length)[self._layout.active]


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

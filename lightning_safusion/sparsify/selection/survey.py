"""What is known of a span before a selection reads it, and the one place from which the engine selects.

A *floor* is a magnitude that about as many elements exceed as are looked for: predicted from earlier selections, or
guessed from samples. A wrong floor costs time, never correctness.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

import numpy as np
from torch import Tensor

from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Segments, Selection, Sparsifier, check_selection, constant_of_segments
from lightning_safusion.sparsify.selection.units import SpanUnits, UpdateUnits
from lightning_safusion.sparsify.selection.view import MAGNITUDE_BITS, ranked

UNKNOWN = MAGNITUDE_BITS  # a floor that no element exceeds

# Candidates that should exceed a floor, in elements that are looked for: enough that the next step rarely finds too
# few, which costs another pass over the segment.
_SPARE, _SIGMAS, _MORE = 1.5, 4, 32
# Candidates that are too many, times those, or as a share of the elements.
_TOO_MANY, _SHARE = 4, 0.1
# Room for candidates: times the quotas, and a share of the elements that is not exceeded without need.
_ROOM, _ROOM_AT_LEAST, _ROOM_SHARE, _ROOM_NEEDED = 16, 1 << 12, 1 / 8, 4
_LEAST = 1024  # elements of a sample


@dataclass(frozen=True, eq=False)
class Live:
    """The segments with elements and a quota ([A]); nothing is selected from others."""

    places: np.ndarray  #: int64 [A], which segments
    starts: np.ndarray  #: int64 [A], their first elements
    sizes: np.ndarray  #: int64 [A], their elements
    quotas: np.ndarray  #: int64 [A], no more than these
    parts: native.Parts  #: the same runs as compiled kernels take them
    room: int  #: for how many candidates there shall be room
    #: float64 [A + 1], candidates of each that should exceed its floor, and at last of all of them together.
    enough: np.ndarray
    #: float64 [A + 1], as many are too many; infinite where all elements are not ``enough``: the floor is 0.
    most: np.ndarray

    @staticmethod
    @constant_of_segments
    def of(segments: Segments) -> Live:
        places = np.flatnonzero((segments.sizes > 0) & (segments.quotas > 0))
        starts, sizes = segments.edges[places], segments.sizes[places]
        room = min(_ROOM * segments.capacity, int(_ROOM_SHARE * segments.numel))
        room = max(_ROOM_AT_LEAST, _ROOM_NEEDED * segments.capacity, room)
        quotas = np.minimum(segments.quotas[places], sizes)
        ranks, elements = np.append(quotas, segments.capacity), np.append(sizes, segments.numel)
        enough = _SPARE * ranks + _SIGMAS * np.sqrt(ranks) + _MORE
        most = np.clip(_SHARE * elements / np.maximum(ranks, 1), 1, _TOO_MANY) * enough
        most[enough >= elements] = np.inf
        return Live(places, starts, sizes, quotas, native.Parts.of(starts, sizes), room, enough, most)


class History:
    """Predicted floors of one cut of a span, learned from every selection."""

    def __init__(self, segments: Segments) -> None:
        self.segments, self.live = segments, Live.of(segments)
        self.sums: native.Sums | None = None  #: which will most likely be asked for
        self.used = False  #: a selection with the cut itself has been made
        self._derived: dict[Segments, History] = {}
        self.forget()

    def forget(self) -> None:
        """Drops the floors: where far too many elements exceeded them, samples give better ones."""
        #: int32 [A + 1], bits of magnitudes that the quota of each live segment, and at last the room of all of them
        #: together, most likely exceed; UNKNOWN where nothing is known.
        self.floors = np.full(len(self.live.enough), UNKNOWN, np.int32)

    def derived(self, segments: Segments) -> History | None:
        """The history of one of the two cuts that a pooled selection derives from this one; None for another cut."""
        own = self.segments
        if not (own.pool and (segments is own.unpooled or segments is own.as_one)):
            return None
        if segments not in self._derived:
            self._derived[segments] = History(segments)
        return self._derived[segments]

    def learn(self, floors: np.ndarray, counts: np.ndarray, common: int = UNKNOWN, above: int = 0) -> None:
        """Records how many elements exceeded floors.

        Args:
            floors, counts: int32 and int64 [A], floors and the elements above each; from UNKNOWN nothing is learned.
            common, above: A floor for all of them together, and the elements above it.
        """
        tried, found = np.empty_like(self.floors), np.empty(len(self.floors))
        tried[:-1], tried[-1], found[:-1], found[-1] = floors, common, counts, above
        self.floors = native.follow(tried, found, self.live.enough, self.live.most, self.floors)

    def lower(self, floors: np.ndarray, short: np.ndarray) -> None:
        """Takes lower floors (int32 [A]) for the live segments (bool [A]) in which too few elements were found."""
        lowered, own = self.floors.copy(), self.floors[:-1]
        lowered[:-1] = np.where(short & (floors >= 0), np.minimum(own, floors), own)
        self.floors = lowered


#: What was looked for in each live segment of a span, and what was found.
Seen: TypeAlias = tuple[native.Wanted, native.Survey]


class SpanSurvey:
    """What is known of one span: predicted floors, and elements and sums that were found in it already.

    A sparsifier whose ``select`` takes it (``survey``) passes it on to :func:`segmented_view`. It holds for the tensor
    that was surveyed and for other views of the same elements, until they are written to; not for a product, a copy, a
    slice or another order of them. As a context it ends with the block, after which kernels that no version counter
    notices write to the span.

    Args:
        x: float32 [N].
        history: Of its cut.
        seen: What was found in its elements.
        write: Writes these, which are not known yet; called before they are read.
    """

    def __init__(
        self, x: Tensor, history: History, seen: Seen | None = None, write: Callable[[], object] | None = None
    ) -> None:
        self._x, self._history, self._seen, self._write = x, history, seen, write
        # where it lies and how often it was written to; None for a tensor that does not count that, or on a device
        counted = x.is_cpu and not x.is_inference()
        self._state = (x.data_ptr(), x.numel(), x._version) if counted else None

    def take(self, x: Tensor, segments: Segments) -> tuple[History | None, Seen | None]:
        """What is known of ``x`` (float32 [N]) with this cut. Found lists are returned once: they are overwritten."""
        same = x is self._x or (x._base is not None and x._base is self._x._base)
        if self._state is None or not same or (x.data_ptr(), x.numel(), x._version) != self._state:
            return None, None
        if segments is not self._history.segments:
            return self._history.derived(segments), None
        self._history.used = True
        seen, self._seen = self._seen, None
        return self._history, seen

    def complete(self, x: Tensor) -> None:
        """Writes the elements of ``x``, if it is the span that was surveyed and they are not known yet."""
        if self._write is not None and x.data_ptr() == self._x.data_ptr():
            write, self._write = self._write, None
            write()

    def __enter__(self) -> SpanSurvey:
        return self

    def __exit__(self, *_: object) -> None:
        self._state = self._seen = self._write = None


class Foresight:
    """Finds elements and makes sums while gradients are added, before a selection asks for them.

    Args:
        history: Of the span that will be selected from.
        edges: Where the tensors of the span begin and end.
    """

    def __init__(self, history: History, edges: Sequence[int]) -> None:
        self.history, segments, live = history, history.segments, history.live
        bounds, number = np.asarray(edges, np.int64), len(live.places)
        #: the tensors, cut where segments begin; None where each lies in one segment
        self.cut = None if np.isin(segments.edges, bounds).all() else _parts(bounds, segments.edges)
        starts = bounds[:-1][np.diff(bounds) > 0] if self.cut is None else self.cut.starts
        live_places = np.full(len(segments), number)
        live_places[live.places] = np.arange(number)
        #: int64 [T], the live segment of each tensor, or part of one, A for those that lie in none
        self._owners = live_places[np.searchsorted(segments.edges, starts, side="right") - 1]
        #: each tensor is a segment of its own, as before fusion
        self._one_each = np.array_equal(self._owners, np.arange(number))
        self._wanted = native.Wanted()

    def wanted(self, weights: native.Weights | None = None, keys: np.ndarray | None = None) -> native.Wanted | None:
        """What to look for, with a floor for each non-empty tensor, or part of one; None if nothing is known.

        Args:
            weights: Of each tensor, where keys are compared.
            keys: Where these are to be written.
        """
        history = self.history
        if not history.used or history.segments.numel >= native.MOST_ELEMENTS:
            return None
        floors = np.minimum(history.floors[:-1], history.floors[-1])
        self._wanted = wanted = native.Wanted(floors, history.live.room, history.sums, weights, keys)
        return wanted if self._one_each else wanted._replace(floors=np.append(floors, np.int32(UNKNOWN))[self._owners])

    def known(self, x: Tensor, found: native.Survey | None, write: Callable[[], object] | None = None) -> SpanSurvey:
        """What is known of ``x`` (float32 [N]), the memory to which gradients were added, with what was found in it.

        Where keys were compared, ``x`` are these, and ``write`` writes them if that was not done.
        """
        if found is None:
            return SpanSurvey(x, self.history, write=write)
        if found.lists is None:
            self.history.forget()
        if not self._one_each:
            counts = self._per_segment(found.counts).astype(np.int64)
            sums, squares = (None if each is None else self._per_segment(each) for each in (found.sums, found.squares))
            lists = None if found.lists is None else found.lists._replace(counts=counts)
            found = native.Survey(lists, counts, sums, squares)
        return SpanSurvey(x, self.history, (self._wanted, found), write)

    def _per_segment(self, per_tensor: np.ndarray) -> np.ndarray:
        """float64 [A], sums over the tensors of each live segment."""
        number = len(self.history.live.places)
        return np.bincount(self._owners, per_tensor, number + 1)[:number]


def _parts(edges: np.ndarray, cuts: np.ndarray) -> native.Parts:
    """Tensors between edges, those without elements left out, cut for threads and at some more places."""
    starts = native.Parts.between(np.union1d(edges, cuts).tolist()).starts
    firsts = np.unique(starts.searchsorted(edges[:-1]))
    return native.Parts(starts, np.diff(starts, append=edges[-1]), firsts[firsts < len(starts)])


class Selector:
    """Selects with the compressor of the job, one thread at a time: what a sparsifier learns is not made for two."""

    def __init__(self, sparsifier: Sparsifier) -> None:
        self.sparsifier = sparsifier
        self.units: UpdateUnits | None = None  #: in which elements are compared; None: those of the gradient
        self.lock = Lock()  #: held while it selects
        self._takes_survey = "survey" in inspect.signature(sparsifier.select).parameters
        self._trusted = type(sparsifier).__module__.startswith("lightning_safusion.")
        #: Reads a span through a view alone, so that keys need not be written before they are read.
        self.lazy = self._trusted and self._takes_survey and sparsifier.reads == "view"

    def select(
        self, x: Tensor, history: History, step: int, survey: SpanSurvey | None = None, units: SpanUnits | None = None
    ) -> Selection:
        """Selects from a span, on any device; safe to call on any thread.

        Args:
            x: float32 [N].
            history: Of its cut.
            step: Number of the window.
            survey: What is known of the elements, or of their keys; without it only what the history predicts.
            units: Elements are compared in these; None: as they are.
        """
        select: Callable[..., Selection] = self.sparsifier.select
        compared = x
        if units is not None:
            compared = units.keys if survey is not None else units.weigh(x)
        known = {"survey": survey or SpanSurvey(compared, history)} if self._takes_survey else {}
        with self.lock:
            selection = select(compared, history.segments, step, **known)
            if units is not None:
                selection = selection.with_values_of(x)
        if not self._trusted:  # a broken contract would train on wrong gradients, the same on all ranks
            check_selection(selection, history.segments, self.sparsifier.name)
        return selection


def guessed_floor(bits: np.ndarray, rank: int) -> int:
    """A floor that the ``rank`` largest elements of a segment (int32 [N], their bits) nearly always exceed; -1: all."""
    size = len(bits)
    if rank == 0:
        return UNKNOWN
    if 2 * rank > size:
        return -1
    # A sample with h hits costs h / density, and its error rank / sqrt(h) more candidates: this power of the rank makes
    # the sum of both least. 128 put the floor within 9 % (one sigma) of the rank.
    hits = min(128, max(24, int((3 * rank * rank / size) ** (2 / 3))))
    stride = size // min(size // 16, max(_LEAST, hits * size // rank)) | 1
    sample = bits[::stride] & MAGNITUDE_BITS
    deep = _deep(rank / stride)
    if deep >= len(sample):
        return -1
    value = int(ranked(sample, deep))
    # One value in a large part of the segment is not worth collecting (the zeros of an embedding's gradient): leave it
    # out, and fill up with its first elements if they are needed after all.
    tied = np.count_nonzero(sample >= value) > 4 * deep
    return value if tied else max(value - 1, 0)


def common_floor(segments: Sequence[np.ndarray], rank: int) -> int:
    """A floor that the ``rank`` (1 or more) largest elements of all segments together (int32, their bits) nearly always
    exceed; -1: all.
    """
    size = sum(map(len, segments))
    stride = max(1, size // min(size, max(_LEAST, 128 * size // rank))) | 1
    sample = np.concatenate([bits[::stride] for bits in segments]) & MAGNITUDE_BITS
    deep = _deep(rank * len(sample) / size)
    return -1 if deep >= len(sample) else max(int(ranked(sample, deep)) - 1, 0)


def _deep(expected: float) -> int:
    """A rank in a sample, three sigma deeper than the expected one."""
    return int(expected + 3 * expected**0.5 + 4)

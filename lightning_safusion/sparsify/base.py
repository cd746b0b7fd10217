"""The contract of a sparsifier: which elements of a span of gradients are sent.

A *span* is a contiguous piece of the flat gradient space. *Segments* cut it: one segment for each tensor selects before
fusion, one segment over several tensors after fusion. A sparsifier does not know which of the two it serves.

Shape suffixes used in this package: N elements of a span, M segments, K kept elements.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor


def element_quota(numel: int, density: float) -> int:
    """Number of elements that a tensor of ``numel`` elements may send at a density in (0, 1].

    At least one element of every non-empty tensor, and no element lost to the float product (``int(100 * 0.29)`` is
    28).
    """
    return min(numel, max(1, math.floor(density * numel + 1e-6)))


@dataclass(frozen=True, eq=False)
class Segments:
    """How a span is cut for selection, and how many elements each segment may send. Immutable.

    Args:
        edges: int64 [M + 1], rising from 0 to N. Segment ``s`` is ``[edges[s], edges[s + 1])``.
        quotas: int64 [M]. Room for each segment; 0 leaves a segment out (it is dense, or has no new gradient).
        keys: One hashable per segment, the same on all ranks: names the segment in random generators and in
            per-segment state. For a tensor it is its registration index.
        shapes: One logical shape per segment (row-wise sparsifiers need it).
        pool: Room for further elements, the largest of the span whatever their segment (pooled quotas).
    """

    edges: np.ndarray
    quotas: np.ndarray
    keys: tuple[Hashable, ...]
    shapes: tuple[tuple[int, ...], ...]
    pool: int = 0

    def __post_init__(self) -> None:
        # read-only copies: constants are worked out from them once
        for name in ("edges", "quotas"):
            array = np.array(getattr(self, name))
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @cached_property
    def numel(self) -> int:
        """Elements of the span (N)."""
        return int(self.edges[-1])

    @cached_property
    def sizes(self) -> np.ndarray:
        """int64 [M], elements of each segment."""
        sizes = np.diff(self.edges)
        sizes.setflags(write=False)
        return sizes

    @cached_property
    def capacity(self) -> int:
        """Most elements that a selection over these segments may hold."""
        return int(self.quotas.sum()) + self.pool

    def __len__(self) -> int:
        return len(self.quotas)

    def skipping(self, skip: np.ndarray) -> Segments:
        """The same cut with the segments where ``skip`` (bool [M]) is true left out of the selection."""
        return replace(self, quotas=np.where(skip, 0, self.quotas))

    @cached_property
    def unpooled(self) -> Segments:
        """The same cut without the pool."""
        return replace(self, pool=0)

    @cached_property
    def as_one(self) -> Segments:
        """The span as a single segment, with room for all quotas and the pool."""
        return span_segments(self.numel, min(self.capacity, self.numel), self.keys)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_of_segments(work_out: _Function) -> _Function:
    """Keeps the results of a pure function of segments and hashable arguments as long as the segments exist."""
    known: WeakKeyDictionary[Segments, dict[tuple[Hashable, ...], Any]] = WeakKeyDictionary()

    @wraps(work_out)
    def constant(segments: Segments, *args: Hashable) -> Any:
        own = known.setdefault(segments, {})
        if args not in own:
            own[args] = work_out(segments, *args)
        return own[args]

    return cast(_Function, constant)


@dataclass(frozen=True)
class Selection:
    """Elements chosen from a span.

    The first ``count`` entries are valid, with unique ascending indices; the rest (fixed capacity on an accelerator,
    where the count is not known to the host) is padding: value 0 and an index inside the span.

    Args:
        indices: int64 [L], positions in the span; L is at most the capacity of the segments.
        values: float32 [L], signed values at these positions.
        count: Number of valid entries: an ``int``, or an int64 tensor of one element on an accelerator.
    """

    indices: Tensor
    values: Tensor
    count: int | Tensor
    #: Compiled kernels have found it: without padding, in contiguous arrays in host memory.
    compiled: ClassVar[bool] = False

    @cached_property
    def positions(self) -> Tensor:
        """The same as ``indices``; int32 where compiled kernels have found them."""
        return self.indices

    def with_values_of(self, x: Tensor) -> Selection:
        """The same positions with the values that ``x`` (float32 [N]) has there, maybe in this selection's memory."""
        values = x[self.indices]
        # padding has a value of 0
        return replace(self, values=values if isinstance(self.count, int) else torch.where(self.values != 0, values, 0))


Reads: TypeAlias = Literal["view", "span", "shape"]


class Sparsifier(ABC):
    """Chooses the elements of each segment that are sent. Subclass it to add a compressor of your own.

    A sparsifier may keep state per segment (thresholds, stage counts), keyed by ``segments.keys``. It must be a pure
    function of its input, its state and ``step``: it draws no global random number.
    """

    name: ClassVar[str]
    #: What ``select`` reads of the span: ``"view"`` nothing but :func:`segmented_view`, ``"span"`` the elements
    #: themselves, ``"shape"`` no element.
    reads: ClassVar[Reads] = "span"

    @property
    def estimates(self) -> bool:
        """May select fewer elements than the quota (an estimator); False means exactly the quota, always."""
        return True

    @abstractmethod
    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:
        """Selects from every segment at most its quota, and at least one element where the quota is positive.

        A subclass may take a fourth parameter, ``survey: SpanSurvey | None = None``: what is known of ``x`` already.
        Passed on to :func:`segmented_view` it saves time; it changes no selection.

        Args:
            x: float32 [N], contiguous. Not changed. Finite in training; the selection must be valid with NaN or Inf
                too.
            segments: The cut of ``x`` and the quotas.
            step: Number of the optimizer step, the same on all ranks.
        """

    def quota(self, numel: int, shape: tuple[int, ...], density: float) -> int:
        """Room that a tensor needs at ``density`` (elements). Row-wise sparsifiers override it."""
        return element_quota(numel, density)

    def state_dict(self) -> dict[str, Any]:
        """State with which a resumed run selects as the interrupted one would have; plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        Raises:
            ValueError: If there is state that this sparsifier does not have.
        """
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, got {sorted(state)}")


def check_selection(selection: Selection, segments: Segments, name: str) -> None:
    """Checks what a sparsifier of another package has returned (waits for the device).

    Raises:
        TypeError: If it is not a selection of the right types.
        ValueError: If positions are out of range, not ascending or not unique, or their number is not possible.
    """
    if not isinstance(selection, Selection):
        raise TypeError(f"compressor {name!r} returned {type(selection).__name__}; select must return a Selection")
    indices, values = selection.indices, selection.values
    right = indices.dtype == torch.int64 and values.dtype == torch.float32
    if not right or indices.shape != values.shape or indices.dim() != 1:
        raise TypeError(
            f"compressor {name!r} returned indices {indices.dtype} {tuple(indices.shape)} and values {values.dtype} "
            f"{tuple(values.shape)}: indices must be int64, values float32, one for one"
        )
    count = int(selection.count)
    least = min(1, int((segments.quotas > 0).sum()))
    if not least <= count <= min(segments.capacity, len(indices)):
        raise ValueError(f"compressor {name!r} selected {count} elements; possible are {least} to {segments.capacity}")
    valid = indices[:count]
    if count and not (bool((valid[1:] > valid[:-1]).all()) and int(valid[0]) >= 0 and int(valid[-1]) < segments.numel):
        raise ValueError(
            f"compressor {name!r} returned positions that are not ascending, unique and below {segments.numel}: sort "
            "them (indices = indices.sort().values) and take values at the sorted ones"
        )
    counts, quotas = np.diff(np.searchsorted(valid.cpu().numpy(), segments.edges)), segments.quotas
    many = (counts > quotas) & (segments.pool == 0)
    for at in np.flatnonzero(many | (counts == 0) & (np.minimum(quotas, segments.sizes) > 0))[:1].tolist():
        rule = "a segment sends at most its quota" if many[at] else "a segment with a quota sends at least one"
        sent = f"segment {at} (key {segments.keys[at]!r}) has a quota of {quotas[at]} and sent {counts[at]}"
        raise ValueError(f"compressor {name!r}: {rule}; {sent}")


def span_segments(numel: int, quota: int, key: Hashable = 0) -> Segments:
    """One segment over a whole span: selection after fusion."""
    return Segments(np.array([0, numel], np.int64), np.array([quota], np.int64), (key,), ((numel,),))


def stable_hash(text: str) -> int:
    """64 bits of a text; Python's own hash differs from process to process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def as_selection(indices: np.ndarray, x: Tensor) -> Selection:
    """The selection of positions.

    Args:
        indices: int64 [K], ascending and unique positions in the span.
        x: float32 [N], the span, on any device.
    """
    index = torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64)).to(x.device)
    return Selection(index, x[index], len(indices))

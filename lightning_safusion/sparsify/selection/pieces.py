"""How a span is cut for the CPU: into pieces that stay in the cache, large segments in parts, small ones together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from lightning_safusion.kernels.cpu import Parts
from lightning_safusion.sparsify.base import Segments, constant_of_segments

BLOCK = 1 << 16  # elements of a block
SMALL = 1 << 14  # segments up to this size share blocks, and are never sampled
_FEW = 1 / 8  # of the elements
_ROW = 1 << 10  # elements whose squares are added by one dot product
_MAXIMA_PER_RANK = 2  # sub-blocks for every element looked for: costs about a quarter more candidates than needed


@dataclass(frozen=True, eq=False)
class Piece:
    """Up to about a block of elements: a part of one segment, or several whole ones.

    Args:
        start: First element in the span.
        stop: Element after the last.
        first: Place of its (first) segment among the active ones.
        last: Place after its last segment.
        offsets: Where each of several segments begins in the piece; None for a part of one segment.
        lengths: Elements of each of several segments.
    """

    start: int
    stop: int
    first: int
    last: int
    offsets: np.ndarray | None = None
    lengths: np.ndarray | None = None

    def spread(self, per_segment: np.ndarray) -> np.ndarray:
        """One number per active segment as an operand for the elements of this piece."""
        if self.lengths is None:
            return np.asarray(per_segment[self.first])
        return np.repeat(per_segment[self.first : self.last], self.lengths)


@dataclass(frozen=True, eq=False)
class SubBlocks:
    """Small segments cut into sub-blocks, at least as many as each has elements to be found.

    The ``k``-th largest of the maxima of disjoint sub-blocks is never more than the ``k``-th largest element: it is the
    ``k``-th largest of a subset of the elements.

    Args:
        places: int64 [S], the small segments among the active ones.
        counts: int64 [S], sub-blocks of each.
        offsets: For each piece of small segments, the piece and where its sub-blocks begin in it.
    """

    places: np.ndarray
    counts: np.ndarray
    offsets: tuple[tuple[Piece, np.ndarray], ...]

    @classmethod
    def of(cls, layout: Pieces, ranks: np.ndarray) -> SubBlocks:
        """Sub-blocks for finding the ``ranks`` (int64 [A]) largest elements of each active segment."""
        shared = [piece for piece in layout.pieces if piece.lengths is not None]
        places = np.concatenate([np.arange(p.first, p.last) for p in shared] or [np.empty(0, np.int64)])
        sizes = layout.sizes[places]
        widths = np.maximum(sizes // (_MAXIMA_PER_RANK * np.maximum(ranks[places], 1)), 1)
        counts = -(-sizes // widths)
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # within their segment
        starts = np.repeat(layout.starts[places], counts) + numbers * np.repeat(widths, counts)
        cuts = np.searchsorted(starts, [piece.stop for piece in shared])
        offsets = [part - piece.start for piece, part in zip(shared, np.split(starts, cuts), strict=False)]
        return cls(places, counts, tuple(zip(shared, offsets, strict=True)))


@dataclass(frozen=True, eq=False)
class Pieces:
    """The active segments ([A]) and the pieces that cover them.

    Active are the segments with elements and a quota, and the small ones without a quota: leaving these out would tear
    the pieces apart.
    """

    active: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    quotas: np.ndarray
    pieces: tuple[Piece, ...]

    @staticmethod
    @constant_of_segments
    def of(segments: Segments) -> Pieces:
        """The layout of ``segments``, worked out once."""
        active = np.flatnonzero((segments.sizes > 0) & ((segments.quotas > 0) | (segments.sizes <= SMALL)))
        starts, stops = segments.edges[active], segments.edges[active + 1]
        quotas = np.minimum(segments.quotas[active], stops - starts)
        return Pieces(active, starts, stops, quotas, tuple(_cut(starts, stops)))

    @cached_property
    def sizes(self) -> np.ndarray:
        """int64 [A], elements of each segment."""
        sizes: np.ndarray = self.stops - self.starts
        return sizes

    @cached_property
    def parts(self) -> Parts:
        """The segments as compiled kernels take them."""
        return Parts.of(self.starts, self.sizes)

    @cached_property
    def idle(self) -> np.ndarray:
        """bool [A], segments without a quota."""
        return self.quotas == 0

    @cached_property
    def large(self) -> list[int]:
        """Places of the segments that have pieces of their own."""
        return np.flatnonzero(self.sizes > SMALL).tolist()

    @cached_property
    def few_small(self) -> np.ndarray:
        """bool [A], small segments with a quota, if they have a small share of the elements; otherwise none."""
        small = (self.sizes <= SMALL) & ~self.idle
        return small & (self.sizes[small].sum() < _FEW * self.sizes.sum())

    @cached_property
    def sub_blocks(self) -> SubBlocks:
        """Sub-blocks for finding the quota of every segment."""
        return SubBlocks.of(self, self.quotas)


def _cut(starts: np.ndarray, stops: np.ndarray) -> list[Piece]:
    """Cuts large segments into blocks and joins neighbouring small ones."""
    pieces: list[Piece] = []
    place, count = 0, len(starts)
    while place < count:
        low, high = int(starts[place]), int(stops[place])
        if high - low > SMALL:
            pieces += [Piece(at, min(at + BLOCK, high), place, place + 1) for at in range(low, high, BLOCK)]
            place += 1
            continue
        first = place
        while (
            place < count
            and stops[place] - low <= BLOCK
            and stops[place] - starts[place] <= SMALL
            and (place == first or starts[place] == stops[place - 1])
        ):
            place += 1
        lengths = stops[first:place] - starts[first:place]
        pieces.append(Piece(low, int(stops[place - 1]), first, place, starts[first:place] - low, lengths))
    return pieces


def add_sums(totals: np.ndarray, piece: Piece, block: np.ndarray) -> None:
    """Adds the sums of a piece to float64 totals [A]; torch and NumPy sum pairwise, so a block loses no digits."""
    if piece.offsets is None:
        totals[piece.first] += torch.from_numpy(block).sum().item()  # NumPy takes four times as long
    else:
        totals[piece.first : piece.last] = np.add.reduceat(block, piece.offsets)


def add_squares(totals: np.ndarray, piece: Piece, block: np.ndarray) -> None:
    """Adds the sums of the squares of a piece (float32) to float64 totals [A]."""
    if piece.offsets is not None:
        add_sums(totals, piece, np.square(block))
        return
    # Dot products need no temporary; of rows, so that none loses digits and no BLAS starts threads.
    whole = len(block) // _ROW * _ROW
    rows = block[:whole].reshape(-1, _ROW)
    totals[piece.first] += np.vecdot(rows, rows).sum(dtype=np.float64) + np.square(block[whole:]).sum()


def add_counts(counts: np.ndarray, piece: Piece, mask: np.ndarray) -> None:
    """Adds the number of true elements of a piece to int64 counts [A]."""
    if piece.offsets is None:
        counts[piece.first] += np.count_nonzero(mask)
    else:
        counts[piece.first : piece.last] = np.add.reduceat(mask, piece.offsets, dtype=np.int64)


def lengths_between(stops: np.ndarray) -> np.ndarray:
    """Lengths of parts that follow each other, from the places after their last elements."""
    lengths = stops.copy()
    lengths[1:] -= stops[:-1]
    return lengths


def kth_of_lists(bits: np.ndarray, counts: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """The ``ranks``-th largest (1 to ``counts``) of every list in ``bits``, by one sort of all lists together."""
    # the list in the high half of the key, the descending magnitude in the low
    lists = np.arange(1, len(counts) + 1) << 32
    keys = np.repeat(lists, counts) - bits
    keys.sort()
    kth: np.ndarray = lists - keys[counts.cumsum() - counts + ranks - 1]
    return kth

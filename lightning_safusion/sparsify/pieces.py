"""How a span is cut for the CPU: into pieces that stay in the cache, large segments in parts, small ones together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_safusion.sparsify.base import Segments

BLOCK = 1 << 16  # elements of a block
SMALL = 1 << 14  # segments up to this size share blocks, and are never sampled


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
class Pieces:
    """The active segments (those with elements and a quota; [A]) and the pieces that cover them."""

    active: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    quotas: np.ndarray
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, segments: Segments) -> Pieces:
        """The layout of ``segments``, worked out once."""
        if "numpy pieces" not in segments.cache:
            active = np.flatnonzero((segments.quotas > 0) & (segments.sizes > 0))
            starts, stops = segments.edges[active], segments.edges[active + 1]
            quotas = np.minimum(segments.quotas[active], stops - starts)
            segments.cache["numpy pieces"] = cls(active, starts, stops, quotas, tuple(_cut(starts, stops)))
        layout: Pieces = segments.cache["numpy pieces"]
        return layout


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
    """Adds the sums of a piece to float64 totals [A]; NumPy sums pairwise, so a block loses no digits."""
    if piece.offsets is None:
        totals[piece.first] += np.add.reduce(block)
    else:
        totals[piece.first : piece.last] = np.add.reduceat(block, piece.offsets)


def add_counts(counts: np.ndarray, piece: Piece, mask: np.ndarray) -> None:
    """Adds the number of true elements of a piece to int64 counts [A]."""
    if piece.offsets is None:
        counts[piece.first] += np.count_nonzero(mask)
    else:
        counts[piece.first : piece.last] = np.add.reduceat(mask, piece.offsets, dtype=np.int64)

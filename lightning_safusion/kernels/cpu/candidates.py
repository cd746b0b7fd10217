"""What is done to elements that have been found: lists of positions and bits, one behind the other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_safusion.kernels.cpu.library import kernels
from lightning_safusion.kernels.cpu.workspace import grown


def number_above(
    bits: np.ndarray, counts: np.ndarray, floors: np.ndarray, known: np.ndarray, numbers: np.ndarray
) -> np.ndarray:
    """How many (int64 [S]) of each list have bits of magnitude above its floor.

    Args:
        bits: int32 [C].
        counts: int64 [S], entries of each list.
        floors: int32 [S].
        known: int32 [S], floors for which that is known already.
        numbers: int64 [S], how many those are.
    """
    found = numbers.astype(np.int64)
    floors, known = np.ascontiguousarray(floors, np.int32), np.ascontiguousarray(known, np.int32)
    kernels().safusion_number_above(bits, np.ascontiguousarray(counts, np.int64), floors, known, len(counts), found)
    return found


def keep_above(
    places: np.ndarray, bits: np.ndarray, counts: np.ndarray, floors: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Leaves what has bits of magnitude above the floor of its list in the lists.

    Args:
        places: int32 [C]; changed, as the bits are.
        bits: int32 [C].
        counts: int64 [S], entries of each list.
        floors: int32 [S].

    Returns:
        Views of places and bits, and how many each list has left.
    """
    numbers = np.empty(len(counts), np.int64)
    counts, floors = np.ascontiguousarray(counts, np.int64), np.ascontiguousarray(floors, np.int32)
    kept = kernels().safusion_keep_above(places, bits, counts, floors, len(counts), numbers)
    return places[:kept], bits[:kept], numbers


def keep_largest(
    places: np.ndarray, bits: np.ndarray, counts: np.ndarray, floors: np.ndarray, quotas: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Leaves of several lists the largest magnitudes above the floor of each; of equal ones the first.

    Args:
        places: int32 [C], those of the first list, of the second, and so on; changed, as the bits are.
        bits: int32 [C].
        counts: int64 [S], entries of each list.
        floors: int32 [S], of the bits of magnitudes; -1 lets all through.
        quotas: int64 [S], most that are kept of each.

    Returns:
        Views of places and bits.
    """
    counts, quotas = np.ascontiguousarray(counts, np.int64), np.ascontiguousarray(quotas, np.int64)
    floors = np.ascontiguousarray(floors, np.int32)
    kept = kernels().safusion_keep_largest(places, bits, counts, floors, quotas, len(counts))
    return places[:kept], bits[:kept]


class Lists(NamedTuple):
    """Elements that have been found, in lists one behind the other.

    Args:
        places: int32 [C], positions in the span.
        bits: int32 [C].
        counts: int64 [S], entries of each list.
    """

    places: np.ndarray
    bits: np.ndarray
    counts: np.ndarray


def replaced(lists: Lists, marked: np.ndarray, others: Lists) -> Lists:
    """Lists of which those that are ``marked`` (bool [S]) are replaced by others; they move in the room that they have.

    Raises:
        ValueError: If some other list is shorter than the one in whose place it comes.
    """
    counts, other_counts = np.ascontiguousarray(lists.counts, np.int64), np.ascontiguousarray(others.counts, np.int64)
    if (other_counts < counts[marked]).any():
        raise ValueError("a list can only be replaced by one that is no shorter: the others would be overwritten")
    new = counts.copy()
    new[marked] = other_counts
    size = int(new.sum())
    places, bits = grown(lists.places, size), grown(lists.bits, size)
    mark = marked.astype(np.uint8)
    found = others.places, others.bits, other_counts
    kernels().safusion_replace(places, bits, counts, mark, len(counts), *found)
    return Lists(places, bits, new)


class Shares(NamedTuple):
    """How lists share a room.

    Args:
        floors: int32 [S], of the bits of magnitudes: what is taken is above them.
        numbers: int64 [S], how many are taken of each list, the largest of what is above its floor.
        lowest: Bits of the least magnitude that is among the largest of all.
    """

    floors: np.ndarray
    numbers: np.ndarray
    lowest: int


def share(bits: np.ndarray, counts: np.ndarray, quotas: np.ndarray, room: int) -> Shares:
    """Shares a room: of each list its quota at least, and otherwise the largest of all, of equal ones the first.

    Numbers exceed the room where the last of the largest have equals, and quotas take the places of larger ones.

    Args:
        bits: int32 [C].
        counts: int64 [S], entries of each list, not fewer than its quota.
        quotas: int64 [S].
        room: Not less than all quotas, and not more than all entries.
    """
    counts, quotas = np.ascontiguousarray(counts, np.int64), np.ascontiguousarray(quotas, np.int64)
    floors, numbers = np.empty(len(counts), np.int32), np.empty((2, len(counts)), np.int64)
    few = np.zeros(len(counts), np.uint8)
    given = bits, counts, quotas, len(counts), room
    lowest = kernels().safusion_share(*given, few, numbers[1], floors, numbers[0])
    return Shares(floors, numbers[0], lowest)

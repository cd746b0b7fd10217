"""What is done to elements that have been found: lists of positions and bits, one behind the other."""

from __future__ import annotations

import numpy as np

from lightning_safusion.native.library import call


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
    found, (floors, known) = numbers.astype(np.int64), _as(np.int32, floors, known)
    call("safusion_number_above", bits, *_as(np.int64, counts), floors, known, len(counts), found)
    return found


def keep_above(
    places: np.ndarray, bits: np.ndarray, counts: np.ndarray, floors: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places and bits of those with bits of magnitude above the floor of their list, and how many each list has left.

    Args:
        places: int64 [C].
        bits: int32 [C].
        counts: int64 [S], entries of each list.
        floors: int32 [S].
    """
    # entries are written before it is known whether they stay
    kept_places, kept_bits = np.empty(len(bits), np.int64), np.empty(len(bits), np.int32)
    numbers = np.empty(len(counts), np.int64)
    (counts,), (floors,) = _as(np.int64, counts), _as(np.int32, floors)
    kept = call("safusion_keep_above", places, bits, counts, floors, len(counts), kept_places, kept_bits, numbers)
    return kept_places[:kept], kept_bits[:kept], numbers


def keep_largest(
    places: np.ndarray, bits: np.ndarray, counts: np.ndarray, floors: np.ndarray, quotas: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Places and bits of the largest magnitudes above the floor of each of several lists; of equal ones the first.

    Args:
        places: int64 [C], those of the first list, of the second, and so on.
        bits: int32 [C].
        counts: int64 [S], entries of each list.
        floors: int32 [S], of the bits of magnitudes; -1 lets all through.
        quotas: int64 [S], most that are kept of each.
    """
    (counts, quotas), (floors,) = _as(np.int64, counts, quotas), _as(np.int32, floors)
    room = int(np.minimum(counts, quotas).sum()) + 1  # entries are written before it is known whether they stay
    kept_places, kept_bits = np.empty(room, np.int64), np.empty(room, np.int32)
    kept = call("safusion_keep_largest", places, bits, counts, floors, quotas, len(counts), kept_places, kept_bits)
    return kept_places[:kept], kept_bits[:kept]


def _as(dtype: type, *arrays: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(array, dtype) for array in arrays]

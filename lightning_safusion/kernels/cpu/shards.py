"""What workers send to the owners of shards, and what owners take out of these."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from lightning_safusion.kernels.cpu.library import Parts, empty, kernels
from lightning_safusion.kernels.cpu.messages import Codes, EliasFano, at

_NONE = np.empty(0, np.int64)


class Outgoing:
    """Where a message of Elias and Fano's positions and of codes is to be written, in arrays that stay where they are.

    Args:
        below: See :func:`write_elias_fano`; so are the next four.
        runs: Where each may have entries.
        low_bits: Of a position in its bucket.
        room: For entries.
        fields: For positions.
        codes: For values; codes and scales lie in ``field``.
        field: uint8, all bytes of values.

    Attributes:
        described: int64 [17], ``struct outgoing``; holds as long as this does.
    """

    def __init__(
        self, below: int, runs: np.ndarray, low_bits: int, room: int, fields: EliasFano, codes: Codes, field: np.ndarray
    ) -> None:
        self._held, self.room = (runs, fields, codes, field), room
        ranks, high, low = fields
        places = [at(ranks), ranks.nbytes, at(high), len(high), at(low), len(low)]
        coded = [at(field), len(field), codes.bits, at(codes.scales), at(codes.starts), len(codes.starts)]
        self.described = np.array([below, at(runs), len(runs), low_bits, room, *places, *coded], np.int64)


def write_messages(
    positions: np.ndarray, values: np.ndarray, counts: np.ndarray, messages: Sequence[Outgoing]
) -> np.ndarray | None:
    """Writes every byte of the fields of several messages: :func:`write_elias_fano` and :func:`quantize`.

    Args:
        positions: int32 or int64 [K], those for one message behind those for the one before.
        values: float32 [K].
        counts: int64, entries of each message.
        messages: Where they are written.

    Returns:
        float32 [K], the decoded values; None if a message has no room for its entries, positions do not ascend or lie
        in no run, or a value or scale is not finite in bfloat16. What was written is to be written again then.
    """
    if any(count > message.room for count, message in zip(counts.tolist(), messages, strict=True)):
        return None
    described = np.concatenate([_NONE, *map(attrgetter("described"), messages)])
    sent = empty(len(positions), np.float32)
    given = positions, 8 * positions.itemsize, counts, values, described, len(messages)
    return sent if kernels().safusion_write(*given, sent) == len(messages) else None


def leaving(
    sums: np.ndarray, parts: Parts, places: np.ndarray, delivered: np.ndarray, room: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """What is delivered, less the sums of some runs, where that is not zero: ascending positions, and values.

    Args:
        sums: float32 [S], those of the runs, one behind the other.
        parts: The runs.
        places: int64 [K], ascending positions in the runs.
        delivered: float32 [K].
        room: For so many elements.

    Returns:
        int64 and float32; None if there was no room, or positions do not ascend or lie in no run.
    """
    positions, values = empty(room, np.int64), empty(room, np.float32)
    given = parts.starts, parts.sizes, len(parts.starts), places, delivered, len(places), room
    found: int = kernels().safusion_leaving(sums, *given, positions, values)
    return None if found < 0 else (positions[:found], values[:found])

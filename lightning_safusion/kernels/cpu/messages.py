"""Messages, also those of shards: their mean, formats (Elias and Fano's positions, bitmaps, codes) and checksums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from lightning_safusion.kernels.cpu.library import Parts, address, empty, kernels, shared, usable
from lightning_safusion.kernels.fields import Encoded, Positions

_NONE, _NO_SCALES = np.empty(0, np.int64), np.empty(0, np.uint16)
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, the lowest bit first
_PAST_CACHES = 1 << 18  # elements that have left the caches by the time that they are read
_DAMAGED = "a message's positions do not ascend, or are not those of its tensors: it is damaged"


class Codes(NamedTuple):
    """Values as compiled kernels read and write them."""

    #: float32 or uint16 (the bits of bfloat16) [K or more]; or uint8 [K / 8 * bits or more]: of each value a level, and
    #: the sign in the highest bit, the first of a byte in its lowest bits.
    codes: np.ndarray
    scales: np.ndarray  #: uint16 [P], bits of a bfloat16 for each part; none of floats
    starts: np.ndarray  #: int64 [P], the first position of each part, ascending
    bits: int  #: of a value: 32, 16, 4, 2 or 1

    @classmethod
    def floats(cls, values: np.ndarray) -> Codes:
        """Values in float32, or the bits of bfloat16."""
        return cls(values, _NO_SCALES, _NONE, 8 * values.itemsize)

    def members(self) -> dict[str, int]:
        """What :class:`Encoded` says of them."""
        parts = {"scales": at(self.scales), "starts": at(self.starts), "parts": len(self.starts)}
        return {"values": at(self.codes), "value_bits": self.bits, **parts}


class Message:
    """A rank's message, still encoded, in arrays that stay where they are."""

    def __init__(self, encoded: Encoded, *held: Any) -> None:
        self._held = held
        self.described = np.array(encoded, np.int64)  #: int64 [14], ``struct message``; holds as long as this does

    @classmethod
    def dense(cls, values: Tensor) -> Message:
        """A value for every position (float32, contiguous)."""
        codes = Codes.floats(values.numpy())
        return cls(Encoded(Positions.EVERY, **codes.members()), codes)

    @classmethod
    def decoded(cls, indices: Tensor, values: Tensor) -> Message:
        """Ascending positions (int64 [K]) and values (float32 [K])."""
        positions, codes = indices.numpy(), Codes.floats(values.contiguous().numpy())
        members = codes.members()
        return cls(Encoded(Positions.LISTED, **members, room=len(positions), positions=at(positions)), positions, codes)

    @classmethod
    def elias_fano(cls, fields: EliasFano, runs: np.ndarray, low_bits: int, room: int, codes: Codes) -> Message:
        """Positions as :func:`write_elias_fano` writes them, with its arguments, and values."""
        places = {"positions": at(fields.high), "ranks": at(fields.ranks), "regions": len(fields.ranks) - 1}
        lower = {"low": at(fields.low), "low_bits": low_bits, "runs": at(runs), "run_count": len(runs)}
        encoded = Encoded(Positions.ELIAS_FANO, **codes.members(), room=room, **places, **lower)
        return cls(encoded, fields, runs, codes)


def at(array: np.ndarray) -> int:
    """Where an array lies in memory."""
    address: int = array.__array_interface__["data"][0]
    return address


def mean_into(grads: Sequence[Tensor], parts: Parts, messages: Together[Message], scale: float) -> bool:
    """Writes sums of scaled entries, added in the order of ranks, and zeros everywhere else.

    Args:
        grads: float32, contiguous, not empty: tensors that follow each other in a span.
        parts: Where they belong in it.
        messages: Of all ranks.
        scale: Factor on the values.

    Returns:
        Whether all sums are finite.

    Raises:
        ValueError: If a message is damaged.
    """
    if not grads:
        return True
    return all(shared(partial(_mean, parts.addresses(grads), parts, messages, scale), parts.sizes))


def mean_by_pieces(
    grads: Sequence[Tensor], parts: Parts, read: Callable[[int, int], Together[Message]], scale: float, piece: int
) -> bool:
    """:func:`mean_into` where reading messages takes memory.

    Args:
        read: Gives the entries of all ranks' messages in the elements ``[start, stop)``, or more; called by several
            threads at once.
        piece: Elements of the span whose entries are read together.
    """
    if not grads:
        return True
    addresses, ends = parts.addresses(grads), parts.starts + parts.sizes

    def write(low: int, high: int) -> bool:
        finite = True
        while low < high:
            stop = max(low + 1, min(high, int(ends.searchsorted(parts.starts[low] + piece, side="right"))))
            messages = read(int(parts.starts[low]), int(ends[stop - 1]))
            finite &= _mean(addresses, parts, messages, scale, low, stop)
            low = stop
        return finite

    return all(shared(write, parts.sizes))


def _mean(addresses: np.ndarray, parts: Parts, messages: Together[Message], scale: float, low: int, high: int) -> bool:
    """:func:`mean_into` for the parts from ``low`` to before ``high``; ``addresses``: int64 [P]."""
    runs = addresses[low:high], parts.starts[low:high], parts.sizes[low:high], high - low
    past_caches = int(parts.sizes.sum() > _PAST_CACHES)
    finite = kernels().safusion_mean(*runs, messages.described, messages.number, scale, past_caches)
    if finite < 0:
        raise ValueError(_DAMAGED)
    return bool(finite)


def sound(messages: Together[Message]) -> bool:
    """Whether the ranks in messages with Elias and Fano's positions ascend, to as many entries as there is room for."""
    return bool(kernels().safusion_sound(messages.described, messages.number) == messages.number)


def take(x: Tensor, places: np.ndarray, values: np.ndarray) -> None:
    """``values[:] = x[places]``: x float32, contiguous, places int32 [K], values float32 [K]."""
    kernels().safusion_take(x.numpy(), places, len(places), values)


def take_out(memory: Tensor, indices: Tensor, sent: Tensor) -> None:
    """``memory[indices] -= sent``, one after the other: float32 [D], int64 [K], float32 [K], all contiguous."""
    kernels().safusion_take_out(memory.numpy(), indices.numpy(), sent.numpy(), len(indices))


def take_out_message(memory: Tensor, message: Message) -> None:
    """``memory[position] -= value`` for all entries of a message: float32 [D], contiguous; errors as of the mean."""
    if not kernels().safusion_add_message(message.described, len(memory), -1, memory.numpy()):
        raise ValueError(_DAMAGED)


def check_entries(number: int, room: int) -> None:
    """Raises ValueError unless the number of entries that a message gives is from 0 to the room for them."""
    if not 0 <= number <= room:
        raise ValueError(f"a message with {number} entries has room for {room}: it is damaged")


class EliasFano(NamedTuple):
    """Fields of a message."""

    #: [R + 1], entries before each region, and in all: uint16 if there is room for fewer than 2^16, or uint32.
    ranks: np.ndarray
    high: np.ndarray  #: uint64, for each bucket a 1 for every entry, then a 0; the lowest bit comes first
    low: np.ndarray  #: uint32, the places of entries in their buckets, one behind the other


def write_elias_fano(
    positions: np.ndarray, below: int, runs: np.ndarray, low_bits: int, room: int, into: EliasFano
) -> None:
    """Writes every byte of the fields.

    Args:
        positions: int32 or int64 [K], ascending, each in a run.
        below: Positions from this number on are padding.
        runs: int64 [T, 4], where each begins and ends, and the buckets and regions before it.
        low_bits: Of a position in its bucket.
        room: For entries.
        into: Fields.

    Raises:
        ValueError: If positions do not ascend, or lie in no run.
    """
    described = positions, 8 * positions.itemsize, len(positions), below, runs, len(runs), low_bits, room
    ranks, high, low = into
    if not kernels().safusion_elias_fano(*described, ranks, ranks.nbytes, high, len(high), low, len(low)):
        raise ValueError("a selection's positions do not ascend, or lie in tensors that have no quota")


def number_marked(bitmap: np.ndarray) -> int:
    """How many bits are set in a bitmap (uint8 [B])."""
    return kernels().safusion_marked(bitmap, len(bitmap), None)


def marked(bitmap: np.ndarray) -> np.ndarray:
    """Ascending places (int64 [K]) of the bits that are set in a bitmap (uint8 [B], the lowest bit of a byte first)."""
    found = empty(number_marked(bitmap), np.int64)
    kernels().safusion_marked(bitmap, len(bitmap), address(found))
    return found


def mark(positions: np.ndarray, bitmap: np.ndarray) -> None:
    """The inverse of :func:`marked`: writes the whole bitmap, without positions (int32 or int64 [K]) behind its end."""
    bitmap[:] = 0
    kernels().safusion_mark(positions, 8 * positions.itemsize, len(positions), 8 * len(bitmap), bitmap)


def quantize(positions: np.ndarray, values: np.ndarray, into: Codes, sent: np.ndarray | None = None) -> bool:
    """Codes of values relative to the largest magnitude of their part; with one bit, to twice the mean magnitude.

    Args:
        positions: int32 or int64 [K].
        values: float32 [K].
        into: Codes, zeros at first and of K values or more, and scales are written.
        sent: float32 [K], is written: the decoded values. None leaves that out.

    Returns:
        False if positions do not ascend, or a value or scale is not finite in bfloat16.
    """
    described = positions, 8 * positions.itemsize, len(positions)
    parts = into.starts, len(into.starts), into.bits, into.codes, into.scales
    echo = None if sent is None else address(sent)
    return bool(kernels().safusion_quantize(*described, values, *parts, echo))


def values(positions: np.ndarray, of: Codes, first: int = 0) -> np.ndarray | None:
    """What :func:`quantize` has written, float32 [K]; None if positions do not ascend.

    Args:
        positions: int64 [K].
        of: Codes and scales of the parts that these lie in; ValueError if there are too few.
        first: How many codes there are before that of the first position.
    """
    if len(of.codes) * 8 // of.bits < first + len(positions) or len(of.scales) != len(of.starts):
        sizes = f"{len(of.codes)} bytes of codes and {len(of.scales)} scales"
        raise ValueError(f"a message of {sizes} is damaged: {len(positions)} entries in {len(of.starts)} parts")
    found = empty(len(positions), np.float32)
    parts = of.starts, len(of.starts), of.bits, of.codes, first, of.scales
    return found if kernels().safusion_values(positions, len(positions), *parts, found) else None


class Outgoing:
    """Where a message of Elias and Fano's positions and of codes is to be written, in arrays that stay where they are.

    Args:
        below, runs, low_bits, room, fields: See :func:`write_elias_fano`.
        codes, field: For values; codes and scales lie in ``field``, uint8, all bytes of values.
    """

    def __init__(
        self, below: int, runs: np.ndarray, low_bits: int, room: int, fields: EliasFano, codes: Codes, field: np.ndarray
    ) -> None:
        self._held = runs, fields, codes, field
        ranks, high, low = fields
        places = [at(ranks), ranks.nbytes, at(high), len(high), at(low), len(low)]
        coded = [at(field), len(field), codes.bits, at(codes.scales), at(codes.starts), len(codes.starts)]
        #: int64 [17], ``struct outgoing``; holds as long as this does.
        self.described = np.array([below, at(runs), len(runs), low_bits, room, *places, *coded], np.int64)


_M = TypeVar("_M", Message, Outgoing)


class Together(Generic[_M]):
    """Several messages that one call reads or writes. They stay where they are."""

    def __init__(self, messages: Sequence[_M]) -> None:
        self.messages: Sequence[_M] = messages
        self.number = len(messages)
        #: int64 [14 or 17 for each], what C is told of them.
        self.described = np.concatenate([_NONE, *(message.described for message in messages)])


def write_messages(
    positions: np.ndarray,
    values: np.ndarray,
    counts: np.ndarray,
    messages: Together[Outgoing],
    sent: np.ndarray | None = None,
) -> bool:
    """Writes every byte of the fields of several messages: :func:`write_elias_fano` and :func:`quantize`.

    Args:
        positions: int32 or int64 [K], those for one message behind those for the one before.
        values: float32 [K].
        counts: int64, entries of each message.
        messages: Where they are written, as many as counts.
        sent: float32 [K], is written: the decoded values. None leaves that out.

    Returns:
        False if a message has no room for its entries, positions do not ascend or lie in no run, or a value or scale is
        not finite in bfloat16. What was written is to be written again then.
    """
    echo = None if sent is None else address(sent)
    given = positions, 8 * positions.itemsize, counts, values, messages.described, messages.number, echo
    return bool(kernels().safusion_write(*given) == messages.number)


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


def crc32c(data: np.ndarray) -> int:
    """CRC-32C of uint8 [B], contiguous (Castagnoli's polynomial, as in iSCSI: RFC 3720, section 12.1).

    The compiled kernel asks the processor for its own instructions. Without it Python reads byte by byte, about ten
    megabytes per second.
    """
    if usable():
        found: int = kernels().safusion_crc32c(data, len(data), 0)
        return found
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data.tobytes():
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


@cache
def _crc_table() -> list[int]:
    table = np.arange(256)
    for _ in range(8):
        table = table >> 1 ^ (table & 1) * _POLYNOMIAL
    found: list[int] = table.tolist()
    return found

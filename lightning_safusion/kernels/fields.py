"""What all readers and writers of a message agree on: those in PyTorch and NumPy, in C and in Triton.

C has its own copies in its headers, which a test compares with these (``tests/kernels/test_fields.py``).
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import NamedTuple

#: Bytes at a multiple of which fields begin in messages, and messages in memory: where these begin elsewhere than at a
#: multiple of 16, NCCL moves single bytes, and 128 are a line of a device's caches.
FIELD_BYTES, MESSAGE_BYTES = 16, 128
#: Buckets of a region of Elias and Fano's positions, as a power of two.
REGION_BITS = 9
#: With room for fewer entries than this the ranks of a message have 16 bits, else 32.
NARROW_RANKS = 1 << 16


class TensorFlag(IntFlag):
    """State of one tensor on one rank in this step, in the header of every message."""

    FRESH = 1  #: its gradient was computed in this step and is in the message
    BAD = 2  #: its gradient is not finite and is not in the message
    BYPASS = 4  #: its gradient must bypass compression (see Engine)


class Notice(IntFlag):
    """Messages of a rank to all others, in the header of its messages."""

    FAILED = 1  #: it could not fill a message
    TERMINATE = 2  #: it was asked to end (SIGTERM)
    REQUEUE = 4  #: it was asked to save and make room (the requeue signal of a cluster)
    INTERRUPT = 8  #: its user wants it to stop (SIGINT, Ctrl-C)
    OPENED = 16  #: its first windows, which send the most, have lasted long enough


class Positions(IntEnum):
    """How a message says which elements its values belong to."""

    EVERY = 0  #: a value for each element
    LISTED = 1  #: positions in the span, 64 bits each, with values in float32
    ELIAS_FANO = 2  #: see :class:`~lightning_safusion.comm.wire.elias_fano.EliasFanoCodec`


class Encoded(NamedTuple):
    """``struct message`` of the compiled kernels: of one message addresses (0: none) and numbers, int64 each."""

    kind: int  #: of :class:`Positions`
    values: int  #: floats, or codes, the first of a byte in its lowest bits
    value_bits: int  #: 32: float32; 16: bfloat16; 4, 2, 1: codes
    room: int = 0  #: most entries; of listed positions their number
    positions: int = 0  #: listed ones, or the high bits of Elias and Fano's
    #: Of codes a bfloat16 for each part of the span, where these begin, and their number.
    scales: int = 0
    starts: int = 0
    parts: int = 0
    #: Entries before each region, and in all; regions.
    ranks: int = 0
    regions: int = 0
    #: The places of entries in their buckets, and their bits.
    low: int = 0
    low_bits: int = 0
    #: Where tensors begin and end, with the buckets and regions before each; their number.
    runs: int = 0
    run_count: int = 0

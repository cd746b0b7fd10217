"""The rows of the tables that kernels read, by name: arrays are made from these tuples, and read at their places.

A kernel imports a place by the name of its row in capitals: ``EDGES`` is 0, the first row of the table of tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class TensorRows(NamedTuple):
    """The table of tensors, or parts of them, int32 [15, T + 1]."""

    edges: np.ndarray  #: the first element of each
    quotas: np.ndarray  #: how many of its elements are sent
    spans: np.ndarray  #: chunks before it
    buckets: np.ndarray  #: buckets before it
    regions: np.ndarray  #: regions before it
    parts: np.ndarray  #: parts before it
    part_bits: np.ndarray  #: elements of a part, as a power of two
    slots: np.ndarray  #: entries before it where every tensor fills its quota
    kinds: np.ndarray  #: the kind of its gradient
    shapes: np.ndarray  #: where its message is described
    flags: np.ndarray  #: its place in the header
    elsewhere: np.ndarray  #: its first element in another memory
    rows: np.ndarray  #: histograms of the first digit before it
    lists: np.ndarray  #: slots for candidates before it
    ranked: np.ndarray  #: whether it has regions


class AddressRows(NamedTuple):
    """The table of addresses, int64 [4, T]."""

    grads: np.ndarray  #: of the gradient
    moments: np.ndarray  #: of the optimizer's second moment, or 0
    lanes: np.ndarray  #: bytes from the beginning of a message to the tensor's dense lane, or -1
    sums: np.ndarray  #: of what means are added up in; 0 leaves the tensor as it is


class MessageRow(NamedTuple):
    """The description of a message, int32 [16]; words are counted from the beginning of the memory of all messages."""

    capacity: int  #: most entries
    low_bits: int  #: bits of a position in its bucket
    region_count: int  #: regions
    part_count: int  #: parts
    ranks: int  #: words before this field
    high: int  #: and before these
    low: int
    codes: int
    scales: int
    end: int  #: the word behind the message
    header_bytes: int  #: of the header
    start: int  #: words before the message
    room: int  #: entries that it has
    earlier_entries: int  #: entries of the messages before it
    earlier_parts: int  #: parts of the messages before it
    values_kind: int  #: the kind of its values


class TileRows(NamedTuple):
    """The table of tiles, int32 [8, n], and behind it in that of a window the buffer of each."""

    tile_tensor: np.ndarray  #: its tensor
    tile_region: np.ndarray  #: its region; -1 for a lane
    tile_begin: np.ndarray  #: elements of the region before it
    tile_size: np.ndarray  #: its elements
    tile_offset: np.ndarray  #: elements of the tensor before it
    tile_bucket: np.ndarray  #: buckets before the region
    tile_buckets: np.ndarray  #: buckets of the region
    tile_elements: np.ndarray  #: elements of the region


class BufferRow(NamedTuple):
    """What the end of a window is told of a buffer, int64 [13]: addresses, where nothing else is said."""

    own_message: int  #: its own messages
    own_shapes: int  #: where these are described
    own_tensors: int  #: its table of tensors
    own_addresses: int  #: its table of addresses
    own_memory: int  #: its span of the residual
    owner_sums: int = 0  #: the sums that an owner has from others, or 0
    own_number: int = 0  #: tensors or parts of them: a number
    own_header: int = 0  #: this rank's header that is reported, or 0
    other_headers: int = 0  #: the headers of others
    header_ranks: int = 0  #: how many these are
    header_stride: int = 0  #: bytes from one to the next
    header_heads: int = 0  #: tensors in one
    report_place: int = 0  #: the place of the headers in the report


_TABLES: tuple[Any, ...] = (TensorRows, AddressRows, MessageRow, TileRows, BufferRow)
#: Of each row its place in its table; no two tables have a name in common.
PLACES: dict[str, int] = {name: place for table in _TABLES for place, name in enumerate(table._fields)}


def __getattr__(name: str) -> Any:
    if not name.isupper() or name.lower() not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import triton.language as tl  # whoever only fills tables needs no Triton

    return tl.constexpr(PLACES[name.lower()])

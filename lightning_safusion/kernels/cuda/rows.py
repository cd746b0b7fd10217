"""The rows of the tables that kernels read, by name: arrays are made from these tuples, and read at their places.

A kernel imports a place by the name of its row in capitals: ``EDGES`` is 0, the first row of the table of tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class TensorRows(NamedTuple):
    """The table of tensors, or parts of them, int32 [15, T + 1].

    Args:
        edges: The first element of each.
        quotas: How many of its elements are sent.
        spans, buckets, regions, parts: How many chunks, buckets, regions and parts there are before it.
        part_bits: Elements of a part, as a power of two.
        slots: Entries before it where every tensor fills its quota.
        kinds: The kind of its gradient.
        shapes: Where its message is described.
        flags: Its place in the header.
        elsewhere: Its first element in another memory.
        rows, lists: Histograms of the first digit, and slots for candidates, before it.
        ranked: Whether it has regions.
    """

    edges: np.ndarray
    quotas: np.ndarray
    spans: np.ndarray
    buckets: np.ndarray
    regions: np.ndarray
    parts: np.ndarray
    part_bits: np.ndarray
    slots: np.ndarray
    kinds: np.ndarray
    shapes: np.ndarray
    flags: np.ndarray
    elsewhere: np.ndarray
    rows: np.ndarray
    lists: np.ndarray
    ranked: np.ndarray


class AddressRows(NamedTuple):
    """The table of addresses, int64 [4, T].

    Args:
        grads, moments: Of the gradient; of the optimizer's second moment, or 0.
        lanes: Bytes from the beginning of a message to the tensor's dense lane, or -1.
        sums: Of what means are added up in; 0 leaves the tensor as it is.
    """

    grads: np.ndarray
    moments: np.ndarray
    lanes: np.ndarray
    sums: np.ndarray


class MessageRow(NamedTuple):
    """The description of a message, int32 [16].

    Args:
        capacity: Most entries.
        low_bits: Bits of a position in its bucket.
        region_count, part_count: Regions, and parts.
        ranks, high, low, codes, scales, end: Words before these fields; the last is the word behind the message.
        header_bytes: Of the header.
        start: Words before the message.
        room: Entries that it has.
        earlier_entries, earlier_parts: Those of the messages before it.
        values_kind: The kind of its values.
    """

    capacity: int
    low_bits: int
    region_count: int
    part_count: int
    ranks: int
    high: int
    low: int
    codes: int
    scales: int
    end: int
    header_bytes: int
    start: int
    room: int
    earlier_entries: int
    earlier_parts: int
    values_kind: int


class TileRows(NamedTuple):
    """The table of tiles, int32 [8, n], and behind it in that of a window the buffer of each.

    Args:
        tile_tensor, tile_region: Its tensor, and its region; -1 for a lane.
        tile_begin: Elements of the region before it.
        tile_size: Its elements.
        tile_offset: Elements of the tensor before it.
        tile_bucket, tile_buckets, tile_elements: Buckets before the region, its buckets, and its elements.
    """

    tile_tensor: np.ndarray
    tile_region: np.ndarray
    tile_begin: np.ndarray
    tile_size: np.ndarray
    tile_offset: np.ndarray
    tile_bucket: np.ndarray
    tile_buckets: np.ndarray
    tile_elements: np.ndarray


class BufferRow(NamedTuple):
    """What the end of a window is told of a buffer, int64 [13]: addresses, where nothing else is said.

    Args:
        own_message, own_shapes, own_tensors, own_addresses: Its own messages, and its tables.
        own_memory: Its span of the residual.
        owner_sums: The sums that an owner has from others, or 0.
        own_number: Tensors or parts of them.
        own_header, other_headers: This rank's header that is reported, or 0, and those of others.
        header_ranks, header_stride, header_heads: How many these are, bytes from one to the next, tensors in one.
        report_place: Their place in the report.
    """

    own_message: int
    own_shapes: int
    own_tensors: int
    own_addresses: int
    own_memory: int
    owner_sums: int = 0
    own_number: int = 0
    own_header: int = 0
    other_headers: int = 0
    header_ranks: int = 0
    header_stride: int = 0
    header_heads: int = 0
    report_place: int = 0


_TABLES: tuple[Any, ...] = (TensorRows, AddressRows, MessageRow, TileRows, BufferRow)
#: Of each row its place in its table; no two tables have a name in common.
PLACES: dict[str, int] = {name: place for table in _TABLES for place, name in enumerate(table._fields)}


def __getattr__(name: str) -> Any:
    if not name.isupper() or name.lower() not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import triton.language as tl  # whoever only fills tables needs no Triton

    return tl.constexpr(PLACES[name.lower()])

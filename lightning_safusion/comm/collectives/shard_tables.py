"""How a buffer whose shards have owners is described to the kernels of a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.collectives.shards import Pieces
from lightning_safusion.comm.exchange import aligned
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.comm.wire.elias_fano import EliasFanoCodec
from lightning_safusion.kernels.cuda.tables import FOUR_BITS, Cut, Message, Runs, ShardTables, Tables


def shard_tables(exchange: ShardedExchange, kinds: np.ndarray) -> ShardTables | None:
    """The tables of an exchange; None if kernels cannot write and read its messages.

    Args:
        exchange: Of pieces that are whole tensors or parts of one.
        kinds: int64 [T], of gradients.
    """
    edges, rank, pieces = np.asarray(exchange.spec.edges, np.int64), exchange.transport.rank, exchange.first
    starts, stops = pieces.runs.T
    tensors = np.minimum(edges.searchsorted(starts, side="right"), len(kinds)) - 1
    header, lanes = exchange.header, _lanes(exchange)
    first, sizes = _formats(pieces, exchange.out, exchange.out_sizes, header), exchange.out_sizes
    second = _formats(exchange.second, exchange.delivered, [exchange.gathered_sums.shape[1]] * len(sizes), 0)
    if first is None or second is None or lanes is None or (stops > edges[tensors + 1]).any():
        return None
    begins = np.cumsum(sizes) - sizes
    # this worker keeps what it selects in its own shard, and a header
    first[rank], begins[rank] = _only_header(aligned(header), header), sum(sizes)
    inside, own = starts - edges[tensors], (pieces.owners == rank) & (pieces.quotas > 0)
    shard = np.where(own, pieces.sizes, 0)
    cut = Cut(tensors, inside, pieces.owners, first, (begins // 4).tolist(), shard.cumsum() - shard, len(kinds))
    none, whole = np.full(len(tensors), -1), np.append(starts, edges[-1])
    sent = np.where(pieces.owners == rank, 0, pieces.quotas)
    dense = np.where(lanes[tensors] != -1, lanes[tensors] + inside * _WIDTHS[kinds[tensors]], -1)
    return ShardTables(
        Tables(whole, sent, 0, kinds[tensors], none, _together(pieces, first), cut),
        Tables(
            whole,
            exchange.second.quotas,
            0,
            kinds[tensors],
            dense,
            _together(exchange.second, second),
            cut._replace(messages=second, starts=[0] * len(second)),
        ),
        _of_shard(pieces.owned(rank), exchange.out[rank], exchange.arriving.shape[1], header),
        _of_shard(exchange.second.owned(rank), exchange.delivered[rank], len(exchange.sums), 0),
    )


# Bytes of an element of each kind.
_WIDTHS = np.array([4, 2, 2])


def _only_header(nbytes: int, header: int) -> Message:
    return Message(0, 0, 0, (header // 4,) * 5, nbytes, header, None)


def _formats(pieces: Pieces, codecs: Sequence[Codec | None], sizes: Sequence[int], header: int) -> list[Message] | None:
    found = []
    for owner, (codec, nbytes) in enumerate(zip(codecs, sizes, strict=True)):
        message = _format(pieces.owned(owner), codec, nbytes, header)
        if message is None:
            return None
        found.append(message)
    return found


def _format(pieces: Pieces, codec: Codec | None, nbytes: int, header: int) -> Message | None:
    if codec is None:
        return _only_header(nbytes, header)
    starts, stops = pieces.runs.T
    return codec.message(starts, stops, nbytes, header, header) if isinstance(codec, EliasFanoCodec) else None


def _together(pieces: Pieces, messages: Sequence[Message]) -> Message:
    """Several messages as one: where each piece lies in its own, and what they have together."""
    number = len(pieces.quotas)
    buckets, regions, parts, bits = (np.zeros(number + 1, np.int64) for _ in range(4))
    for owner, message in enumerate(messages):
        if message.runs is not None:
            mine, runs = np.flatnonzero((pieces.owners == owner) & (pieces.quotas > 0)), message.runs
            buckets[mine], regions[mine] = runs.buckets[:-1], runs.regions[:-1]
            parts[mine], bits[mine] = runs.parts, runs.part_bits
    capacity, scales = sum(message.capacity for message in messages), sum(message.parts for message in messages)
    kinds = {message.values for message in messages if message.capacity} or {FOUR_BITS}
    return Message(capacity, 0, scales, (0,) * 5, 0, 0, Runs(buckets, regions, parts[:-1], bits[:-1]), kinds.pop())


def _of_shard(pieces: Pieces, codec: Codec | None, nbytes: int, header: int) -> Tables | None:
    """The tables of a shard, its pieces one behind the other; None if it has none."""
    message = _format(pieces, codec, nbytes, header)
    if codec is None or message is None:
        return None
    number = len(pieces.quotas)
    zeros = np.zeros(number, np.int64)
    cut = Cut(zeros, zeros, zeros, [message], [0], pieces.runs[:, 0], 0)
    edges = np.append(0, pieces.sizes.cumsum())
    return Tables(edges, pieces.quotas, 0, zeros, np.full(number, -1), message, cut)


def _lanes(exchange: ShardedExchange) -> np.ndarray | None:
    """int64 [T], bytes of the lane's memory before each dense tensor, -1 for others; None if kernels do not fill it.

    They do not where gradients and lane have different types, or float16, which is cut before it is divided.
    """
    spec, lane = exchange.spec, exchange.lane
    lanes, edges = np.full(spec.num_tensors, -1), lane.spec.edges
    for tensor in spec.dense_tensors:
        start = spec.edges[tensor]
        dtype = next(dtype for first, last, dtype in spec.dense_runs if first <= start < last)
        if dtype != lane.dtype or dtype == torch.float16:
            return None
        lanes[tensor] = edges[tensor] * dtype.itemsize
    return lanes
